"""Builders for the scheduler's tests: a scheduler without a model, and requests that count themselves."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.memory import build_memory
from kvlens.engine.record import Req, SamplingParams
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Scheduler


class Recording:
    """A probe that keeps every event, and what the holders were at each quiet moment."""

    def __init__(self) -> None:
        self.events = []
        self.modes = []
        self.holders = []

    def emit(self, event) -> None:
        self.events.append(event)

    def step(self, view) -> None:
        self.modes.append(view.mode)
        held = view.holders()
        self.holders.append(dict(zip(held.requests.tolist(), held.rows.tolist(), strict=True)))

    def close(self) -> None:
        pass

    def of(self, kind: type) -> list:
        return [event for event in self.events if type(event) is kind]


class Script:
    """A runner that needs no model: the token depends on request and position only. Keeps the batches it was given."""

    def __init__(self) -> None:
        self.batches = []
        self.during: Callable[[], None] | None = None

    def forward(self, batch) -> np.ndarray:
        self.batches.append(batch)
        if self.during is not None:
            during, self.during = self.during, None
            during()
        return np.array(batch.numbers) * 100 + batch.seq_lens


@pytest.fixture
def a_request() -> Callable[..., Req]:
    numbers = itertools.count(1)

    def build(prompt=5, answer: int = 4, **sampling) -> Req:
        number = next(numbers)
        ids = list(prompt) if not isinstance(prompt, int) else [1000 * number + i for i in range(prompt)]
        return Req(number, f"r{number}", ids, SamplingParams(max_new_tokens=answer, **sampling))

    return build


@pytest.fixture
def a_scheduler() -> Callable[..., Scheduler]:
    def build(
        *, slots: int = 64, rows: int = 4, page_size: int = 1, chunk: int = 64, cache: str = "radix",
        mode: Mode = Mode.STRICT, reserve: float | None = None, rules: FinishRules | None = None,
    ) -> Scheduler:  # fmt: skip
        probe = Recording()
        memory = build_memory(
            rows=rows, width=128, slots=slots, page_size=page_size, cache=cache, contracts=Contracts(mode, probe),
            probe=probe,
        )  # fmt: skip
        scheduler = Scheduler(memory, Script(), Limits(rows, chunk), rules or FinishRules(None, ()))
        if reserve is not None:
            admission = scheduler.admission
            admission.RESERVE_MOST = admission.RESERVE_LEAST = admission.RESERVE_PENALTY = 0.0
            admission._reserve = reserve
        return scheduler

    return build


@pytest.fixture
def run_out() -> Callable[..., dict[str, list]]:
    """Step until nobody is left; the outputs of each request. Fails when that takes more than 500 steps."""

    def run(scheduler: Scheduler) -> dict[str, list]:
        outputs: dict[str, list] = {}
        for _ in range(500):
            for output in scheduler.step():
                outputs.setdefault(output.rid, []).append(output)
            if scheduler.is_idle:
                return outputs
        raise AssertionError(f"still here after 500 steps: {sorted(scheduler.live)}")

    return run


@pytest.fixture
def all_is_back() -> Callable[[Scheduler], bool]:
    def check(scheduler: Scheduler) -> bool:
        memory = scheduler.memory
        available = memory.slots.available_size() + memory.cache.evictable_size()
        return (
            available == memory.slots.size
            and memory.cache.protected_size() == 0
            and memory.rows.available_size() == memory.rows.size
        )

    return check
