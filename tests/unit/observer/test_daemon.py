"""The daemon's own life: sinks, signals, files, and readers that do not keep up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from pathlib import Path

import msgspec
import pytest

from kvlens.observer import api
from kvlens.observer.daemon import Daemon, ObserveConfig
from kvlens.observer.recorder import RingWriter, _Word
from kvlens.observer.schema import LedgerEvent, State, Timeline


class Sink:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.ended: list[Timeline] = []
        self.events: list[LedgerEvent] = []
        self.closed = 0

    def on_state(self, state: State) -> None:
        self.states.append(state)

    def on_request_ended(self, timeline: Timeline) -> None:
        self.ended.append(timeline)

    def on_event(self, event: LedgerEvent) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed += 1


def open_files() -> set[Path]:
    return set(Path("/proc/self/fd").iterdir())


def render(state: State, accept: str) -> tuple[bytes, str]:
    return b"", "text/plain"


@pytest.fixture
def ring(a_run, tmp_path: Path):
    """A run whose frames go to a ring, `.path` and `.writer`."""
    run = a_run(page_size=4)
    run.path = tmp_path / "unit.ring"
    run.writer = RingWriter(run.path, run.identity, 1 << 20, heartbeat=False)
    run.probe._write = run.writer.append
    yield run
    run.writer.close()


def a_daemon(ring, sink: Sink) -> Daemon:
    config = ObserveConfig(ring.path.with_name("findings.db"), (ring.path,), port=0)
    return Daemon(config, render_metrics=render, sinks=[sink])


def test_sinks_get_each_ended_request_and_each_event_once_over_restarts(ring) -> None:
    sink = Sink()
    for _ in range(3):
        daemon = a_daemon(ring, sink)
        ring.ask(10, answer=2)
        for _ in range(5):
            ring.step(1)
            daemon.tick()
        daemon.store.close()
    lost = ring.ask(10, answer=90)
    ring.step(2)
    ring.lose(lost)
    for _ in range(2):
        daemon = a_daemon(ring, sink)
        daemon.tick()
        daemon.store.close()
    assert [timeline.request_id for timeline in sink.ended] == ["r1", "r2", "r3", "r4"]
    assert [event.kind for event in sink.events if event.kind.startswith("finding")] == ["finding_opened"]


def test_sinks_get_the_newest_state_at_once_and_then_once_a_second(ring, monkeypatch) -> None:
    sink = Sink()
    daemon = a_daemon(ring, sink)
    now = [100.0]
    monkeypatch.setattr("kvlens.observer.daemon.time.monotonic", lambda: now[0])
    ring.ask(5)
    ring.step(1)
    for after in (0.0, 0.4, 0.5, 0.2):
        now[0] += after
        daemon.tick()
    assert len(sink.states) == 2
    assert sink.states[0].engines[0].step == 1
    daemon.store.close()


async def test_sigterm_ends_it_cleanly_and_hands_everything_back(ring) -> None:
    sink, before = Sink(), open_files()
    daemon = a_daemon(ring, sink)
    said: asyncio.Queue[str] = asyncio.Queue()
    running = asyncio.create_task(daemon.run(ready=said.put_nowait))
    line = await asyncio.wait_for(said.get(), 30)
    assert line.startswith("kvlens observer ready on http://127.0.0.1:")
    url = line.split()[-1] + "/api/v1/state"
    state = json.loads(await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read()))
    assert [engine["engine"] for engine in state["engines"]] == ["unit"]
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(running, 30)
    assert sink.closed == 1
    assert open_files() <= before  # ring, database and lock are closed
    again = a_daemon(ring, sink)  # and the store is free
    again.store.close()


def test_a_recorder_that_is_gone_with_its_engine_is_let_go(ring, monkeypatch) -> None:
    monkeypatch.setattr("kvlens.observer.recorder.ring_directories", lambda: [ring.path.parent])
    daemon = Daemon(ObserveConfig(ring.path.with_name("findings.db")), render_metrics=render)
    before = len(open_files())
    ring.ask(5)
    ring.step(1)
    daemon.tick()
    assert len(daemon.watches) == 1
    ring.writer._stores.word(_Word.PID_STARTED, 1)
    daemon.tick()
    ring.path.unlink()
    daemon._next_discovery = 0.0
    daemon.tick()
    assert daemon.watches == [] and len(open_files()) == before
    daemon.store.close()


def test_a_dead_recorder_beside_its_living_successor_leaves_no_open_finding(ring, monkeypatch) -> None:
    """The dead one's name comes last, so only the order in which they are begun keeps it from being news."""
    monkeypatch.setattr("kvlens.observer.recorder.ring_directories", lambda: [ring.path.parent])
    identity = msgspec.structs.replace(ring.identity, instance="d" * 32)
    dead = RingWriter(ring.path.with_name("zz.ring"), identity, 1 << 16, heartbeat=False)
    ring.ask(5)
    ring.step(1)
    dead._stores.word(_Word.PID_STARTED, 1)
    daemon = Daemon(ObserveConfig(ring.path.with_name("findings.db")), render_metrics=render)
    daemon.tick()
    assert {finding.state.value for finding in daemon.store.all()} <= {"resolved"}
    assert [engine.status for engine in daemon.snapshot().engines] == ["up"]
    for watch in daemon.watches:
        watch.source.close()
    dead.close()
    daemon.store.close()


async def test_a_reader_of_the_stream_that_does_not_keep_up_is_sent_away(ring, monkeypatch) -> None:
    monkeypatch.setattr(api, "MOST_QUEUED", 4)
    daemon = a_daemon(ring, Sink())
    handlers = api.Api(daemon)
    slow: asyncio.Queue[LedgerEvent | None] = asyncio.Queue(api.MOST_QUEUED)
    handlers._streams.add(slow)
    for number in range(9):
        for listener in daemon.listeners:
            listener(LedgerEvent(float(number), "unit", "check_failed", {}))
    told = [slow.get_nowait() for _ in range(slow.qsize())]
    assert [event.at if event is not None else None for event in told] == [1.0, 2.0, 3.0, None]
    assert handlers._streams == set()
    daemon.watches[0].source.close()
    daemon.store.close()
