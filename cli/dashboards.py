"""`kvlens dashboards`: what Grafana and Prometheus are given."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import msgspec
import typer

from kvlens import KvlensError
from kvlens.exporters.catalog import document


def _needs_sdk() -> None:
    if importlib.util.find_spec("grafana_foundation_sdk") is None:
        raise KvlensError(
            "building needs grafana-foundation-sdk (Python 3.11 or newer): pip install 'kvlens[dashboards]'; what it "
            "builds is in dashboards/built"
        )


def build_to(out: Path, runbooks: str | None) -> list[Path]:
    """Write the dashboard, the rules, and docs/metrics.md when this is a checkout. Raises KvlensError."""
    _needs_sdk()
    from kvlens.dashboards.build import build

    written = build(out) if runbooks is None else build(out, runbooks)
    page = Path("docs/metrics.md")
    if Path("exporters/catalog.py").is_file():
        page.write_text(document(), encoding="utf-8")
        written.append(page)
    return written


def check_panels(prometheus: str, *, as_json: bool) -> int:
    """The exit code: 1 when a panel has no data. Raises KvlensError."""
    _needs_sdk()
    from kvlens.dashboards.build import check

    results = check(prometheus)
    if as_json:
        typer.echo(msgspec.json.encode({"panels": results}))
    else:
        for result in results:
            typer.echo(f"{result.series:>5} series  {result.panel:<24} {result.expr}")
    return int(any(result.series == 0 for result in results))
