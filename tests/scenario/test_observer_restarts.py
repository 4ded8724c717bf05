"""An observer is killed at any moment, again and again, beside a writer that goes on: no finding is lost or doubled."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

WRITER = '''
"""Requests come and go, and every twentieth is lost with its row, until the rows are gone; then a flush, and again."""
import struct, sys, time
from pathlib import Path
from kvlens.engine.probe import CacheFlushed, CheckFailed, RequestFinished, RequestQueued, RowReturned, RowTaken
from kvlens.engine.record import Phase
from kvlens.observer.frames import encode
from kvlens.observer.recorder import RingWriter
from kvlens.observer.schema import Frame, Identity, PoolAccount, PoolInfo, RowColumns

ROWS, SLOTS, LOST = 8, 64, 6
pools = (PoolInfo("rows", "row", ROWS, 1, 0), PoolInfo("full", "slot", SLOTS, 4, 16))
identity = Identity("writer", "c" * 32, pools=pools, started_at=time.time())
writer = RingWriter(Path(sys.argv[1]), identity, 8 << 20)
lost, generation, request = {}, 0, 0

def columns():
    def ints(values, code="i"):
        return struct.pack(f"<{len(values)}{code}", *values)
    rows = list(lost)
    eights, zeros = ints([8] * len(rows)), ints([0] * len(rows))
    return RowColumns(ints(rows), ints([lost[row][0] for row in rows]), ints([lost[row][1] for row in rows], "q"),
                      bytes([Phase.ORPHAN] * len(rows)), zeros, eights, eights)

def publish(step, events, key):
    accounts = [PoolAccount("rows", ROWS, ROWS - len(lost), 0, 0, 0, 0),
                PoolAccount("full", SLOTS, SLOTS - 8 * len(lost), 0, 0, 0, 0)]
    names = [(number, f"r{number}", None) for _, number in lost.values()]
    writer.append(encode(Frame(step, step, time.monotonic_ns(), time.time_ns(), "decode", 0, 0, accounts, 0, 0, events,
                               columns=columns() if key else None, names=names if key else None)))

print("writing", flush=True)
rounds = 0
for step in range(1, 1_000_000):
    now = time.monotonic_ns()
    request += 1
    row = next(row for row in range(1, ROWS + 1) if row not in lost)
    generation += 1
    events = [RequestQueued(now, request, f"r{request}", None, 8, 4), RowTaken(step, row, generation, request, "test")]
    if request % 20 == 0:
        lost[row] = (generation, request)
    else:
        events.append(RowReturned(step, row, generation, request, 8, 8))
    events.append(RequestFinished(now, request, "abort" if row in lost else "stop", 1, 0, 0, ""))
    key = row in lost or step % 50 == 0
    if len(lost) == LOST and request % 20 == 10:
        rounds += 1
        if rounds == int(sys.argv[2]):
            publish(step, events, True)
            break
        lost.clear()
        events.append(CacheFlushed(step))
        key = True
    publish(step, events, key)
    time.sleep(0.002)
print(request, *(number for _, number in sorted(lost.values())), flush=True)
sys.stdin.read()
'''
OBSERVER = """
import asyncio, sys
from pathlib import Path
from kvlens.observer.daemon import Daemon, ObserveConfig
ring, store = map(Path, sys.argv[1:])
daemon = Daemon(ObserveConfig(store, (ring,), port=0), render_metrics=lambda state, accept: (b"", "text/plain"))
asyncio.run(daemon.run(ready=lambda line: print(line, flush=True)))
"""


@contextlib.contextmanager
def running(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_every_lost_row_is_one_finding_however_often_the_observer_dies(tmp_path: Path, staging) -> None:
    dice, ring, store = random.Random(1), tmp_path / "writer.ring", tmp_path / "findings.db"
    with running(WRITER, str(ring), "10") as writer:
        assert writer.stdout.readline() == "writing\n"
        for _ in range(5):
            with running(OBSERVER, str(ring), str(store)) as observer:
                assert observer.stdout.readline().startswith("kvlens observer ready on ")
                time.sleep(dice.uniform(0.0, 0.2))
                observer.kill()
        requests, *held = map(int, writer.stdout.readline().split())
        with running(OBSERVER, str(ring), str(store)) as observer:
            url = observer.stdout.readline().split()[-1]
            state = staging.wait_for(lambda: caught_up(staging.get(f"{url}/api/v1/state"), requests))
            findings = staging.get(f"{url}/api/v1/findings")["findings"]
    assert [finding["kind"] for finding in findings] == ["orphan_row"] * len(findings)
    lost = range(20, requests + 1, 20)
    assert sorted(finding["request_id"] for finding in findings) == sorted(f"r{number}" for number in lost)
    assert {finding["request_id"] for finding in findings if finding["state"] == "open"} == {f"r{n}" for n in held}
    assert all((finding["leaked_slots"], finding["leaked_rows"]) == (8, 1) for finding in findings)
    assert state["engines"][0]["leaked_slots"] == {"full": 8 * len(held)}


def caught_up(state, steps: int):
    """The state, once the last frame of the writer is in it."""
    return state if state["engines"] and state["engines"][0]["step"] == steps else None
