"""Slots and pages: who gets which, and that nothing enters the free list twice."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.engine.contracts import Contracts, KvContractError, Mode
from kvlens.engine.pools.paged import PagedSlotAllocator
from kvlens.engine.pools.slots import FreeRing, SlotAllocator, TokenSlotAllocator
from kvlens.engine.probe import CheckFailed, NullProbe


class Recording(NullProbe):
    def __init__(self) -> None:
        self.failed: list[CheckFailed] = []

    def emit(self, event) -> None:
        self.failed.append(event)


def ids(*slots: int) -> np.ndarray:
    return np.array(slots, np.int64)


def tokens(size: int = 8, mode: Mode = Mode.STRICT, probe: Recording | None = None) -> TokenSlotAllocator:
    return TokenSlotAllocator(size, contracts=Contracts(mode, probe))


def pages(mode: Mode = Mode.STRICT, probe: Recording | None = None) -> PagedSlotAllocator:
    return PagedSlotAllocator(32, 4, contracts=Contracts(mode, probe))


def a_row(allocator: PagedSlotAllocator) -> np.ndarray:
    """Positions [0, 17) of one request, as S3.2 of the behaviour fills them: pages 1 to 5."""
    first = allocator.alloc_extend(ids(0), ids(6), ids(-1))
    second = allocator.alloc_extend(ids(6), ids(13), ids(9))
    row = [*first.tolist(), *second.tolist()]
    for length in (14, 15, 16, 17):
        row += allocator.alloc_decode(ids(length), ids(row[-1])).tolist()
    return np.array(row, np.int64)


# -- tokens -----------------------------------------------------------------------------------------------------------


def test_tokens_are_handed_out_in_the_order_they_came_back() -> None:
    allocator = tokens()
    assert allocator.alloc(3).tolist() == [1, 2, 3]
    allocator.free(ids(2))
    assert allocator.available_size() == 6
    assert allocator.alloc(6).tolist() == [4, 5, 6, 7, 8, 2]
    assert allocator.alloc(1) is None and allocator.available_size() == 0


def test_no_tokens_are_an_empty_array() -> None:
    assert tokens().alloc(0).tolist() == []


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_partly_filled_page_is_continued_before_a_new_one_starts() -> None:
    allocator = pages()
    assert allocator.alloc_extend(ids(0), ids(6), ids(-1)).tolist() == [4, 5, 6, 7, 8, 9]
    assert allocator.available_size() == 24
    assert allocator.alloc_extend(ids(6), ids(13), ids(9)).tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert allocator.available_size() == 16
    assert [allocator.alloc_decode(ids(n), ids(n + 2)).tolist() for n in (14, 15, 16)] == [[17], [18], [19]]
    assert allocator.alloc_decode(ids(17), ids(19)).tolist() == [20]
    assert allocator.available_size() == 12


def test_one_slot_of_a_page_returns_all_of_it_and_it_is_handed_out_next() -> None:
    allocator = pages()
    a_row(allocator)
    allocator.free(ids(4, 5, 6))
    assert allocator.available_size() == 16
    assert allocator.alloc(4).tolist() == [4, 5, 6, 7]


def test_requests_take_pages_in_batch_order_all_or_nothing() -> None:
    allocator = pages()
    out = allocator.alloc_extend(ids(0, 0), ids(5, 3), ids(-1, -1))
    assert out.tolist() == [4, 5, 6, 7, 8, 12, 13, 14]
    assert allocator.alloc_extend(ids(0), ids(21), ids(-1)) is None
    assert allocator.available_size() == 20
    assert allocator.alloc(20) is not None and allocator.alloc_decode(ids(9), ids(11)) is None


def test_an_amount_that_is_no_whole_page_is_refused() -> None:
    with pytest.raises(ValueError, match="no whole pages of 4"):
        pages().alloc(6)


def test_a_segment_returns_the_pages_it_touches() -> None:
    allocator = pages()
    row = a_row(allocator)
    allocator.free_segment(row[6:13], 6)
    assert sorted({int(slot) // 4 for slot in allocator.free_slots()} - {6, 7, 8}) == [2, 3, 4]


def test_segments_that_share_a_page_return_it_once() -> None:
    allocator = pages()
    row = a_row(allocator)
    allocator.free_segments([(row[4:6], 4), (row[6:13], 6)])
    assert allocator.available_size() == 24 and allocator.verify_accounting() == []


def test_a_pool_smaller_than_a_page_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least one page"):
        PagedSlotAllocator(3, 4, contracts=Contracts())


# -- what every allocator keeps ---------------------------------------------------------------------------------------


@pytest.fixture(params=["tokens", "pages"])
def build(request: pytest.FixtureRequest):
    return tokens if request.param == "tokens" else pages


def half(allocator: SlotAllocator) -> np.ndarray:
    return allocator.alloc(allocator.size // 2)


def test_a_second_free_raises_in_strict_mode_and_changes_nothing(build) -> None:
    allocator = build()
    taken = half(allocator)
    allocator.free(taken)
    with pytest.raises(KvContractError, match="free-slots-unique"):
        allocator.free(taken)
    assert allocator.available_size() == allocator.size and allocator.verify_accounting() == []


def test_a_second_free_is_refused_in_report_mode_and_told_with_its_amount(build) -> None:
    probe = Recording()
    allocator = build(mode=Mode.REPORT, probe=probe)
    taken = half(allocator)
    page = allocator.page_size
    allocator.free(taken[:page])
    allocator.free(taken)
    assert allocator.available_size() == allocator.size and allocator.verify_accounting() == []
    (failed,) = probe.failed
    assert failed.facts == {"slots": page, "first_slot": int(taken[0])}


def test_repeated_and_unknown_ids_in_one_free_are_refused_too(build) -> None:
    probe = Recording()
    allocator = build(mode=Mode.REPORT, probe=probe)
    taken = half(allocator)
    allocator.free(np.concatenate((taken, ids(10_000))))
    allocator.free_segments([(taken[:1], 0), (taken[:1], 100)])
    assert allocator.available_size() == allocator.size and allocator.verify_accounting() == []
    assert len(probe.failed) == 2


def test_the_slot_that_was_repeated_is_the_one_that_is_named(build) -> None:
    probe = Recording()
    allocator = build(mode=Mode.REPORT, probe=probe)
    taken, page = half(allocator), allocator.page_size
    first, second = taken[:page], taken[page : 2 * page]
    allocator.free_segments([(first, 0), (second, page), (second, 2 * page)])
    assert probe.failed[0].facts == {"slots": page, "first_slot": int(second[0])}


def test_frees_inside_a_group_come_when_it_ends_also_by_an_exception(build) -> None:
    allocator = build()
    taken = half(allocator)
    with pytest.raises(RuntimeError, match="in between"), allocator.free_group():
        view = taken[:]
        allocator.free(view)
        assert allocator.pending_tokens == len(taken) and allocator.available_size() == allocator.size - len(taken)
        view[:] = 0  # a row that is rewritten while its slots wait
        raise RuntimeError("in between")
    assert allocator.available_size() == allocator.size and allocator.pending_tokens == 0


def test_a_double_free_is_not_masked_by_a_group(build) -> None:
    allocator = build()
    taken = half(allocator)
    with pytest.raises(KvContractError), allocator.free_group():
        allocator.free(taken)
        allocator.free_segment(taken[:1], 0)


def test_groups_do_not_nest_and_lose_nothing(build) -> None:
    with pytest.raises(KvContractError, match="free-group-closed"):
        allocator = build()
        with allocator.free_group(), allocator.free_group():
            pass
    allocator = build(mode=Mode.REPORT)
    taken = half(allocator)
    with allocator.free_group():
        with allocator.free_group():
            allocator.free(taken)
        assert allocator.available_size() == allocator.size - len(taken)
    assert allocator.available_size() == allocator.size


def test_freeing_nothing_is_nothing_and_clear_is_everything(build) -> None:
    allocator = build()
    half(allocator)
    allocator.free(ids())
    allocator.free_segment(ids(), 5)
    assert allocator.available_size() == allocator.size // 2
    allocator.clear()
    assert sorted(allocator.free_slots().tolist()) == list(
        range(allocator.page_size, allocator.page_size + allocator.size)
    )


def test_verify_accounting_names_what_is_wrong(build) -> None:
    allocator = build()
    half(allocator)
    allocator._ring.push_back(ids(1))
    assert allocator.verify_accounting() == ["1 free pages are marked as handed out"]
    allocator._ring.push_back(ids(1))
    assert "1 pages are in the free list twice" in allocator.verify_accounting()


def test_the_ring_goes_round() -> None:
    ring = FreeRing(1, 5)
    for _ in range(7):
        taken = ring.pop_front(3)
        ring.push_back(taken[:2])
        ring.push_front(taken[2:])
    assert len(ring) == 5 and sorted(ring.snapshot().tolist()) == [1, 2, 3, 4, 5]
