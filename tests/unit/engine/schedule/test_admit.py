"""Who is prefilled next, and how much of whom."""

from __future__ import annotations

from collections import deque

import pytest

from kvlens.engine.contracts import KvContractError, Mode
from kvlens.engine.probe import CheckFailed


def extents(reqs) -> list[tuple[str, int, int]]:
    return [(req.rid, req.extend_start, req.extend_end) for req in reqs]


def test_a_long_prompt_is_cut_to_whole_pages_of_the_budget(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(page_size=16, slots=128, chunk=40)
    reqs, truncated = scheduler.admission.compose(deque([a_request(50)]), None, scheduler.running)
    assert extents(reqs) == [("r1", 0, 32)]
    assert truncated is reqs[0]


def test_the_last_chunk_of_one_and_the_first_of_the_next_share_a_batch(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(chunk=4)
    scheduler.add(a_request(10))
    scheduler.add(a_request(5))
    for _ in range(3):
        scheduler.step()
    third = scheduler.runner.batches[2]
    assert third.prefix_lens.tolist() == [8, 0]
    assert third.seq_lens.tolist() == [10, 2]
    assert scheduler.chunked.rid == "r2"


def test_a_request_that_does_not_fit_is_left_without_row_lock_or_prefix(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(slots=32)
    scheduler.add(a_request(range(8), answer=1))
    run_out(scheduler)
    scheduler.add(a_request(16, answer=8))
    scheduler.step()
    late = a_request([*range(8), *range(50, 60)], answer=8)
    scheduler.add(late)
    scheduler.step()
    assert late in scheduler.waiting
    assert (late.kv.holds_kv, late.last_node, len(late.prefix_indices)) == (False, None, 0)
    assert scheduler.memory.cache.protected_size() == 16  # the running one's prompt, and nothing for the late one


def test_nobody_overtakes_a_request_that_waits_for_room(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(slots=32)
    scheduler.add(a_request(20, answer=10))
    scheduler.step()
    scheduler.add(a_request(20, answer=4))
    scheduler.add(a_request(1, answer=1))
    scheduler.step()
    scheduler.step()
    assert [req.rid for req in scheduler.waiting] == ["r2", "r3"]


def test_a_request_alone_is_admitted_whatever_it_may_still_produce(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(slots=32)
    scheduler.add(a_request(30, answer=3))
    assert [output.token_ids for output in run_out(scheduler)["r1"]] == [(130,), (131,), (132,)]


def test_no_more_requests_run_than_there_are_rows(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(rows=2)
    for _ in range(3):
        scheduler.add(a_request(3))
    scheduler.step()
    assert len(scheduler.running) == 2
    assert len(scheduler.waiting) == 1


def test_the_reserve_shrinks_with_decode_steps_and_grows_with_a_retraction(a_scheduler) -> None:
    admission = a_scheduler().admission
    before = admission._reserve
    for _ in range(1000):
        admission.decoded()
    assert admission._reserve == admission.RESERVE_LEAST < before
    admission.retracted()
    assert admission._reserve == pytest.approx(admission.RESERVE_LEAST + admission.RESERVE_PENALTY)


def cut_everyone_short(admission) -> None:
    def cut(req, budget):
        req.extend_start, req.extend_end = 0, 2

    admission._cut = cut


def test_two_truncated_requests_in_a_batch_are_refused_in_strict_mode(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(mode=Mode.STRICT)
    cut_everyone_short(scheduler.admission)
    with pytest.raises(KvContractError, match=r"one-chunked-request: .*truncated 2"):
        scheduler.admission.compose(deque([a_request(5), a_request(5)]), None, scheduler.running)


def test_two_truncated_requests_in_a_batch_are_told_in_report_mode(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(mode=Mode.REPORT)
    cut_everyone_short(scheduler.admission)
    scheduler.admission.compose(deque([a_request(5), a_request(5)]), None, scheduler.running)
    assert [(e.check, e.facts) for e in scheduler.probe.of(CheckFailed)] == [("one-chunked-request", {"truncated": 2})]
