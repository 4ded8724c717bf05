"""Whom a finding blames, for as long as it lasts; and what moves between key frames is no finding."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from kvlens.engine.contracts import CHECKS
from kvlens.engine.probe import CacheFlushed, RowReturned, RowTaken, SlotRange
from kvlens.engine.record import Phase
from kvlens.observer.findings import Changes, FindingBook
from kvlens.observer.ledger import Ledger
from kvlens.observer.rules.catalog import judge
from kvlens.observer.schema import Finding, Frame, Kind


@pytest.fixture(scope="module")
def by_hand() -> ModuleType:
    """The module `ledger_frames` of this folder."""
    spec = importlib.util.spec_from_file_location("ledger_frames", Path(__file__).with_name("ledger_frames.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Judged:
    """A ledger and its book; every frame is judged."""

    def __init__(self, by_hand: ModuleType) -> None:
        self.ledger = Ledger(by_hand.IDENTITY)
        self.book = FindingBook(by_hand.IDENTITY)

    def take(self, frame: Frame) -> Changes:
        self.ledger.apply(frame)
        return self.book.reconcile(judge(self.ledger), frame.wall_ns / 1e9)

    @property
    def only(self) -> Finding:
        (finding,) = self.book.open()
        return finding


@pytest.fixture
def judged(by_hand: ModuleType) -> Judged:
    return Judged(by_hand)


def test_health_is_silence_from_the_first_frame_to_the_last(by_hand, judged) -> None:
    rows = [by_hand.Row(1, 1), by_hand.Row(2, 2)]
    for frame in (
        by_hand.frame(1, by_hand.queued(1), by_hand.queued(2), rows=rows),
        by_hand.frame(2),
        by_hand.frame(3, by_hand.census(3), rows=[by_hand.Row(2, 2)], evictable=8),
        by_hand.frame(4, RowReturned(4, 2, 1, 2, 8, 8)),
        by_hand.frame(5, rows=[], evictable=16),
    ):
        assert not judged.take(frame)


def test_an_orphan_opens_with_its_owner_and_resolves_when_the_row_is_back(by_hand, judged) -> None:
    judged.take(by_hand.frame(1, by_hand.queued(1), rows=[by_hand.Row(3, 1, protected=4)]))
    (opened,) = judged.take(by_hand.frame(2, rows=[by_hand.Row(3, 1, Phase.ORPHAN, 4)])).opened
    assert (opened.kind, opened.leaked_slots, opened.row, opened.request_id) == (Kind.ORPHAN_ROW, 4, 3, "r1")
    (resolved,) = judged.take(by_hand.frame(3, rows=[])).resolved
    assert resolved.id == opened.id


def test_an_orphan_whose_row_moves_between_key_frames_is_still_the_one_finding(by_hand, judged) -> None:
    """Accounts are compared with the rows of the same moment: what came since is not in them yet."""
    judged.take(by_hand.frame(1, by_hand.queued(1), rows=[by_hand.Row(3, 1, Phase.ORPHAN)]))
    for event in (RowTaken(2, 3, 2, 7, "alloc_for_extend"), RowReturned(3, 3, 2, 7, 8, 8)):
        assert not judged.take(by_hand.frame(event.step, event)).opened
    assert judged.only.kind is Kind.ORPHAN_ROW
    assert judged.take(by_hand.frame(4, rows=[])).resolved and judged.book.open() == []


def test_a_flush_without_a_key_frame_resolves_and_opens_nothing(by_hand, judged) -> None:
    judged.take(by_hand.frame(1, by_hand.queued(1), rows=[by_hand.Row(3, 1, Phase.ORPHAN)]))
    changes = judged.take(by_hand.frame(2, CacheFlushed(2)))
    assert [finding.kind for finding in changes.resolved] == [Kind.ORPHAN_ROW]
    assert changes.opened == []


def test_a_second_request_that_loses_slots_is_in_the_amount_and_in_the_sentence(by_hand, judged) -> None:
    first, second = SlotRange(8, 12, 1, 1, 1), SlotRange(20, 28, 2, 1, 2)
    judged.take(by_hand.frame(1, by_hand.queued(1), by_hand.queued(2), rows=[]))
    judged.take(by_hand.frame(2, by_hand.census(2, first), rows=[], missing=4))
    assert judged.only.summary == "4 slots of pool full belong to nobody, last referenced by request r1 in row 1"
    (updated,) = judged.take(by_hand.frame(3, by_hand.census(3, first, second), rows=[], missing=12)).updated
    assert (updated.leaked_slots, updated.row, updated.request_id) == (12, None, None)
    assert updated.summary == "12 slots of pool full belong to nobody"
    assert [part.request for part in updated.slots] == [1, 2]


def test_who_lost_slots_first_is_blamed_when_the_row_has_had_another_tenant(by_hand, judged) -> None:
    judged.take(by_hand.frame(1, by_hand.queued(1), by_hand.queued(9), rows=[]))
    judged.take(by_hand.frame(2, by_hand.census(2, SlotRange(8, 12, 1, 1, 1)), rows=[], missing=4))
    before = judged.only
    assert not judged.take(by_hand.frame(3, by_hand.census(3, SlotRange(8, 12, 1, 2, 9)), rows=[], missing=4))
    more = by_hand.census(4, SlotRange(8, 16, 1, 2, 9))
    judged.take(by_hand.frame(4, more, rows=[], missing=8))
    assert [(part.start, part.end, part.request) for part in judged.only.slots] == [(8, 12, 1), (12, 16, 9)]
    assert judged.only.id == before.id


def test_a_row_that_is_taken_again_does_not_take_over_the_blame(a_run) -> None:
    run = a_run(page_size=4, rows=1)
    lost = run.ask(13, answer=90)
    run.step(5)
    slots = run.memory.slots
    kept = slots.free_segment, slots.free_segments
    slots.free_segment, slots.free_segments = (lambda *_: None), (lambda *_: None)
    run.scheduler.abort(lost.rid)
    run.step(2)
    slots.free_segment, slots.free_segments = kept
    book = FindingBook(run.identity)
    (opened,) = book.reconcile(judge(run.ledger), 1.0).opened
    assert opened.request_id == "r1"
    run.ask(5, answer=2)
    run.until_idle()
    run.heartbeat(ms=6000)
    book.reconcile(judge(run.ledger), 2.0)
    (finding,) = book.open()
    assert (finding.request_id, finding.generation, finding.slots) == ("r1", 1, opened.slots)


def test_an_owner_is_kept_over_a_restart_that_saw_only_what_came_later(by_hand, judged) -> None:
    judged.take(by_hand.frame(1, by_hand.queued(1), rows=[]))
    judged.take(by_hand.frame(2, by_hand.census(2, SlotRange(8, 12, 1, 1, 1)), rows=[], missing=4))
    before = judged.only
    late = Judged(by_hand)
    late.book = FindingBook(by_hand.IDENTITY, [(judged.book.subject_of(before), before)])
    late.take(by_hand.frame(3, by_hand.census(3, SlotRange(8, 12, 1, 2, 9)), rows=[], missing=4))
    assert (late.only.id, late.only.request_id, late.only.row, late.only.generation) == (before.id, "r1", 1, 1)
    assert late.only.summary == before.summary


def test_a_double_free_that_goes_on_is_one_finding_that_grows(a_run) -> None:
    run = a_run(page_size=4)
    run.ask(10, answer=90)
    run.step(2)
    book = FindingBook(run.identity)
    for times in (1, 2, 3):
        facts = {"slots": 4, "first_slot": 8}
        run.memory.contracts.require(CHECKS.free_slots_unique, False, facts=facts)
        run.step(1)
        book.reconcile(judge(run.ledger), float(times))
    (finding,) = book.open()
    assert (finding.kind, finding.leaked_slots, finding.evidence["times"]) == (Kind.DOUBLE_FREE, 12, 3)
