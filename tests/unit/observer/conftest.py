"""A real scheduler with a runner that computes nothing, observed: what the observer's tests look at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.memory import build_memory
from kvlens.engine.record import Req, SamplingParams
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Scheduler
from kvlens.observer.frames import decode
from kvlens.observer.ledger import Applied, Ledger
from kvlens.observer.pool_stats import PoolStatsObserver
from kvlens.observer.schema import Frame, Identity, PoolInfo


class Runner:
    """Answers 7."""

    def forward(self, batch: Any) -> np.ndarray:
        return np.full(len(batch.rows), 7)


class Run:
    """Scheduler, probe, the frames it wrote, and the ledger they make."""

    def __init__(self, page_size: int, slots: int, rows: int, chunk: int, coalesce_ms: float, largest: int) -> None:
        self.now = 1_000_000_000
        self.payloads: list[bytes] = []
        self.identity = Identity(
            "unit", "e" * 32,
            pools=(PoolInfo("rows", "row", rows, 1, 0), PoolInfo("full", "slot", slots, page_size, 64)),
        )  # fmt: skip
        self.closed = False
        self.probe = PoolStatsObserver(
            self.payloads.append, self.identity, coalesce_ms=coalesce_ms, largest=largest, clock=lambda: self.now,
            close=self._close,
        )  # fmt: skip
        memory = build_memory(
            rows=rows, width=256, slots=slots, page_size=page_size, cache="radix", probe=self.probe,
            contracts=Contracts(Mode.REPORT, self.probe, lambda: self.scheduler.steps),
            step=lambda: self.scheduler.steps,
        )  # fmt: skip
        self.scheduler = Scheduler(memory, Runner(), Limits(rows, chunk), FinishRules(None, ()))
        self.memory = memory
        self.ledger = Ledger(self.identity)
        self.applied: list[Applied] = []
        self._numbers = 0
        self._seen = 0

    def _close(self) -> None:
        self.closed = True

    @property
    def frames(self) -> list[Frame]:
        return [decode(payload) for payload in self.payloads]

    @property
    def last(self) -> Frame:
        return decode(self.payloads[-1])

    def events(self, kind: type) -> list[Any]:
        return [event for frame in self.frames for event in frame.events if isinstance(event, kind)]

    def ask(self, prompt: int = 20, answer: int = 8, trace: str | None = None) -> Req:
        """Queue a request of `prompt` tokens."""
        self._numbers += 1
        tokens = [(self._numbers + place) % 50 for place in range(prompt)]
        req = Req(self._numbers, f"r{self._numbers}", tokens, SamplingParams(max_new_tokens=answer), trace)
        self.scheduler.add(req)
        return req

    def step(self, steps: int = 1, ms: float = 10) -> None:
        """Scheduler steps, `ms` apart; the ledger follows."""
        for _ in range(steps):
            self.now += int(ms * 1e6)
            self.scheduler.step()
            self.follow()

    def until_idle(self) -> None:
        while not self.scheduler.is_idle:
            self.step()
        self.heartbeat()

    def heartbeat(self, ms: float = 1000) -> None:
        self.now += int(ms * 1e6)
        self.scheduler.idle()
        self.follow()

    def follow(self) -> None:
        for payload in self.payloads[self._seen :]:
            self.applied.append(self.ledger.apply(decode(payload)))
        self._seen = len(self.payloads)

    def lose(self, req: Req) -> Req:
        """What a forgotten release path does: the request is gone, and its row and slots are not back."""
        self.scheduler.release = lambda gone, **_: None
        self.scheduler.abort(req.rid)
        self.step()
        self.scheduler.release = self.scheduler._release
        return req


@pytest.fixture
def a_run() -> Callable[..., Run]:
    """`a_run(page_size=4, slots=256, ...)`"""

    def build(
        page_size: int = 4, slots: int = 256, rows: int = 8, chunk: int = 32, coalesce_ms: float = 5.0,
        largest: int = 1 << 22,
    ) -> Run:  # fmt: skip
        return Run(page_size, slots, rows, chunk, coalesce_ms, largest)

    return build
