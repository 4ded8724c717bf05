"""A ring as a source: waited for, followed to its end, and through its successor."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvlens.observer.frames import encode
from kvlens.observer.recorder import RingWriter, _Word
from kvlens.observer.schema import Frame, Identity, PoolInfo
from kvlens.observer.sources import ring
from kvlens.observer.sources.ring import RingSource
from kvlens.observer.store import Store
from kvlens.observer.watch import Watch

POOLS = (PoolInfo("rows", "row", 4, 1, 0), PoolInfo("full", "slot", 16, 1, 1))


class Engine:
    """Writes empty steps."""

    def __init__(self, path: Path, instance: str) -> None:
        self.identity = Identity("unit", instance * 32, pools=POOLS)
        self.writer = RingWriter(path, self.identity, 1 << 16, heartbeat=False)
        self.step = 0

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.step += 1
            self.writer.append(encode(Frame(self.step, self.step, 0, self.step, "idle", 0, 0, [], 0, 0, [])))

    def dies(self) -> None:
        """Its process number is another's now, as after a SIGKILL."""
        self.writer._stores.word(_Word.PID_STARTED, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "unit.ring"


@pytest.fixture
def an_engine(path):
    engines = []

    def build(instance: str = "1") -> Engine:
        engines.append(Engine(path, instance))
        return engines[-1]

    yield build
    for engine in engines:
        engine.writer.close()


@pytest.fixture
def source(path):
    source = RingSource(path)
    yield source
    source.close()


def steps_of(source: RingSource) -> list[int]:
    return [frame.last_step for _, frame in source.poll().frames]


def test_a_file_that_is_not_there_yet_is_waited_for(source, an_engine) -> None:
    assert steps_of(source) == [] and (source.status, source.pid) == ("down", 0)
    an_engine().steps(2)
    poll = source.poll()
    assert poll.identity is not None and poll.identity.instance == "1" * 32
    assert [frame.last_step for _, frame in poll.frames] == [1, 2]
    assert source.poll().identity is None and source.status == "up"


def test_a_file_that_turns_up_and_is_no_ring_is_a_problem_until_it_is_one(source, path, an_engine) -> None:
    path.write_bytes(b"x" * 8192)
    assert steps_of(source) == [] and "is no flight recorder" in source.problem
    path.unlink()
    an_engine().steps(1)
    assert steps_of(source) == [1] and source.problem is None


def test_one_look_takes_so_many_frames_and_says_that_there_are_more(source, an_engine, monkeypatch) -> None:
    monkeypatch.setattr(ring, "MOST_PER_POLL", 3)
    an_engine().steps(7)
    polls = [source.poll() for _ in range(3)]
    assert [[frame.last_step for _, frame in poll.frames] for poll in polls] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [poll.more for poll in polls] == [True, True, False]


def test_a_frame_that_cannot_be_read_is_a_problem_and_the_next_one_is_read(source, an_engine) -> None:
    engine = an_engine()
    engine.steps(1)
    engine.writer.append(b"\xc1 nothing of ours")
    engine.steps(1)
    assert steps_of(source) == [1, 2] and source.problem


def test_what_was_overwritten_is_counted_once(source, an_engine) -> None:
    engine = an_engine()
    engine.steps(1)
    source.poll()
    engine.steps(3000)
    poll = source.poll()
    assert poll.lost == poll.frames[0][0] - 2 > 0
    engine.steps(1)
    assert source.poll().lost == 0


def test_a_successor_is_begun_when_its_predecessor_was_read_to_the_end(source, an_engine) -> None:
    one = an_engine("1")
    one.steps(2)
    source.poll()
    one.steps(3)
    one.dies()
    two = an_engine("2")
    two.steps(1)
    assert steps_of(source) == [3, 4, 5]
    assert steps_of(source) == []
    poll = source.poll()
    assert poll.identity.instance == "2" * 32 and [frame.last_step for _, frame in poll.frames] == [1]


@pytest.mark.parametrize("clean", [True, False])
def test_how_an_engine_ended_is_known_after_its_file_was_let_go(source, an_engine, clean) -> None:
    one = an_engine("1")
    one.steps(1)
    source.poll()
    pid = source.pid
    if clean:
        one.writer.close()
    else:
        one.dies()
    an_engine("2")
    source.poll()
    assert (source.status, source.is_closed, source.pid) == ("down", clean, pid)


@pytest.mark.parametrize(("clean", "expected"), [(True, []), (False, ["engine_down"])])
def test_a_restart_between_two_looks_is_a_crash_only_if_it_was_one(tmp_path, path, an_engine, clean, expected) -> None:
    store = Store(tmp_path / "findings.db")
    one = an_engine("1")
    one.steps(1)
    watch = Watch(RingSource(path), store)
    watch.poll()
    if clean:
        one.writer.close()
    else:
        one.dies()
    an_engine("2").steps(1)
    for _ in range(3):
        watch.poll()
    assert watch.identity.instance == "2" * 32
    assert [(finding.kind.value, finding.state.value) for finding in store.all()] == [
        (kind, "resolved") for kind in expected
    ]
    watch.source.close()
    store.close()


def test_a_dead_engine_found_late_leaves_the_findings_of_its_living_successor_alone(a_run, tmp_path) -> None:
    store = Store(tmp_path / "findings.db")
    run, path = a_run(), tmp_path / "live.ring"
    run.probe._write = (live := RingWriter(path, run.identity, 1 << 18, heartbeat=False)).append
    lost = run.ask(10, answer=30)
    run.step(3)
    run.lose(lost)
    watch = Watch(RingSource(path), store)
    watch.poll()
    dead = RingWriter(
        tmp_path / "dead.ring", msgspec.structs.replace(run.identity, instance="d" * 32, started_at=1.0), 1 << 16,
        heartbeat=False,
    )  # fmt: skip
    dead._stores.word(_Word.PID_STARTED, 1)
    late = Watch(RingSource(tmp_path / "dead.ring"), store)
    late.poll()
    assert [finding.state.value for finding in store.all() if finding.kind.value == "orphan_row"] == ["open"]
    for one in (watch, late):
        one.source.close()
    live.close()
    dead.close()
    store.close()
