"""One engine under watch, through a real ring: restarts, successors, clean and unclean ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kvlens.observer.recorder import RingError, RingWriter, _Word
from kvlens.observer.schema import FindingState, Kind
from kvlens.observer.snapshot import row_states, take_snapshot
from kvlens.observer.sources.ring import RingSource
from kvlens.observer.store import Store
from kvlens.observer.watch import Watch, best_of


class Engine:
    """A run whose frames go to a ring."""

    def __init__(self, run, path: Path, instance: str) -> None:
        self.run = run
        self.identity = msgspec.structs.replace(run.identity, instance=instance * 32)
        run.probe._identity = self.identity
        self.writer = RingWriter(path, self.identity, 1 << 18, heartbeat=False)
        run.probe._write = self._write

    def _write(self, payload: bytes) -> None:
        self.run.payloads.append(payload)
        self.writer.append(payload)

    def dies(self) -> None:
        """Its process number is another's now, as after a SIGKILL."""
        self.writer._stores.word(_Word.PID_STARTED, 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "unit.ring"


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "findings.db")
    yield store
    store.close()


@pytest.fixture
def an_engine(a_run, path):
    engines = []

    def build(instance: str = "1") -> Engine:
        engines.append(Engine(a_run(), path, instance))
        return engines[-1]

    yield build
    for engine in engines:
        engine.writer.close()


def leak(engine: Engine):
    req = engine.run.ask(10, answer=30)
    engine.run.step(3)
    return engine.run.lose(req)


def test_a_leak_opens_is_told_and_stored_in_one_look(an_engine, path, store) -> None:
    engine = an_engine()
    watch = Watch(RingSource(path), store)
    leak(engine)
    news = watch.poll()
    assert [event.kind for event in news.events] == ["engine_up", "check_failed", "check_failed", "finding_opened"]
    (finding,) = store.all()
    assert (finding.kind, finding.request_id, finding.opened_step) == (
        Kind.ORPHAN_ROW,
        "r1",
        engine.run.scheduler.steps,
    )
    assert store.cursor(engine.identity) == len(engine.run.payloads)
    assert [timeline.request_id for timeline in news.ended] == ["r1"]
    assert not watch.poll().fresh


def test_a_restart_finds_the_finding_and_tells_counts_and_exports_nothing_again(an_engine, path, store) -> None:
    engine = an_engine()
    leak(engine)
    Watch(RingSource(path), store).poll()
    (before,) = store.all()
    engine.run.ask(5, answer=2)
    watch = Watch(RingSource(path), store)
    news = watch.poll()
    assert [event.kind for event in news.events] == ["engine_up"] and news.ended == []
    assert watch.book.open() == [before]
    assert watch.ledger.tallies.counts["frames"] == 0
    engine.run.step(6)
    assert [timeline.request_id for timeline in watch.poll().ended] == ["r2"]
    assert [finding.id for finding in store.all()] == [before.id]


def test_what_happened_while_nobody_looked_is_found_once(an_engine, path, store) -> None:
    engine = an_engine()
    first = Watch(RingSource(path), store)
    engine.run.ask(5, answer=90)
    engine.run.step(2)
    first.poll()
    leak(engine)
    engine.run.scheduler.abort()
    engine.run.until_idle()
    engine.run.scheduler.flush()
    news = Watch(RingSource(path), store).poll()
    kinds = [event.kind for event in news.events if event.kind.startswith("finding")]
    assert kinds[0] == "finding_opened" and kinds[-1] == "finding_resolved"
    (finding,) = store.all()
    assert finding.state is FindingState.RESOLVED


def test_a_successor_is_begun_when_its_predecessor_was_read_to_the_end(an_engine, path, store) -> None:
    engine = an_engine("1")
    watch = Watch(RingSource(path), store)
    leak(engine)
    watch.poll()
    engine.run.ask(5, answer=2)
    engine.run.step(8)
    engine.dies()
    successor = an_engine("2")
    successor.run.ask(7, answer=50)
    successor.run.step(2)
    ended = watch.poll().ended
    assert [timeline.request_id for timeline in ended] == ["r2"]
    for _ in range(3):
        watch.poll()
    assert watch.identity.instance == "2" * 32 and watch.status == "up"
    assert watch.book.open() == []
    assert {finding.state for finding in store.all()} == {FindingState.RESOLVED}


def test_a_crash_is_a_finding_beside_the_leak_and_a_clean_end_resolves_all(an_engine, path, store) -> None:
    engine = an_engine()
    watch = Watch(RingSource(path), store)
    leak(engine)
    watch.poll()
    engine.dies()
    assert [event.kind for event in watch.poll().events] == ["engine_down", "finding_opened"]
    assert {finding.kind for finding in watch.book.open()} == {Kind.ORPHAN_ROW, Kind.ENGINE_DOWN}
    assert take_snapshot([watch]).engines[0].status == "down"
    engine.writer.close()
    watch.status = "up"
    watch.poll()
    assert watch.book.open() == []


def test_a_leak_in_an_engine_that_stopped_before_anyone_looked_is_kept(an_engine, path, store) -> None:
    engine = an_engine()
    leak(engine)
    engine.writer.close()
    Watch(RingSource(path), store).poll()
    (finding,) = store.all()
    assert (finding.kind, finding.request_id, finding.state) == (Kind.ORPHAN_ROW, "r1", FindingState.RESOLVED)


def test_counters_go_on_over_a_restart_of_the_engine(an_engine, path, store) -> None:
    engine = an_engine("1")
    watch = Watch(RingSource(path), store)
    engine.run.ask(5, answer=2)
    engine.run.until_idle()
    watch.poll()
    engine.dies()
    successor = an_engine("2")
    successor.run.ask(5, answer=2)
    successor.run.until_idle()
    for _ in range(3):
        watch.poll()
    assert watch.identity.instance == "2" * 32
    assert watch.ledger.tallies.requests["length"] == 2


def test_frames_that_were_overwritten_while_no_observer_ran_are_counted(an_engine, path, store) -> None:
    engine = an_engine()
    engine.run.ask(5, answer=200)
    engine.run.step(2)
    Watch(RingSource(path), store).poll()
    for _ in range(3000):
        engine.writer.append(engine.run.payloads[-1])
    watch = Watch(RingSource(path), store)
    (lost,) = [event.data["frames"] for event in watch.poll().events if event.kind == "frames_lost"]
    assert watch.ledger.tallies.counts["frames_lost"] == lost > 0


def test_lost_frames_are_counted_and_told(an_engine, path, store) -> None:
    engine = an_engine()
    watch = Watch(RingSource(path), store)
    engine.run.ask(5, answer=200)
    engine.run.step(2)
    watch.poll()
    for _ in range(3000):
        engine.writer.append(engine.run.payloads[-1])
    lost = [event.data["frames"] for event in watch.poll().events if event.kind == "frames_lost"]
    assert watch.ledger.tallies.counts["frames_lost"] == sum(lost) > 0


def test_a_ring_that_is_not_there_yet_is_waited_for(an_engine, path, store) -> None:
    watch = Watch(RingSource(path), store)
    assert watch.poll().events == [] and watch.identity is None
    assert take_snapshot([watch]).engines == []
    engine = an_engine()
    engine.run.ask(5)
    engine.run.step(1)
    assert [event.kind for event in watch.poll().events] == ["engine_up"]
    assert watch.ledger.frame.last_step == 1


def test_a_file_that_is_no_ring_is_refused_at_the_start(path) -> None:
    path.write_bytes(b"x" * 8192)
    with pytest.raises(RingError, match="is no flight recorder"):
        RingSource(path)


def test_of_two_recorders_of_one_engine_the_living_one_counts(an_engine, path, store, a_run, tmp_path) -> None:
    old = an_engine("1")
    old.run.ask(5)
    old.run.step(1)
    new = Engine(a_run(), tmp_path / "other.ring", "2")
    new.run.ask(5)
    new.run.step(1)
    watches = [Watch(RingSource(path), store), Watch(RingSource(tmp_path / "other.ring"), store)]
    old.dies()
    for watch in watches:
        watch.poll()
    assert [watch.identity.instance for watch in best_of(watches)] == ["2" * 32]
    new.writer.close()


# -- the state of now -------------------------------------------------------------------------------------------------


def test_the_snapshot_says_what_the_engine_holds(an_engine, path, store) -> None:
    engine = an_engine()
    watch = Watch(RingSource(path), store)
    engine.run.ask(50, answer=30)
    engine.run.ask(10, answer=30)
    engine.run.step(4)
    engine.run.ask(10, answer=30)
    leaked = leak(engine)
    watch.poll()
    (state,) = take_snapshot([watch]).engines
    pools = {pool.pool: pool for pool in state.pools}
    assert (state.engine, state.status, state.step) == ("unit", "up", engine.run.scheduler.steps)
    assert pools["full"].size_bytes == 256 * 64 and pools["full"].page_size == 4
    assert pools["full"].unaccounted == state.leaked_slots["full"] > 0
    assert state.leaked_rows == {"rows": 1} and state.rows["orphan"] == 1
    assert sum(state.rows.values()) == 8
    assert state.active_rows == state.running == 3
    assert state.allocated_tokens["request"] == sum(r.kv.kv_allocated_len for r in engine.run.scheduler.running.reqs)
    rows = row_states([watch])
    assert (rows[0].phase, rows[0].row, rows[0].request_id) == ("orphan", leaked.kv.held_row, leaked.rid)
    assert len(rows) == 4 and set(state.rules.values()) == {"ok"}
