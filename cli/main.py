"""The `kvlens` command: the composition root, where rooms that do not know each other are put together.

A room is imported when its command runs: the light install has no torch, and `--help` answers at once.
"""

from __future__ import annotations

import sys
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvlens import KvlensError, __version__

app = typer.Typer(
    help="Shows who holds the KV cache of an LLM serving engine, and catches KV leaks.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)  # fmt: skip
findings_app = typer.Typer(help="The stored findings of an observer.", no_args_is_help=True)
faults_app = typer.Typer(help="Leaks to switch on in a running engine, to see your pager ring.", no_args_is_help=True)
dashboards_app = typer.Typer(help="Grafana dashboard and alert rules.", no_args_is_help=True)
bench_app = typer.Typer(help="Measurements, as ratios taken in one run.", no_args_is_help=True)
app.add_typer(findings_app, name="findings")
app.add_typer(faults_app, name="faults")
app.add_typer(dashboards_app, name="dashboards")
app.add_typer(bench_app, name="bench")

OBSERVER = "http://127.0.0.1:9400"
ENGINE = "http://127.0.0.1:30000"

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
ObserverUrl = Annotated[str, typer.Option("--url", help="The observer.")]
Token = Annotated[str | None, typer.Option("--token", envvar="KVLENS_TOKEN", help="Bearer token of the observer.")]


class CacheKind(str, Enum):
    radix = "radix"
    chunk = "chunk"


class ContractsMode(str, Enum):
    report = "report"
    strict = "strict"


def print_json(value: Any) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(value)).decode())


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        typer.echo(f"kvlens {__version__}")
        raise typer.Exit


@app.command()
def demo(
    headless: Annotated[bool, typer.Option(help="No terminal: run, then print a summary.")] = False,
    seconds: Annotated[float | None, typer.Option(min=2, help="How long; headless 20, else until q.")] = None,
    fault: Annotated[str | None, typer.Option(help="Switch this fault on once; see `kvlens faults list`.")] = None,
    users: Annotated[int, typer.Option(min=1, max=256, help="Synthetic users.")] = 8,
    json: Json = False,
) -> None:
    """Engine, observer, synthetic users and terminal dashboard in one go. Exit code 1 when there was a finding."""
    from kvlens.cli.demo import DemoConfig, run_demo

    if fault is not None:
        _known_fault(fault)
    raise typer.Exit(run_demo(DemoConfig(headless or json, seconds, fault, users), as_json=json))


@app.command()
def serve(
    model: Annotated[str, typer.Option(help="`builtin`, or a Llama- or Qwen-style checkpoint directory.")] = "builtin",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 30000,
    ring: Annotated[Path | None, typer.Option(help="Flight recorder file; default: the ring directory.")] = None,
    ring_mib: Annotated[int, typer.Option(min=1, help="Size of the flight recorder.")] = 32,
    observed: Annotated[bool, typer.Option("--observed/--unobserved", help="Write a flight recorder.")] = True,
    engine_name: Annotated[str, typer.Option(help="Label `engine` of metrics; default host:port.")] = "",
    pool_slots: Annotated[int, typer.Option(min=16, help="KV slots (tokens).")] = 8192,
    page_size: Annotated[int, typer.Option(min=1, max=1024, help="Slots per page.")] = 1,
    max_running: Annotated[int, typer.Option(min=1, help="Requests in one batch (rows).")] = 64,
    max_queued: Annotated[int, typer.Option(min=1, help="Requests that may wait; more get a 503.")] = 2048,
    context_length: Annotated[int | None, typer.Option(min=2, help="At most the model's own.")] = None,
    chunked_prefill_size: Annotated[int, typer.Option(min=1, help="Prompt tokens per step; more is chunked.")] = 512,
    cache: Annotated[CacheKind, typer.Option(help="Prefix cache.")] = CacheKind.radix,
    contracts: Annotated[ContractsMode, typer.Option(help="When a check fails.")] = ContractsMode.report,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="cpu, cuda, or auto.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: by the model's size.")] = None,
    allow_faults: Annotated[bool, typer.Option(help="Accept POST /faults/NAME.")] = False,
) -> None:
    """The engine with its OpenAI-compatible HTTP server."""
    options = dict(locals())
    from kvlens.cli.serve import run_serve

    run_serve(options)


@app.command()
def observe(
    ring: Annotated[list[Path] | None, typer.Option(help="Follow this recorder; may be repeated.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 9400,
    store: Annotated[Path | None, typer.Option(help="Findings database; default: the state directory.")] = None,
    token: Token = None,
) -> None:
    """The daemon: follows flight recorders (yours in the ring directory unless told), judges, exports."""
    from kvlens.cli.observe import run_observe

    run_observe(rings=ring or [], host=host, port=port, store=store, token=token)


@app.command()
def top(
    url: Annotated[str, typer.Argument(help="The observer.")] = OBSERVER,
    once: Annotated[bool, typer.Option(help="Print one picture and leave.")] = False,
    json: Json = False,
    token: Token = None,
) -> None:
    """Terminal dashboard. `--once` exits with 1 when a finding is open."""
    from kvlens.cli.top import run_top

    raise typer.Exit(run_top(url, once=once or json, as_json=json, token=token))


@app.command()
def doctor(
    url: Annotated[str, typer.Option(help="The observer to look for.")] = OBSERVER,
    json: Json = False,
    token: Token = None,
) -> None:
    """What is installed, on what device, what is reachable, what is misconfigured."""
    from kvlens.cli.doctor import examine, report_lines

    report = examine(url, token)
    if json:
        print_json(report)
    else:
        for line in report_lines(report):
            typer.echo(line)
    raise typer.Exit(0 if report.healthy else 1)


@findings_app.command("list")
def findings_list(
    url: ObserverUrl = OBSERVER,
    open_only: Annotated[bool, typer.Option("--open", help="Leave out what is resolved.")] = False,
    json: Json = False,
    token: Token = None,
) -> None:
    """All findings, newest first. Exit code 1 when one is open."""
    from kvlens.cli.findings import fetch_findings, finding_line, is_open

    found = [finding for finding in fetch_findings(url, token) if is_open(finding) or not open_only]
    if json:
        print_json({"findings": found})
    for line in [] if json else map(finding_line, found):
        typer.echo(line)
    if not found and not json:
        typer.echo("no finding")
    raise typer.Exit(int(any(map(is_open, found))))


@findings_app.command("show")
def findings_show(
    finding_id: Annotated[str, typer.Argument(help="Its id, as `list` prints it.")],
    url: ObserverUrl = OBSERVER,
    json: Json = False,
    token: Token = None,
) -> None:
    """One finding with its evidence."""
    from kvlens.cli.findings import fetch_finding, finding_details

    finding = fetch_finding(url, token, finding_id)
    if json:
        print_json(finding)
    else:
        for line in finding_details(finding):
            typer.echo(line)


@findings_app.command("ack")
def findings_ack(
    finding_id: Annotated[str, typer.Argument(help="Its id, as `list` prints it.")],
    url: ObserverUrl = OBSERVER,
    token: Token = None,
) -> None:
    """Say that somebody is on it."""
    from kvlens.cli.findings import acknowledge

    acknowledge(url, token, finding_id)
    typer.echo(f"{finding_id} acknowledged")


@faults_app.command("list")
def faults_list(json: Json = False) -> None:
    """Every fault, and the kind of finding it must lead to."""
    from kvlens.engine.faults.catalog import FAULTS

    if json:
        print_json(
            {"faults": [{"name": f.name, "kind": f.kind, "description": f.description} for f in FAULTS.values()]}
        )
        return
    for fault in FAULTS.values():
        typer.echo(f"{fault.name:<28} {fault.kind:<28} {fault.description}")


@faults_app.command("enable")
def faults_enable(
    name: Annotated[str, typer.Argument(help="See `kvlens faults list`.")],
    url: Annotated[str, typer.Option(help="An engine started with --allow-faults.")] = ENGINE,
    times: Annotated[int, typer.Option(min=1, help="How often.")] = 1,
    always: Annotated[bool, typer.Option(help="Every time, until it is disabled.")] = False,
) -> None:
    """Switch a fault on in a running engine."""
    from kvlens.cli.faults import switch

    _known_fault(name)
    switch(url, name, enabled=True, times=None if always else times)
    typer.echo(f"{name} is on")


@faults_app.command("disable")
def faults_disable(
    name: Annotated[str, typer.Argument(help="See `kvlens faults list`.")],
    url: Annotated[str, typer.Option(help="An engine started with --allow-faults.")] = ENGINE,
) -> None:
    """Switch a fault off again."""
    from kvlens.cli.faults import switch

    _known_fault(name)
    switch(url, name, enabled=False, times=None)
    typer.echo(f"{name} is off")


@dashboards_app.command("build")
def dashboards_build(
    out: Annotated[Path, typer.Option(help="Directory for the JSON and YAML files.")] = Path("dashboards/built"),
    runbooks: Annotated[str | None, typer.Option(help="Address of docs/runbooks, for the alerts' links.")] = None,
) -> None:
    """Write the Grafana dashboard and the alert rules; in a checkout, docs/metrics.md too."""
    from kvlens.cli.dashboards import build_to

    for path in build_to(out, runbooks):
        typer.echo(path)


@dashboards_app.command("check")
def dashboards_check(
    prometheus: Annotated[str, typer.Option(help="Prometheus that scrapes the observer.")] = "http://127.0.0.1:9090",
    json: Json = False,
) -> None:
    """Ask Prometheus every panel's query. Exit code 1 when one has no data."""
    from kvlens.cli.dashboards import check_panels

    raise typer.Exit(check_panels(prometheus, as_json=json))


@bench_app.command("publish")
def bench_publish_command(json: Json = False) -> None:
    """Time to publish one step frame and one key frame at 8, 64 and 256 held rows."""
    from kvlens.cli.bench_publish import bench_publish

    _print_rows(bench_publish(), json)


@bench_app.command("overhead")
def bench_overhead_command(
    pairs: Annotated[int, typer.Option(min=10, help="Interleaved on/off blocks.")] = 200,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Decode throughput observed against unobserved, in interleaved blocks of one process."""
    from kvlens.cli.bench_overhead import bench_overhead

    _print_rows(bench_overhead(pairs=pairs, device=device), json)


@bench_app.command("generate")
def bench_generate_command(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Json = False,
) -> None:
    """Generation against `transformers` on the same weights at batch 1, 8 and 64."""
    from kvlens.engine.bench.generate import bench_generate
    from kvlens.engine.model.config import resolve_model

    _print_rows(bench_generate(resolve_model("builtin"), device=device), json)


def _print_rows(rows: list[dict[str, Any]], json: bool) -> None:
    if json:
        print_json(rows)
        return
    for row in rows:
        typer.echo("  ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}"
                             for key, value in row.items()))  # fmt: skip


def _known_fault(name: str) -> None:
    from kvlens.engine.faults.catalog import FAULTS

    if name not in FAULTS:
        raise KvlensError(f"there is no fault {name}: choose {', '.join(FAULTS)}")


def main() -> None:
    """The console script: a person's mistake ends in one line and exit code 2, never in a traceback."""
    try:
        app()
    except KvlensError as error:
        typer.echo(f"kvlens: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
