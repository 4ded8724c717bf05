"""What observing costs the engine: the same decode, observed and not, in turns, in one process."""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlens.cli.serve import Recorder, build_probe
from kvlens.engine.engine import Engine, EngineConfig, EnginePlan
from kvlens.engine.probe import AnyEvent, EngineView, NullProbe, Probe
from kvlens.engine.record import SamplingParams
from kvlens.observer.recorder import ring_directory

STEPS = 8
"""Decode steps per block: long against a clock, short against what else the machine does."""


class Switch:
    """A probe that passes on to another one, or to nobody."""

    def __init__(self, probe: Probe) -> None:
        self._on, self._off = probe, NullProbe()
        self._now: Probe = probe

    def observe(self, on: bool) -> None:
        self._now = self._on if on else self._off

    def emit(self, event: AnyEvent) -> None:
        self._now.emit(event)

    def step(self, view: EngineView) -> None:
        self._now.step(view)

    def close(self) -> None:
        self._on.close()


def bench_overhead(batches: Sequence[int] = (1, 8), pairs: int = 200, device: str = "cpu") -> list[dict[str, Any]]:
    """Decode throughput observed over unobserved: the median of pairs of blocks, with a bootstrap interval (95 %)."""
    results = []
    for batch in batches:
        with tempfile.TemporaryDirectory(dir=ring_directory()) as home:
            ratios, rate = _ratios(Path(home), batch, pairs, device)
        low, high = _interval(ratios)
        results.append(
            {
                "batch": batch, "pairs": pairs, "ratio": statistics.median(ratios), "low": low, "high": high,
                "observed_tokens_per_second": rate,
            }
        )  # fmt: skip
    return results


def _ratios(home: Path, batch: int, pairs: int, device: str) -> tuple[list[float], float]:
    plan = EnginePlan.make(EngineConfig(max_running=batch, pool_slots=batch * 1024, device=device))
    torch.set_num_threads(plan.threads)
    switch = Switch(build_probe(plan, "bench", Recorder(home / "bench.ring", 32)))
    engine = Engine(plan, probe=switch)
    ratios: list[float] = []
    observed_seconds = 0.0
    number = 0
    while len(ratios) < pairs:
        if engine.is_idle:
            for _ in range(batch):
                number += 1
                engine.submit(f"r{number}", [2 + number % 500], SamplingParams(max_new_tokens=900, ignore_eos=True))
            for _ in range(2 + batch):
                engine.step()
        if min(900 - len(req.output_ids) for req in engine.scheduler.running.reqs) <= 2 * STEPS:
            while not engine.is_idle:
                engine.step()
            continue
        order = (True, False) if len(ratios) % 2 else (False, True)
        taken = {on: _block(engine, switch, on) for on in order}
        switch.observe(True)
        observed_seconds += taken[True]
        ratios.append(taken[False] / taken[True])
    engine.probe.close()
    return ratios, batch * STEPS * pairs / observed_seconds


def _block(engine: Engine, switch: Switch, on: bool) -> float:
    switch.observe(on)
    begun = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    return time.perf_counter() - begun


def _interval(ratios: list[float], draws: int = 1000) -> tuple[float, float]:
    dice = random.Random(1)
    medians = sorted(statistics.median(dice.choices(ratios, k=len(ratios))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws)]
