"""Rows: last returned, first handed out; each tenancy has its own generation."""

from __future__ import annotations

import pytest

from kvlens.engine.contracts import Contracts, KvContractError, Mode
from kvlens.engine.pools.rows import ReqToTokenPool
from kvlens.engine.probe import CheckFailed, NullProbe, RowReturned, RowTaken
from kvlens.engine.record import Req


class Recording(NullProbe):
    def __init__(self) -> None:
        self.events: list[object] = []

    def emit(self, event) -> None:
        self.events.append(event)


@pytest.fixture
def probe() -> Recording:
    return Recording()


def a_pool(probe: Recording, size: int = 4, mode: Mode = Mode.STRICT) -> ReqToTokenPool:
    return ReqToTokenPool(size, 16, contracts=Contracts(mode, probe), probe=probe, step=lambda: 9)


def requests(count: int) -> list[Req]:
    return [Req(number, f"r{number}", [1]) for number in range(1, count + 1)]


def test_the_row_returned_last_is_handed_out_next_with_a_new_generation(probe: Recording) -> None:
    pool, (one, two, three) = a_pool(probe), requests(3)
    assert pool.alloc([one, two], "test") == [3, 4]
    one.kv.kv_allocated_len = 5
    pool.free(one.kv, one.number)
    assert pool.free_slots == [1, 2, 3]
    assert pool.alloc([three], "test") == [3]
    assert (pool.req_generation[3], three.kv.generation, pool.tenants[3]) == (2, 2, 3)
    assert probe.events == [
        RowTaken(9, 3, 1, 1, "test"), RowTaken(9, 4, 1, 2, "test"), RowReturned(9, 3, 1, 1, 0, 5),
        RowTaken(9, 3, 2, 3, "test"),
    ]  # fmt: skip


def test_too_few_rows_change_nothing(probe: Recording) -> None:
    pool, reqs = a_pool(probe, 3), requests(4)
    assert pool.alloc(reqs, "test") is None
    assert pool.free_slots == [1, 2, 3] and not any(req.kv.holds_kv for req in reqs)
    assert probe.events == []


def test_holders_keep_their_rows_also_when_none_is_free(probe: Recording) -> None:
    pool, reqs = a_pool(probe, 2), requests(2)
    rows = pool.alloc(reqs, "test")
    for req in reqs:
        req.kv.kv_allocated_len = 1
    assert pool.alloc(reqs, "test") == rows and pool.available_size() == 0


def test_one_new_request_beside_a_holder_gets_none_when_none_is_free(probe: Recording) -> None:
    pool, (one, two) = a_pool(probe, 1), requests(2)
    pool.alloc([one], "test")
    one.kv.kv_allocated_len = 1
    assert pool.alloc([one, two], "test") is None
    assert one.kv.req_pool_idx == 1 and not two.kv.holds_kv


def test_no_rows_are_no_rows(probe: Recording) -> None:
    pool = a_pool(probe)
    assert pool.alloc([], "test") == [] and pool.alloc_rows(0) == [] and pool.available_size() == 4


def test_a_reused_row_must_carry_allocated_kv_whatever_was_committed(probe: Recording) -> None:
    pool, (one,) = a_pool(probe), requests(1)
    pool.alloc([one], "test")
    one.kv.kv_committed_len = 12
    with pytest.raises(KvContractError, match="reused-row-carries-kv"):
        pool.alloc([one], "test")
    one.kv.kv_allocated_len, one.kv.kv_committed_len = 1, 0
    assert pool.alloc([one], "test") == [4]


def test_in_report_mode_a_record_that_was_released_gets_a_fresh_row_and_frees_nobodys(probe: Recording) -> None:
    pool, (stale, other) = a_pool(probe, mode=Mode.REPORT), requests(2)
    pool.alloc([stale], "test")
    stale.kv.kv_allocated_len = 3
    pool.free(stale.kv, stale.number)
    stale.kv.mark_kv_released()
    stale.kv.req_pool_idx = 4  # what the fault does: the record claims the row it gave back
    pool.alloc([other], "test")
    other.kv.kv_allocated_len = 7
    assert pool.alloc([stale], "test") == [3]
    assert (other.kv.req_pool_idx, other.kv.kv_allocated_len) == (4, 7)
    assert (stale.kv.generation, pool.available_size()) == (1, 2)
    (failed,) = [event for event in probe.events if isinstance(event, CheckFailed)]
    assert (failed.check, failed.request, failed.row, failed.allocated_tokens) == ("reused-row-carries-kv", 1, 4, 0)


def test_freeing_without_a_row_is_refused(probe: Recording) -> None:
    pool, (one,) = a_pool(probe), requests(1)
    with pytest.raises(KvContractError, match="free-needs-held-row"):
        pool.free(one.kv, 1)
    pool = a_pool(probe, mode=Mode.REPORT)
    pool.free(one.kv, 1)
    assert pool.available_size() == 4


def test_a_row_cannot_be_returned_twice(probe: Recording) -> None:
    pool = a_pool(probe)
    (row,) = pool.alloc_rows(1)
    pool.free_rows([row])
    with pytest.raises(KvContractError, match="row-taken-before-free"):
        pool.free_rows([row])
    pool = a_pool(probe, mode=Mode.REPORT)
    pool.free_rows([1, 99])
    assert pool.available_size() == 4


def test_a_record_whose_row_is_free_already_is_untouched_in_strict_mode_and_loses_its_claim_in_report(probe) -> None:
    for mode in (Mode.STRICT, Mode.REPORT):
        pool, (one,) = a_pool(probe, mode=mode), requests(1)
        pool.alloc([one], "test")
        one.kv.kv_allocated_len = 3
        pool.free_rows([4])
        if mode is Mode.STRICT:
            with pytest.raises(KvContractError, match="row-taken-before-free"):
                pool.free(one.kv, 1)
            assert (one.kv.req_pool_idx, one.kv.kv_allocated_len) == (4, 3)
        else:
            pool.free(one.kv, 1)
            assert not one.kv.holds_kv
        assert sorted(pool.free_slots) == [1, 2, 3, 4]
    assert not [event for event in probe.events if isinstance(event, RowReturned)]


def test_the_same_request_twice_takes_one_row(probe: Recording) -> None:
    pool, (one,) = a_pool(probe), requests(1)
    with pytest.raises(KvContractError, match="distinct-requests"):
        pool.alloc([one, one], "test")
    pool = a_pool(probe, mode=Mode.REPORT)
    assert pool.alloc([one, one], "test") == [4] and pool.available_size() == 3


def test_clear_forgets_everything(probe: Recording) -> None:
    pool = a_pool(probe)
    for _ in range(5):
        pool.free_rows(pool.alloc_rows(1) or [])
    pool.clear()
    assert pool.available_size() == 4 and not pool.req_generation.any() and not pool.lengths.any()
