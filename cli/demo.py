"""`kvlens demo`: engine, observer, synthetic users and the terminal dashboard in one go."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import typer

from kvlens import KvlensError
from kvlens.cli.findings import fetch_findings, finding_line
from kvlens.cli.processes import Served
from kvlens.cli.users import SyntheticUsers, UsersConfig, UserTotals
from kvlens.observer.schema import EngineState, Finding, State

# Small enough that the cache evicts and long prompts come in chunks within seconds.
ENGINE_OPTIONS = ("--pool-slots", "6144", "--page-size", "16", "--chunked-prefill-size", "128", "--max-running", "16")


@dataclass(frozen=True, slots=True)
class DemoConfig:
    """What the demo runs and for how long."""

    headless: bool = False
    seconds: float | None = None
    """None: until the dashboard is closed, or 20 when headless."""
    fault: str | None = None
    """Switched on once, a quarter into the run; after 5 s when it has no end."""
    users: int = 8

    def users_of(self, url: str) -> UsersConfig:
        """Under a fault, more of what it needs: prompts in chunks, and people who hang up."""
        if self.fault is None:
            return UsersConfig(url, users=self.users)
        return UsersConfig(url, users=self.users, hang_up=0.2, long_prompts=0.5)


@dataclass(frozen=True, slots=True)
class Stage:
    """The two processes of a running demo."""

    engine: Served
    observer: Served


@contextlib.contextmanager
def stage() -> Iterator[Stage]:
    """Engine and observer on free ports, with a ring and a store of their own."""
    with tempfile.TemporaryDirectory(prefix="kvlens-demo-") as home, contextlib.ExitStack() as stack:
        ring, store = Path(home) / "demo.ring", Path(home) / "findings.db"
        serve = ["serve", "--port", "0", "--engine-name", "demo", "--ring", str(ring), "--allow-faults"]
        engine = stack.enter_context(Served("the engine", [*serve, *ENGINE_OPTIONS], Path(home) / "engine.log"))
        observe = ["observe", "--port", "0", "--ring", str(ring), "--store", str(store)]
        observer = stack.enter_context(Served("the observer", observe, Path(home) / "observer.log"))
        yield Stage(engine, observer)


class HeadlessRun:
    """Users against a stage for a fixed time, and what the observer saw of it."""

    def __init__(self, stage: Stage, config: DemoConfig) -> None:
        self._stage = stage
        self._config = config
        self._seconds = config.seconds if config.seconds is not None else 20.0

    async def run(self) -> dict[str, Any]:
        """The summary, with the keys of `kvlens demo --json`."""
        stop = asyncio.Event()
        users = SyntheticUsers(self._config.users_of(self._stage.engine.url))
        asking = asyncio.create_task(users.run(stop))
        async with aiohttp.ClientSession() as session:
            started = time.monotonic()
            await asyncio.sleep(self._seconds / 4)
            if self._config.fault:
                await switch_fault(session, self._stage.engine.url, self._config.fault)
            await asyncio.sleep(self._seconds * 3 / 4)
            stop.set()
            totals = await asking
            elapsed = time.monotonic() - started
            engine = await self._settled(session)
            findings = await _get(session, f"{self._stage.observer.url}/api/v1/findings")
        return summary(engine, msgspec.convert(findings["findings"], list[Finding]), totals, elapsed)

    async def _settled(self, session: aiohttp.ClientSession) -> EngineState:
        """The engine's state once it is idle and an idle audit has been seen; the last one after 30 s."""
        idle_since: float | None = None
        for _ in range(300):
            self._stage.engine.check()
            self._stage.observer.check()
            state = msgspec.convert(await _get(session, f"{self._stage.observer.url}/api/v1/state"), State)
            if not state.engines:
                raise KvlensError("the observer saw no frame from the engine")
            engine = state.engines[0]
            if engine.running or engine.waiting or any(engine.live.values()):
                idle_since = None
            elif idle_since is None:
                idle_since = engine.updated_at
            elif engine.updated_at > idle_since + 1.0:
                break
            await asyncio.sleep(0.1)
        return engine


def summary(engine: EngineState, findings: list[Finding], users: UserTotals, elapsed: float) -> dict[str, Any]:
    """One run as plain data. `elapsed` is seconds, from the first request to the last answer."""
    tallies = engine.tallies
    return {
        "steps": engine.step,
        "seconds": round(elapsed, 1),
        "requests": {
            "finished": tallies.requests.get("stop", 0) + tallies.requests.get("length", 0),
            "aborted": tallies.requests.get("abort", 0),
            "retracted": tallies.retractions,
        },
        "tokens_per_second": round(tallies.generated_tokens / elapsed, 1),
        "pools": msgspec.to_builtins(engine.pools),
        "allocated_tokens_max": engine.allocated_tokens_max,
        "committed_tokens_max": engine.committed_tokens_max,
        "assertions": {check: count for check, count in tallies.assertions.items() if count},
        "findings": msgspec.to_builtins(findings),
        "frames": {"published": tallies.frames + tallies.frames_lost, "lost": tallies.frames_lost},
        "users": {
            "sent": users.sent,
            "answered": users.answered,
            "hung_up": users.hung_up,
            "refused": users.refused,
            "errors": users.errors,
            "first_token_seconds": users.first_token_seconds,
        },
    }


def summary_lines(result: dict[str, Any]) -> Iterator[str]:
    """The same for people."""
    requests, frames = result["requests"], result["frames"]
    yield (
        f"{result['steps']:,} steps in {result['seconds']} s, {result['tokens_per_second']:,} tokens/s; requests: "
        f"{requests['finished']:,} finished, {requests['aborted']:,} aborted, {requests['retracted']:,} retracted"
    )
    for pool in result["pools"]:
        states = " + ".join(
            f"{name} {pool[name]:,}" for name in ("free", "evictable", "protected", "private", "session", "unaccounted")
        )
        yield f"{pool['pool']}: size {pool['size_slots']:,} = {states}"
    yield (
        f"at most {result['allocated_tokens_max']:,} tokens allocated, {result['committed_tokens_max']:,} committed; "
        f"{frames['published']:,} frames, {frames['lost']:,} lost"
    )
    yield from (f"assertion {check}: {count:,}" for check, count in result["assertions"].items())
    if not result["findings"]:
        yield "no finding: every slot is accounted for"
    yield from (f"{found['severity']} {found['kind']}: {found['summary']}" for found in result["findings"])
    yield from (f"a user saw: {error}" for error in result["users"]["errors"])


async def switch_fault(session: aiohttp.ClientSession, engine_url: str, name: str, times: int | None = 1) -> None:
    """Raises KvlensError when the engine refuses."""
    async with session.post(f"{engine_url}/faults/{name}", json={"enabled": True, "times": times}) as response:
        if response.status != 200:
            raise KvlensError(f"the engine refused fault {name}: HTTP {response.status} {await response.text()}")


async def _get(session: aiohttp.ClientSession, url: str) -> Any:
    async with session.get(url) as response:
        response.raise_for_status()
        return msgspec.json.decode(await response.read())


class BackgroundUsers:
    """Users on a thread of their own, so that the dashboard keeps its loop."""

    def __init__(self, stage: Stage, config: DemoConfig) -> None:
        self._stage, self._config = stage, config
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="users", daemon=True)

    def __enter__(self) -> BackgroundUsers:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(5)

    def _run(self) -> None:
        self._loop.run_until_complete(self._ask())

    async def _ask(self) -> None:
        users = SyntheticUsers(self._config.users_of(self._stage.engine.url))
        asking = asyncio.ensure_future(users.run(self._stop))
        if self._config.fault:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._stop.wait(), (self._config.seconds or 20) / 4)
            if not self._stop.is_set():
                async with aiohttp.ClientSession() as session:
                    await switch_fault(session, self._stage.engine.url, self._config.fault)
        await self._stop.wait()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


def run_demo(config: DemoConfig, *, as_json: bool) -> int:
    """The exit code: 1 when there was a finding. Raises KvlensError."""
    if not config.headless and not sys.stdout.isatty():
        raise KvlensError("standard output is no terminal: use `kvlens demo --headless`, or --json")
    _missing_engine()
    typer.echo("starting engine and observer ...", err=True)
    with stage() as running:
        typer.echo(f"engine   {running.engine.url}\nobserver {running.observer.url}", err=True)
        if config.headless:
            result = asyncio.run(HeadlessRun(running, config).run())
            if as_json:
                typer.echo(msgspec.json.format(msgspec.json.encode(result)).decode())
            else:
                for line in summary_lines(result):
                    typer.echo(line)
            return int(bool(result["findings"]))
        return _run_dashboard(running, config)


def _missing_engine() -> None:
    if importlib.util.find_spec("torch") is None:
        raise KvlensError("the demo needs the engine: pip install 'kvlens[engine]'")


def _run_dashboard(running: Stage, config: DemoConfig) -> int:
    from kvlens.tui.app import KvlensApp
    from kvlens.tui.client import ObserverClient

    app = KvlensApp(ObserverClient(running.observer.url))
    with BackgroundUsers(running, config):
        if config.seconds is not None:
            timer = threading.Timer(config.seconds, lambda: app.call_from_thread(app.exit))
            timer.daemon = True
            timer.start()
        app.run()
    findings = fetch_findings(running.observer.url, None)
    for finding in findings:
        typer.echo(finding_line(finding))
    return int(bool(findings))
