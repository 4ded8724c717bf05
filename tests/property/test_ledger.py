"""Law of the ledger: who joined late, or lost frames, is right again after the next key frame."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.memory import build_memory
from kvlens.engine.record import Req, SamplingParams
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Scheduler
from kvlens.observer.frames import decode
from kvlens.observer.ledger import Ledger
from kvlens.observer.pool_stats import PoolStatsObserver
from kvlens.observer.schema import Frame, Identity, PoolInfo

IDENTITY = Identity("law", "e" * 32, pools=(PoolInfo("rows", "row", 6, 1, 0), PoolInfo("full", "slot", 160, 16, 64)))


class Runner:
    def forward(self, batch) -> np.ndarray:
        return np.full(len(batch.rows), 3)


def frames_of(seed: int) -> list[Frame]:
    """Some hundred steps of a pool under pressure, with cancellations."""
    dice, payloads, now = random.Random(seed), [], [0]
    probe = PoolStatsObserver(payloads.append, IDENTITY, coalesce_ms=0, clock=lambda: now[0])
    memory = build_memory(
        rows=6, width=256, slots=160, page_size=16, cache="radix", contracts=Contracts(Mode.STRICT, probe), probe=probe
    )
    scheduler = Scheduler(memory, Runner(), Limits(6, 48), FinishRules(None, ()))
    scheduler.admission._reserve = 0.0
    for number in range(1, 41):
        prompt = [dice.randint(1, 3)] * dice.randint(1, 90)
        scheduler.add(Req(number, f"r{number}", prompt, SamplingParams(max_new_tokens=dice.randint(1, 60))))
        for _ in range(dice.randint(0, 8)):
            if dice.random() < 0.1 and scheduler.live:
                scheduler.abort(dice.choice(sorted(scheduler.live)))
            now[0] += 30_000_000
            scheduler.step()
    return [decode(payload) for payload in payloads]


RUNS = [frames_of(seed) for seed in range(4)]


def picture(ledger: Ledger) -> tuple:
    rows = {
        row: (held.generation, held.request, held.phase, held.protected, *ledger.lengths(held))
        for row, held in ledger.rows.items()
    }
    live = {number: story.rid for number, story in ledger.stories.live.items()}
    return rows, ledger.accounts, live


@settings(max_examples=120, deadline=None, derandomize=True)
@given(st.sampled_from(RUNS), st.data())
def test_it_agrees_with_one_that_saw_everything_after_the_next_key_frame(frames: list[Frame], data) -> None:
    first = data.draw(st.integers(0, len(frames) - 40))
    gap = data.draw(st.integers(first, len(frames) - 35))
    length = data.draw(st.integers(0, 30))
    whole, partial = Ledger(IDENTITY), Ledger(IDENTITY)
    key_since = False
    for place, frame in enumerate(frames):
        whole.apply(frame)
        if place < first or gap <= place < gap + length:
            key_since = False
            continue
        partial.apply(frame)
        key_since |= frame.is_key
        if key_since:
            assert picture(partial) == picture(whole)
