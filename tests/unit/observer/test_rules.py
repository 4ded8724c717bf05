"""Each rule says exactly what is wrong, one fault is one finding, and health is silence."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from kvlens.engine.contracts import CHECKS
from kvlens.engine.memory.release import release_kv_cache
from kvlens.observer.findings import FindingBook
from kvlens.observer.rules.catalog import judge, standing
from kvlens.observer.schema import FindingState, Identity, Kind, PoolInfo

TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def test_a_healthy_run_is_silent_after_every_step(a_run) -> None:
    run = a_run(page_size=16, slots=192)
    run.scheduler.admission._reserve = 0.0
    for prompt, answer in ((5, 9), (70, 40), (40, 3), (12, 60), (90, 30), (64, 50)):
        run.ask(prompt, answer)
    while not run.scheduler.is_idle:
        run.step()
        assert judge(run.ledger) == []
    run.heartbeat()
    assert judge(run.ledger) == []


def test_a_lost_request_is_one_orphan_row_with_its_owner_and_all_its_slots(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=90, trace=TRACE)
    run.ask(10, answer=90)
    run.step(5)
    row, private = req.kv.held_row, -(-req.kv.kv_allocated_len // 4) * 4 - req.kv.cache_protected_len
    run.lose(req)
    (claim,) = judge(run.ledger)
    assert (claim.kind, claim.pool, claim.leaked_slots, claim.leaked_rows) == (Kind.ORPHAN_ROW, "full", private, 1)
    assert (claim.row, claim.generation, claim.request_id, claim.trace_id) == (row, 1, "r1", "ab" * 16)
    assert (claim.last_event, claim.site, claim.step) == ("finished", "alloc_for_extend", run.scheduler.steps)
    assert claim.evidence["residual_slots"] == private and claim.evidence["locked_slots"] == 8
    assert [(part.pool, part.unit, part.residual) for part in claim.accounts] == [
        ("full", "slot", private), ("rows", "row", 1),
    ]  # fmt: skip
    assert sum(part.end - part.start for part in claim.slots) == private
    assert claim.summary == f"request r1 is gone and left row {row} (generation 1) and {private} slots behind"
    assert claim.runbook_page == "docs/runbooks/orphan-row.md"


def test_who_joins_late_names_the_same_owner(a_run) -> None:
    from kvlens.observer.ledger import Ledger

    run = a_run()
    req = run.ask(10, answer=90)
    run.step(3)
    run.lose(req)
    late = Ledger(run.identity)
    late.apply(run.last)
    (claim,) = judge(late)
    assert (claim.kind, claim.request_id, claim.row) == (Kind.ORPHAN_ROW, "r1", req.kv.held_row)


def test_slots_that_nobody_owns_are_told_with_the_tenancy_that_used_them_last(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=90)
    run.step(3)
    row = req.kv.held_row
    slots = run.memory.slots
    slots.free_segment, slots.free_segments = (lambda *_: None), (lambda *_: None)
    run.scheduler.abort(req.rid)
    run.step(1)
    (claim,) = judge(run.ledger)
    assert (claim.kind, claim.pool, claim.leaked_rows) == (Kind.UNOWNED_SLOTS, "full", 0)
    assert claim.leaked_slots == run.ledger.accounts["full"].unaccounted == 4
    assert (claim.row, claim.request_id) == (row, "r1")


def test_a_row_that_was_lost_without_slots_is_told_for_itself(a_run) -> None:
    run = a_run()
    req = run.ask(10, answer=90)
    run.step(3)
    run.memory.rows.free_rows = lambda rows: None
    run.scheduler.abort(req.rid)
    run.step(1)
    claims = judge(run.ledger)
    assert [(claim.kind, claim.leaked_rows, claim.leaked_slots) for claim in claims] == [(Kind.ORPHAN_ROW, 1, 0)]


def test_slots_returned_too_often_have_a_negative_remainder(a_run) -> None:
    run = a_run(page_size=1)
    run.ask(10, answer=90)
    run.step(3)
    ring = run.memory.slots._ring
    ring._ids, ring._capacity, ring._count = np.append(ring._ids, [9]), ring._capacity + 1, ring._count + 1
    run.step(1)
    claims = {claim.kind: claim for claim in judge(run.ledger)}
    assert set(claims) == {Kind.OVER_RELEASE, Kind.HELD_AND_FREE}
    assert claims[Kind.OVER_RELEASE].leaked_slots == 1
    assert claims[Kind.OVER_RELEASE].evidence["residual_slots"] == -1
    assert claims[Kind.HELD_AND_FREE].slots[0].start == 9


def test_two_rows_on_one_slot_are_told_by_the_census(a_run) -> None:
    run = a_run(page_size=1)
    one, two = run.ask(10, answer=90), run.ask(8, answer=90)
    run.step(4)
    table = run.memory.rows.req_to_token
    table[two.kv.held_row, two.kv.kv_allocated_len - 1] = table[one.kv.held_row, one.kv.kv_allocated_len - 1]
    run.step(1, ms=6000)
    kinds = {claim.kind for claim in judge(run.ledger)}
    assert Kind.HELD_TWICE in kinds


def test_a_double_free_is_one_finding_with_its_amount(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=90)
    run.step(3)
    body = run.memory.cache.row_slots(req, 10)[8:]

    def twice(gone, *, is_insert) -> None:
        release_kv_cache(gone, run.memory, is_insert=False)
        run.memory.slots.free_segment(body, 8)

    run.scheduler.release = twice
    run.scheduler.abort(req.rid)
    run.step(1)
    (claim,) = judge(run.ledger)
    assert (claim.kind, claim.leaked_slots, claim.evidence["residual_slots"]) == (Kind.DOUBLE_FREE, 4, -4)


def test_a_reused_record_names_its_request_and_no_account_is_off(a_run) -> None:
    run = a_run(page_size=4, chunk=32)
    req = run.ask(70, answer=90)
    run.step(1)
    row = req.kv.held_row
    release_kv_cache(req, run.memory, is_insert=False)
    req.kv.req_pool_idx = row
    run.step(3)
    (claim,) = judge(run.ledger)
    assert (claim.kind, claim.request_id, claim.row) == (Kind.RECORD_REUSED, "r1", row)
    assert claim.evidence["allocated_tokens"] == 0 < claim.evidence["committed_tokens"]
    run.until_idle()
    assert run.ledger.accounts["full"].unaccounted == 0


def test_any_other_check_leads_to_its_own_page_and_severity(a_run) -> None:
    run = a_run()
    run.memory.contracts.require(CHECKS.locks_balance, False, hint="unlocked once too often", facts={"lock_ref": 0})
    run.ask(5)
    run.step(1)
    (claim,) = judge(run.ledger)
    assert (claim.kind, claim.runbook_page) == (Kind.CHECK_FAILED, "docs/runbooks/locks-balance.md")
    assert claim.evidence == {"times": 1, "lock_ref": 0}
    assert claim.summary == "check locks-balance failed: unlocked once too often"


def test_a_check_is_spoken_of_for_five_minutes_after_its_last_failure(a_run) -> None:
    run = a_run()
    run.ask(5)
    run.memory.contracts.require(CHECKS.locks_balance, False)
    run.until_idle()
    (failed,) = run.ledger.failed.values()
    wall = int(failed.last_at * 1e9)
    for seconds, expected in ((299, 1), (301, 0)):
        frame = msgspec.structs.replace(run.last, events=[], wall_ns=wall + seconds * 10**9)
        run.ledger.apply(frame)
        assert len(judge(run.ledger)) == expected


def test_a_rule_that_cannot_run_says_why_and_stays_silent(a_run) -> None:
    pools = (PoolInfo("full", "slot", 8, 1, 0, facts=("accounts",)),)
    said = standing(Identity("far", "f" * 32, source="scrape", pools=pools))
    assert said["orphan_row"] == "needs lengths, rows, which scrape does not know"
    assert all(why != "ok" for why in said.values())
    assert set(standing(a_run().identity).values()) == {"ok"}


# -- the life of a finding --------------------------------------------------------------------------------------------


@pytest.fixture
def lost(a_run):
    """A run with one orphan row, and a book."""
    run = a_run(page_size=4)
    req = run.ask(10, answer=90)
    run.ask(10, answer=90)
    run.step(3)
    run.lose(req)
    return run, FindingBook(run.identity)


def test_a_finding_opens_once_and_resolves_when_the_balance_is_back(lost) -> None:
    run, book = lost
    changes = book.reconcile(judge(run.ledger), 10.0)
    (opened,) = changes.opened
    assert (opened.state, opened.opened_at, opened.opened_step) == (FindingState.OPEN, 10.0, run.scheduler.steps)
    run.step(2)
    assert not book.reconcile(judge(run.ledger), 11.0).opened
    run.scheduler.abort()
    run.until_idle()
    run.scheduler.flush()
    run.follow()
    (resolved,) = book.reconcile(judge(run.ledger), 20.0).resolved
    assert (resolved.id, resolved.state, resolved.resolved_at) == (opened.id, FindingState.RESOLVED, 20.0)
    assert book.open() == []


def test_the_same_frames_give_the_same_id(lost) -> None:
    run, book = lost
    (one,) = book.reconcile(judge(run.ledger), 10.0).opened
    (other,) = FindingBook(run.identity).reconcile(judge(run.ledger), 99.0).opened
    assert one.id == other.id


def test_a_book_that_is_taken_up_again_goes_on_with_what_was_open(lost) -> None:
    run, book = lost
    (opened,) = book.reconcile(judge(run.ledger), 10.0).opened
    again = FindingBook(run.identity, [(book.subject_of(opened), opened)])
    assert not again.reconcile(judge(run.ledger), 11.0).opened
    assert again.open()[0].opened_at == 10.0


def test_an_acknowledged_finding_stays_open_and_acknowledged(lost) -> None:
    run, book = lost
    (opened,) = book.reconcile(judge(run.ledger), 10.0).opened
    assert book.acknowledge("no such id") is None
    assert book.acknowledge(opened.id).state is FindingState.ACKNOWLEDGED
    book.reconcile(judge(run.ledger), 12.0)
    assert [finding.state for finding in book.open()] == [FindingState.ACKNOWLEDGED]


def test_a_second_leak_is_a_second_finding(lost) -> None:
    run, book = lost
    book.reconcile(judge(run.ledger), 10.0)
    run.lose(run.scheduler.running.reqs[0])
    changes = book.reconcile(judge(run.ledger), 11.0)
    assert len(changes.opened) == 1 and len(book.open()) == 2
    assert len({finding.row for finding in book.open()}) == 2


def test_the_rest_of_an_account_that_moves_is_no_news(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=20)
    run.ask(10, answer=60)
    run.step(3)
    slots = run.memory.slots
    kept = slots.free_segment, slots.free_segments
    slots.free_segment, slots.free_segments = (lambda *_: None), (lambda *_: None)
    run.scheduler.abort(req.rid)
    run.step(1)
    slots.free_segment, slots.free_segments = kept
    book = FindingBook(run.identity)
    assert len(book.reconcile(judge(run.ledger), 1.0).opened) == 1
    for second in range(2, 6):
        run.step(4, ms=300)
        assert not book.reconcile(judge(run.ledger), float(second))


def test_a_slot_that_is_free_twice_while_another_is_missing_is_told(a_run) -> None:
    run = a_run(page_size=1)
    run.ask(10, answer=90)
    run.step(3)
    ring = run.memory.slots._ring
    ring._ids[ring._head + 5] = ring._ids[ring._head + 6]
    run.step(1, ms=6000)
    kinds = {claim.kind for claim in judge(run.ledger)}
    assert Kind.OVER_RELEASE in kinds
