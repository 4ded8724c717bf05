"""Each fault does the one thing it says, to an engine that goes on serving."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.faults.catalog import FAULTS
from kvlens.engine.faults.faults import Faults
from kvlens.engine.probe import CheckFailed, KvReleased, NullProbe
from kvlens.engine.record import SamplingParams


class Recording(NullProbe):
    def __init__(self) -> None:
        self.events = []

    def emit(self, event) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list:
        return [event for event in self.events if type(event) is kind]


class Constant:
    def forward(self, batch) -> np.ndarray:
        return np.array(batch.numbers) % 5 + 10


class Rig:
    """An engine without a model, with a switchboard and a probe that remembers."""

    def __init__(self, page_size: int) -> None:
        self.probe = Recording()
        config = EngineConfig(
            pool_slots=128, page_size=page_size, max_running=4, chunked_prefill_size=16, device="cpu"
        )  # fmt: skip
        self.engine = Engine(config, probe=self.probe, runner=Constant())
        self.faults = Faults(self.engine)

    def submit(self, rid: str, prompt: int, answer: int) -> None:
        ids = [len(rid) * 10 + ord(rid[-1])] * prompt
        self.engine.submit(rid, ids, SamplingParams(max_new_tokens=answer, ignore_eos=True))

    def run(self, steps: int = 200) -> list:
        """The ends that came."""
        ends = []
        for _ in range(steps):
            ends += [output for output in self.engine.step() if output.finish is not None]
            if self.engine.is_idle:
                break
        return ends

    @property
    def missing_slots(self) -> int:
        """What is neither free nor cached, when nobody is here."""
        memory = self.engine.memory
        return memory.slots.size - memory.slots.available_size() - memory.cache.total_size()

    @property
    def missing_rows(self) -> int:
        rows = self.engine.memory.rows
        return rows.size - rows.available_size()

    @property
    def checks(self) -> list[str]:
        return [event.check for event in self.probe.of(CheckFailed)]


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def rig(request) -> Rig:
    return Rig(request.param)


def abort_one(rig: Rig, rid: str) -> None:
    rig.submit(rid, 20, 30)
    rig.run(steps=4)
    rig.engine.abort(rid)
    (end,) = rig.run()
    assert (end.rid, end.finish.kind) == (rid, "abort")


def test_abort_skips_release_loses_one_row_and_what_its_request_held(rig) -> None:
    rig.faults.enable("abort-skips-release")
    rig.submit("a", 20, 30)
    rig.run(steps=4)
    (req,) = rig.engine.scheduler.live.values()
    rig.engine.abort("a")
    (end,) = rig.run()
    assert end.finish.kind == "abort"
    lost = rig.engine.memory.cache.ceil(req.kv.kv_allocated_len) - req.kv.cache_protected_len
    assert (rig.missing_slots, rig.missing_rows) == (lost, 1)
    assert lost > 0
    assert rig.probe.of(KvReleased) == []
    assert rig.engine.memory.cache.protected_size() == req.kv.cache_protected_len  # its lock stands for ever


def test_abort_of_a_waiting_request_is_no_occasion(rig) -> None:
    rig.faults.enable("abort-skips-release")
    rig.submit("a", 20, 30)
    rig.engine.abort("a")
    rig.run()
    assert (rig.missing_rows, rig.faults.active()) == (0, ["abort-skips-release"])


def test_a_fault_goes_off_as_often_as_it_was_told(rig) -> None:
    rig.faults.enable("abort-skips-release", times=1)
    abort_one(rig, "a")
    abort_one(rig, "b")
    assert rig.missing_rows == 1
    assert rig.faults.active() == []


def test_a_fault_without_a_number_goes_on_until_it_is_disabled(rig) -> None:
    rig.faults.enable("abort-skips-release", times=None)
    abort_one(rig, "a")
    abort_one(rig, "b")
    assert rig.faults.active() == ["abort-skips-release"]
    rig.faults.disable("abort-skips-release")
    abort_one(rig, "c")
    assert rig.missing_rows == 2
    assert rig.faults.active() == []


def test_an_aborted_request_that_would_be_retracted_can_be_lost_too() -> None:
    rig = Rig(1)
    admission = rig.engine.scheduler.admission
    admission.RESERVE_MOST = admission.RESERVE_LEAST = admission._reserve = 0.0
    for rid in ("a", "b"):
        rig.submit(rid, 14, 60)
    rig.run(steps=6)
    slots = rig.engine.memory.slots
    slots.alloc(slots.available_size())  # the next token of both does not fit any more
    rig.faults.enable("abort-skips-release")
    rig.engine.abort("b")
    ends = rig.run()
    assert {end.rid: end.finish.kind for end in ends}["b"] == "abort"
    assert rig.missing_rows == 1


def test_a_chunk_whose_row_was_released_gets_a_fresh_row_and_the_same_answer(rig) -> None:
    rig.submit("a", 40, 3)
    rig.run(steps=1)
    rig.faults.enable("chunk-reuses-released-row")
    (end,) = rig.run()
    assert (end.finish.kind, rig.checks) == ("length", ["reused-row-carries-kv"])
    (failed,) = rig.probe.of(CheckFailed)
    assert (failed.request, failed.allocated_tokens) == (1, 0)
    assert (rig.missing_slots, rig.missing_rows) == (0, 0)


def test_a_prompt_in_one_piece_is_no_occasion_for_the_chunk_fault(rig) -> None:
    rig.faults.enable("chunk-reuses-released-row")
    rig.submit("a", 10, 3)
    rig.run()
    assert (rig.checks, rig.faults.active()) == ([], ["chunk-reuses-released-row"])


def test_double_free_returns_the_body_twice_and_the_second_time_is_refused(rig) -> None:
    rig.faults.enable("double-free")
    rig.submit("a", 10, 10)
    (end,) = rig.run()
    assert (end.finish.kind, rig.checks) == ("length", ["free-slots-unique"])
    (failed,) = rig.probe.of(CheckFailed)
    (released,) = rig.probe.of(KvReleased)
    assert failed.facts["slots"] == released.body_tokens > 0
    assert (rig.missing_slots, rig.missing_rows) == (0, 0)
    assert rig.engine.memory.slots.verify_accounting() == []


def test_a_fault_in_one_engine_is_none_in_another(rig) -> None:
    rig.faults.enable("abort-skips-release", times=None)
    other = Rig(1)
    abort_one(other, "a")
    assert (other.missing_slots, other.missing_rows) == (0, 0)


def test_a_name_that_is_no_fault_is_refused(rig) -> None:
    for switch in (rig.faults.enable, rig.faults.disable):
        with pytest.raises(KeyError):
            switch("gremlins")
    assert rig.faults.active() == []


def test_the_catalogue_names_each_fault_once() -> None:
    assert list(FAULTS) == ["abort-skips-release", "chunk-reuses-released-row", "double-free"]
    assert all(name == info.name and info.description.endswith(".") for name, info in FAULTS.items())
