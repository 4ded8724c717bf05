"""Engines killed with SIGKILL under load: their recorder tells the end of the story."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from kvlens.cli.users import SyntheticUsers, UsersConfig
from kvlens.engine.probe import RowReturned, RowTaken
from kvlens.observer.frames import decode
from kvlens.observer.ledger import Ledger
from kvlens.observer.recorder import RingReader

OPTIONS = ("--pool-slots", "2048", "--page-size", "16", "--chunked-prefill-size", "64", "--max-running", "8")


async def load_then_kill(url: str, seconds: float, kill) -> None:
    users = SyntheticUsers(UsersConfig(url, users=6, pause_seconds=0.0))
    asking = asyncio.create_task(users.run(asyncio.Event()))
    await asyncio.sleep(seconds)
    await asyncio.get_running_loop().run_in_executor(None, kill)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


def check_story(ring: Path, instance_of: str) -> None:
    """Every frame is readable, follows the one before, and balances; the last one agrees with the events before it."""
    with RingReader(ring) as reader:
        assert reader.status() == "down" and not reader.is_closed
        assert reader.identity.name == instance_of
        records = reader.read()
        assert reader.lost == 0
        ledger = Ledger(reader.identity)
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    frames = [decode(record.payload) for record in records]
    assert len(frames) > 3 and frames[0].is_key
    taken: dict[int, int] = {}
    for before, frame in zip([None, *frames], frames, strict=False):
        assert before is None or frame.first_step >= before.last_step
        ledger.apply(frame)
        for event in frame.events:
            if isinstance(event, RowTaken):
                taken[event.row] = event.generation
            elif isinstance(event, RowReturned):
                assert taken.pop(event.row) == event.generation
        accounts = {account.pool: account for account in frame.accounts}
        assert all(account.unaccounted == 0 for account in accounts.values())
        assert accounts["rows"].private == len(taken)
    assert {row: held.generation for row, held in ledger.rows.items()} == taken
    assert sum(ledger.lengths(held)[1] for held in ledger.rows.values()) == frames[-1].allocated_tokens


def kill_engines(stage, staging, count: int, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(count):
        ring = stage.home / f"engine-{number}.ring"
        engine = stage.engine(*OPTIONS, ring=ring, name=f"engine-{number}")
        asyncio.run(load_then_kill(engine.url, dice.uniform(0.4, 2.5), lambda killed=engine: staging.kill(killed)))
        check_story(ring, f"engine-{number}")


def test_ten_engines_killed_under_load(stage, staging) -> None:
    kill_engines(stage, staging, 10, seed=4)


@pytest.mark.soak
def test_a_hundred_engines_killed_under_load(stage, staging) -> None:
    kill_engines(stage, staging, 100, seed=5)
