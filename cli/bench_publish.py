"""What it costs to publish a frame, with as many rows held."""

from __future__ import annotations

import secrets
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvlens.engine.contracts import Contracts
from kvlens.engine.memory.allocate import alloc_for_extend
from kvlens.engine.memory.memory import build_memory
from kvlens.engine.probe import DecodeStepped, NullProbe
from kvlens.engine.record import Phase, Req
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Scheduler
from kvlens.observer.pool_stats import PoolStatsObserver
from kvlens.observer.recorder import RingWriter, ring_directory
from kvlens.observer.schema import Identity, PoolInfo


def bench_publish(rows: Sequence[int] = (8, 64, 256), frames: int = 2000) -> list[dict[str, Any]]:
    """Median microseconds of a step frame and of a key frame, from the quiet moment to the ring."""
    results = []
    for held in rows:
        scheduler = _holding(held)
        row: dict[str, Any] = {"held_rows": held}
        for kind, key in (("step_frame_us", False), ("key_frame_us", True)):
            row[kind] = statistics.median(_times(scheduler, key, frames))
        results.append(row)
    return results


def _holding(held: int) -> Scheduler:
    """A scheduler whose batch holds `held` rows of 64 tokens."""
    probe = NullProbe()
    memory = build_memory(
        rows=held,
        width=128,
        slots=held * 128,
        page_size=16,
        cache="radix",
        contracts=Contracts(probe=probe),
        probe=probe,
    )
    scheduler = Scheduler(memory, _NoModel(), Limits(held, 1 << 20), FinishRules(None, ()))
    reqs = [Req(number, f"r{number}", [1] * 64, extend_end=64, phase=Phase.RUNNING) for number in range(1, held + 1)]
    alloc_for_extend(memory, reqs)
    for req in reqs:
        scheduler.live[req.rid] = req
    scheduler.running.add(reqs)
    scheduler.mode = "decode"
    return scheduler


class _NoModel:
    def forward(self, batch: Any) -> Any:
        raise NotImplementedError("nothing is computed here")


def _times(scheduler: Scheduler, key: bool, frames: int) -> list[float]:
    pools = (PoolInfo("rows", "row", scheduler.memory.rows.size, 1, 0), PoolInfo("full", "slot", 1, 16, 0))
    identity = Identity("bench", secrets.token_hex(16), pools=pools)
    with tempfile.TemporaryDirectory(dir=ring_directory()) as home:
        writer = RingWriter(Path(home) / "bench.ring", identity)
        probe = PoolStatsObserver(writer.append, identity, coalesce_ms=0, close=writer.close)
        probe.CENSUS_NS = 1 << 62  # a census is measured for itself
        probe.KEY_NS = 0 if key else 1 << 62
        held = len(scheduler.running)
        probe.step(scheduler.view)
        times = []
        for _ in range(frames):
            probe.emit(DecodeStepped(time.monotonic_ns(), held, 1))
            scheduler.steps += 1
            begun = time.perf_counter_ns()
            probe.step(scheduler.view)
            times.append((time.perf_counter_ns() - begun) / 1e3)
        probe.close()
    return times
