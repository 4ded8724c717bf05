"""`kvlens observe`: the daemon with its exporters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import typer

from kvlens.exporters.otlp import OtlpSink
from kvlens.exporters.prometheus import MetricsPage
from kvlens.observer.daemon import Daemon, ObserveConfig
from kvlens.observer.store import default_store


def run_observe(*, rings: list[Path], host: str, port: int, store: Path | None, token: str | None) -> None:
    """Runs until it is told to stop. Raises KvlensError."""
    config = ObserveConfig(store or default_store(), tuple(rings), host, port, token)
    otlp = OtlpSink.from_environment()
    daemon = Daemon(config, render_metrics=MetricsPage().render, sinks=[otlp] if otlp is not None else [])
    for path in rings:
        if not path.exists():
            typer.echo(f"waiting for {path}", err=True)
    asyncio.run(daemon.run(ready=lambda line: print(line, flush=True)))
