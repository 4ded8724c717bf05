"""The engine around its scheduler: what is let in, what its thread promises, and how it breaks."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kvlens.engine.engine import ConfigError, Engine, EngineConfig, RequestRejected
from kvlens.engine.probe import NullProbe
from kvlens.engine.record import SamplingParams

SECONDS = 20  # how long to wait for a thread that is expected to answer at once


class Gate:
    """A runner without a model. `closed` holds the next forward until it is opened; `error` makes it fail."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.entered = threading.Event()
        self.error: Exception | None = None

    def close(self) -> None:
        self.entered.clear()
        self.opened.clear()

    def forward(self, batch) -> np.ndarray:
        self.entered.set()
        assert self.opened.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return np.array(batch.numbers) % 5 + 10


class Outputs:
    """Collects what the engine's thread tells, and lets a test wait for a request's end."""

    def __init__(self) -> None:
        self._told = threading.Condition()
        self.ends = {}
        self.tokens = {}

    def __call__(self, outputs) -> None:
        with self._told:
            for output in outputs:
                self.tokens.setdefault(output.rid, []).extend(output.token_ids)
                if output.finish is not None:
                    assert output.rid not in self.ends
                    self.ends[output.rid] = output.finish
            self._told.notify_all()

    def end_of(self, rid: str):
        with self._told:
            assert self._told.wait_for(lambda: rid in self.ends, SECONDS), f"{rid} never ended"
            return self.ends[rid]


def an_engine(*, probe=None, runner=None, **config) -> Engine:
    config = {"pool_slots": 64, "max_running": 4, "chunked_prefill_size": 16, "device": "cpu", **config}
    return Engine(EngineConfig(**config), probe=probe, runner=runner or Gate())


def asking(tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_new_tokens=tokens, ignore_eos=True)


def all_is_back(engine: Engine) -> bool:
    memory = engine.memory
    return (
        memory.slots.available_size() + memory.cache.evictable_size() == memory.slots.size
        and memory.cache.protected_size() == 0
        and memory.rows.available_size() == memory.rows.size
    )


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def told() -> Outputs:
    return Outputs()


@pytest.fixture
def running(gate: Gate, told: Outputs) -> Iterator[Engine]:
    """An engine with its thread."""
    engine = an_engine(runner=gate)
    engine.start(told)
    yield engine
    gate.opened.set()
    engine.stop()


# -- what is let in ---------------------------------------------------------------------------------------------------


def rejection(engine: Engine, prompt, rid: str = "x", sampling: SamplingParams | None = None) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        engine.submit(rid, prompt, sampling or asking())
    return caught.value


def test_an_empty_prompt_is_rejected() -> None:
    error = rejection(an_engine(), [])
    assert (error.status, error.code) == (400, "empty_prompt")


def test_a_prompt_longer_than_the_pool_is_told_a_remedy_that_works() -> None:
    error = rejection(an_engine(page_size=16), [1] * 70)
    assert str(error) == "prompt has 70 tokens, the pool holds 64: shorten it, or start with --pool-slots 80"
    assert (error.status, error.code) == (400, "context_length_exceeded")
    larger = an_engine(page_size=16, pool_slots=80)
    larger.submit("x", [1] * 70, asking())
    while not larger.is_idle:
        larger.step()


def test_a_prompt_longer_than_the_context_is_told_a_length_that_works() -> None:
    engine = an_engine(context_length=32)
    error = rejection(engine, [1] * 40)
    assert str(error) == (
        "prompt has 40 tokens, the context is 32 with at least one for the answer: shorten it to 31"
    )  # fmt: skip
    assert engine.submit("x", [1] * 31, asking()).max_new_tokens == 1


def test_a_prompt_longer_than_pool_and_context_is_not_sent_to_a_larger_pool() -> None:
    error = rejection(an_engine(context_length=128), [1] * 500)
    assert "--pool-slots" not in str(error)
    (length,) = re.findall(r"shorten it to (\d+)", str(error))
    an_engine(context_length=128).submit("x", [1] * int(length), asking())


def test_an_id_outside_the_vocabulary_is_rejected() -> None:
    engine = an_engine()
    assert rejection(engine, [1, engine.plan.model.vocab_size]).code == "invalid_token"
    assert rejection(engine, [1, -1]).code == "invalid_token"


def test_asking_for_no_tokens_is_rejected() -> None:
    assert "max_tokens is 0" in str(rejection(an_engine(), [1], sampling=asking(0)))


def test_an_id_in_use_is_rejected_until_its_request_ended() -> None:
    engine = an_engine()
    engine.submit("x", [1, 2], asking(1))
    assert rejection(engine, [1, 2]).code == "duplicate_id"
    engine.step()
    engine.submit("x", [1, 2], asking(1))


def test_a_full_queue_is_told_with_503_and_empties_again() -> None:
    engine = an_engine(max_running=1, max_queued=2)
    for number in range(3):
        engine.submit(f"r{number}", [1, 2], asking(1))
    error = rejection(engine, [1, 2])
    assert (error.status, error.code) == (503, "queue_full")
    assert "3 requests are here, 2 may wait" in str(error)
    engine.step()
    engine.submit("x", [1, 2], asking(1))


def test_a_rejected_request_changes_nothing() -> None:
    engine = an_engine()
    for prompt in ([], [1] * 65, [-1]):
        rejection(engine, prompt)
    assert engine.is_idle
    assert engine.step() == []
    assert engine.memory.slots.available_size() == 64


def test_an_answer_is_cut_to_what_fits_behind_the_prompt() -> None:
    engine = an_engine(page_size=16)
    assert engine.submit("x", [1] * 60, asking(100)).max_new_tokens == 5
    tokens = 0
    while not engine.is_idle:
        for output in engine.step():
            tokens += len(output.token_ids)
            assert output.finish is None or output.finish.kind == "length"
    assert tokens == 5
    assert all_is_back(engine)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"page_size": 0}, "--page-size is 0: give at least 1"),
        ({"max_queued": 0}, "--max-queued is 0: give at least 1"),
        ({"pool_slots": 8, "page_size": 16}, "--pool-slots 8 holds no page of --page-size 16"),
        ({"cache": "lru"}, "--cache lru does not exist: choose radix or chunk"),
        ({"contracts": "loud"}, "--contracts loud does not exist: choose report or strict"),
        ({"context_length": 1}, "--context-length is 1: give at least 2"),
        ({"context_length": 10**7}, "--context-length 10,000,000 is more than"),
        ({"dtype": "int4"}, "--dtype int4 is not served: choose float32"),
        ({"device": "abacus"}, "--device abacus is no device: choose cpu, cuda or auto"),
    ],
)
def test_a_setting_that_cannot_be_is_named(setting, message) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        an_engine(**setting)


def test_a_pool_is_rounded_down_to_whole_pages() -> None:
    assert an_engine(pool_slots=70, page_size=16).memory.slots.size == 64


# -- the thread -------------------------------------------------------------------------------------------------------


def test_a_request_ends_through_the_callback(running, told) -> None:
    running.submit("x", [1, 2, 3], asking(4))
    assert told.end_of("x").kind == "length"
    assert told.tokens["x"] == [11] * 4


def test_work_is_posted_to_the_scheduler_thread(running) -> None:
    assert running.post(threading.current_thread).result(SECONDS).name == "scheduler"


def test_an_error_in_posted_work_reaches_who_asked_and_nobody_else(running, told) -> None:
    def broken() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        running.post(broken).result(SECONDS)
    running.submit("x", [1], asking(1))
    assert told.end_of("x").kind == "length"


def test_work_whose_asker_has_gone_is_not_done_and_breaks_nothing(running, gate, told) -> None:
    gate.close()
    running.submit("x", [1, 2], asking(3))
    assert gate.entered.wait(SECONDS)
    done = []
    work = running.post(lambda: done.append(1))
    assert work.cancel()
    gate.opened.set()
    assert told.end_of("x").kind == "length"
    assert running.failure is None
    assert done == []


def test_an_abort_during_a_forward_ends_the_request_with_that_step(running, gate, told) -> None:
    gate.close()
    running.submit("x", [1, 2], asking(50))
    assert gate.entered.wait(SECONDS)
    found = running.abort("x", "enough")
    gate.opened.set()
    assert found.result(SECONDS) == 1
    assert (told.end_of("x").kind, told.end_of("x").message) == ("abort", "enough")
    assert len(told.tokens["x"]) == 1


def test_a_flush_is_refused_under_load_and_done_when_idle(running, gate, told) -> None:
    gate.close()
    running.submit("x", [1, 2], asking(1))
    assert gate.entered.wait(SECONDS)
    refused = running.flush()
    gate.opened.set()
    assert refused.result(SECONDS) is False
    told.end_of("x")
    assert running.flush().result(SECONDS) is True
    assert running.memory.cache.total_size() == 0


def test_stop_ends_every_request_and_leaves_nothing_held(gate, told) -> None:
    engine = an_engine(runner=gate, max_running=2)
    gate.close()
    for number in range(4):
        engine.submit(f"r{number}", [number + 1] * 5, asking(50))
    engine.start(told)
    assert gate.entered.wait(SECONDS)
    abort = engine.abort
    engine.abort = lambda **why: (abort(**why), gate.opened.set())  # the step ends only once the end was asked for
    engine.stop()
    assert {told.ends[f"r{number}"].message for number in range(4)} == {"the engine is shutting down"}
    assert all_is_back(engine)


class Pulse(NullProbe):
    """Counts quiet moments while nothing happens."""

    def __init__(self) -> None:
        self.modes = []
        self.twice = threading.Event()
        self.closed = False

    def step(self, view) -> None:
        self.modes.append(view.mode)
        if len(self.modes) == 2:
            self.twice.set()

    def close(self) -> None:
        self.closed = True


def test_an_idle_engine_shows_itself_again_and_again(monkeypatch) -> None:
    monkeypatch.setattr("kvlens.engine.engine.HEARTBEAT_SECONDS", 0.01)
    probe = Pulse()
    engine = an_engine(probe=probe)
    engine.start(lambda outputs: None)
    assert probe.twice.wait(SECONDS)
    engine.stop()
    assert set(probe.modes) == {"idle"}
    assert probe.closed


# -- when it breaks ---------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(running, gate, told, capsys) -> Engine:
    """An engine whose forward failed with one request running and one waiting for its turn."""
    gate.close()
    gate.error = RuntimeError("device lost")
    running.submit("x", [1] * 5, asking())
    assert gate.entered.wait(SECONDS)
    running.submit("y", [2] * 5, asking())
    gate.opened.set()
    told.end_of("x")
    told.end_of("y")
    return running


def test_a_broken_step_ends_every_request_with_the_reason(broken, told) -> None:
    for rid in ("x", "y"):
        assert (told.ends[rid].kind, told.ends[rid].status) == ("abort", 500)
        assert told.ends[rid].message == "the engine stopped: RuntimeError: device lost"


def test_a_broken_engine_gives_everything_back(broken) -> None:
    broken.post(lambda: None).result(SECONDS)
    assert all_is_back(broken)


def test_a_broken_engine_takes_nobody_and_says_why(broken) -> None:
    error = rejection(broken, [1])
    assert (error.status, error.code) == (503, "engine_stopped")
    assert "device lost; restart it" in str(error)


def test_a_broken_engine_still_answers_who_asks(broken) -> None:
    assert broken.abort("x").result(SECONDS) == 0
    assert broken.flush().result(SECONDS) is True


def test_a_request_that_slipped_in_while_it_broke_is_ended_too(broken, told) -> None:
    reason, broken.failure = broken.failure, None  # as seen by a client that asked just before
    broken.post(lambda: setattr(broken, "failure", reason))
    broken.submit("late", [1], asking())
    assert told.end_of("late").kind == "abort"


def test_a_broken_probe_does_not_keep_the_thread_from_stopping(told, capsys) -> None:
    class Broken(NullProbe):
        def step(self, view) -> None:
            raise RuntimeError("nobody watches")

    engine = an_engine(probe=Broken())
    engine.start(told)
    while engine.failure is None:
        engine.post(lambda: None).result(SECONDS)
    assert rejection(engine, [1]).code == "engine_stopped"
    engine.stop()
    assert capsys.readouterr().err.count("Traceback") == 1
