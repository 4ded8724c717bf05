"""`kvlens serve`: the engine, its flight recorder and its HTTP server, put together."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from kvlens import KvlensError, __version__


@dataclass(frozen=True, slots=True)
class Recorder:
    """Where frames go. `path` None: the best ring directory."""

    path: Path | None
    mebibytes: int


def run_serve(options: dict[str, Any]) -> None:
    """options: as `kvlens serve` takes them. Raises KvlensError."""
    if importlib.util.find_spec("torch") is None:
        raise KvlensError("the engine is not installed: pip install 'kvlens[engine]'")
    import torch

    from kvlens.engine.engine import Engine, EngineConfig, EnginePlan
    from kvlens.engine.serve.launch import ServeConfig, serve

    names = EngineConfig.__dataclass_fields__
    given = {name: getattr(value, "value", value) for name, value in options.items() if name in names}
    plan = EnginePlan.make(EngineConfig(**{name: value for name, value in given.items() if value is not None}))
    torch.set_num_threads(plan.threads)
    # Engines on any free port must not share a name: it is their label in every metric.
    name = options["engine_name"] or f"{options['host']}:{options['port'] or f'pid-{os.getpid()}'}"
    recorder = Recorder(options["ring"], options["ring_mib"]) if options["observed"] else None
    probe = build_probe(plan, name, recorder) if recorder is not None else None
    try:
        engine = Engine(plan, probe=probe)
        asyncio.run(serve(engine, ServeConfig(options["host"], options["port"], options["allow_faults"])))
    finally:
        if probe is not None:
            probe.close()


def build_probe(plan: Any, name: str, recorder: Recorder) -> Any:
    """A PoolStatsObserver that writes to a flight recorder. Raises RingError."""
    from kvlens.observer.pool_stats import PoolStatsObserver
    from kvlens.observer.recorder import RingWriter, open_default

    identity = identify(plan, name)
    capacity = recorder.mebibytes << 20
    if recorder.path is not None:
        writer = RingWriter(recorder.path, identity, capacity)
    else:
        writer, passed = open_default(name, identity, capacity)
        for reason in passed:
            typer.echo(f"kvlens: {reason}", err=True)
    typer.echo(f"flight recorder: {writer.path}", err=True)
    return PoolStatsObserver(writer.append, identity, largest=writer.largest, close=writer.close)


def identify(plan: Any, name: str) -> Any:
    """Who this engine is, in every frame's eyes."""
    from kvlens.observer.schema import Identity, PoolInfo

    config = plan.config
    return Identity(
        name=name,
        instance=secrets.token_hex(16),
        version=__version__,
        model=config.model if config.model == "builtin" else plan.directory.name,
        pools=(
            PoolInfo("rows", "row", config.max_running, 1, 4 * plan.context_length),
            PoolInfo("full", "slot", plan.pool_slots, config.page_size, plan.bytes_per_slot),
        ),
        started_at=time.time(),
    )
