"""In by two ways, out by one: with the numbers of the behaviour."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.engine.contracts import KvContractError, Mode
from kvlens.engine.memory.allocate import alloc_for_decode, decode_needs
from kvlens.engine.memory.memory import KvOutOfMemory, build_memory
from kvlens.engine.memory.release import release_kv_cache
from kvlens.engine.probe import CheckFailed, Evicted, KvReleased, RowReturned


def rows_of(*reqs) -> np.ndarray:
    return np.array([req.kv.req_pool_idx for req in reqs], np.int64)


# -- in ---------------------------------------------------------------------------------------------------------------


def test_eviction_makes_up_exactly_for_what_is_missing(a_bench) -> None:
    bench = a_bench(slots=25)
    cache, slots = bench.memory.cache, bench.memory.slots
    for first in range(5):
        cache.insert([100 + first, 1, 2, 3], slots.alloc(4))
    assert bench.account() == (5, 20, 0)
    bench.extend(bench.a_request(list(range(1, 13))))
    assert bench.account() == (1, 12, 0)
    assert bench.probe.of(Evicted) == [Evicted(asked_tokens=7, freed_tokens=8)]


def test_a_request_that_is_in_the_batch_twice_is_served_once_and_loses_no_slot(a_bench) -> None:
    bench = a_bench(mode=Mode.REPORT)
    req = bench.a_request([1, 2, 3])
    assert len(bench.extend(req, req)) == 3
    assert bench.account() == (61, 0, 0) and bench.memory.rows.available_size() == 3
    assert [failed.check for failed in bench.probe.of(CheckFailed)] == ["distinct-requests"]


def test_decode_opens_a_page_only_at_its_border(a_bench) -> None:
    bench = a_bench(page_size=4)
    reqs = [bench.prefill([first, 1, 1, 1, 1, 1, 1][:length]) for first, length in ((5, 5), (6, 6), (7, 7))]
    available = bench.memory.slots.available_size()
    assert decode_needs(bench.memory, rows_of(*reqs)) == 0
    alloc_for_decode(bench.memory, rows_of(*reqs))
    assert bench.memory.slots.available_size() == available
    assert decode_needs(bench.memory, rows_of(*reqs)) == 4
    alloc_for_decode(bench.memory, rows_of(*reqs))
    assert bench.memory.slots.available_size() == available - 4
    assert [bench.lengths(req)[2:] for req in reqs] == [(7, 7), (8, 8), (9, 9)]


def test_an_extend_mirrors_its_prefix_and_takes_pages_for_the_rest(a_bench) -> None:
    bench = a_bench(page_size=4)
    release_kv_cache(bench.prefill(list(range(1, 9))), bench.memory)
    req = bench.a_request(list(range(1, 14)))
    prefix = req.prefix_indices.tolist()
    available = bench.memory.slots.available_size()
    slots = bench.extend(req)
    line = bench.memory.rows.req_to_token[req.kv.req_pool_idx]
    assert (len(prefix), len(slots)) == (8, 5)
    assert line[:8].tolist() == prefix and line[8:13].tolist() == slots.tolist()
    assert bench.lengths(req)[1:] == (8, 13, 13)
    assert bench.memory.slots.available_size() == available - 8


def test_too_few_rows_take_nothing_and_say_what_there_is(a_bench) -> None:
    bench = a_bench(rows=1)
    bench.prefill([1, 2, 3])
    before = bench.account()
    with pytest.raises(KvOutOfMemory, match=r"1 more rows do not fit: .* rows 0 free of 1"):
        bench.extend(bench.a_request([7, 8]))
    assert bench.account() == before


def test_too_few_slots_give_the_rows_back_and_print_the_account(a_bench) -> None:
    bench = a_bench(slots=8)
    bench.prefill([1, 2, 3])
    req = bench.a_request([5] * 6)
    with pytest.raises(KvOutOfMemory, match=r"size 8 = free 5 . evictable 0 . protected 3 . private 0 slots"):
        bench.extend(req)
    assert not req.kv.holds_kv and req.kv.is_kv_released
    assert bench.memory.rows.available_size() == 3 and bench.account() == (5, 0, 3)


def test_a_decode_that_does_not_fit_changes_nothing(a_bench) -> None:
    bench = a_bench(slots=3)
    req = bench.prefill([1, 2, 3])
    with pytest.raises(KvOutOfMemory, match="1 slots of a decode step"):
        bench.decode(req, 4)
    assert bench.lengths(req)[1:] == (3, 3, 3)


def test_a_released_row_between_chunks_starts_its_request_over(a_bench) -> None:
    bench = a_bench(mode=Mode.REPORT)
    req = bench.prefill(list(range(1, 11)), to=4)
    row = req.kv.req_pool_idx
    release_kv_cache(req, bench.memory, is_insert=False)
    req.kv.req_pool_idx = row
    slots = bench.extend(req, to=8)
    assert len(slots) == 8 and req.extend_start == 0
    assert bench.lengths(req)[1:] == (0, 8, 8)
    release_kv_cache(req, bench.memory)
    available, evictable, protected = bench.account()
    assert available + evictable == 64 and protected == 0
    assert [failed.check for failed in bench.probe.of(CheckFailed)] == ["reused-row-carries-kv"]


def test_an_unknown_cache_is_named(a_bench) -> None:
    bench = a_bench()
    with pytest.raises(ValueError, match="there is no cache 'tree'"):
        build_memory(
            rows=1, width=1, slots=1, page_size=1, cache="tree", contracts=bench.memory.contracts, probe=bench.probe
        )


# -- out --------------------------------------------------------------------------------------------------------------


def a_request_behind_a_cached_page(bench, in_tree: int):
    """P 4, C = A = 10 at page size 4, with the first `in_tree` tokens of it in the tree."""
    sequence = list(range(1, 11))
    release_kv_cache(bench.prefill(sequence[:4]), bench.memory)
    req = bench.a_request(sequence)
    bench.extend(req)
    if in_tree > 4:
        slots = bench.memory.slots.alloc(in_tree)
        present = bench.memory.cache.insert(sequence[:in_tree], slots)
        bench.memory.slots.free_segment(slots[:present], 0)
    assert bench.lengths(req)[1:] == (4, 10, 10)
    return req


@pytest.mark.parametrize(("is_insert", "after"), [(True, (56, 8, 0)), (False, (60, 4, 0))])
def test_a_release_keeps_whole_pages_or_nothing(a_bench, is_insert, after) -> None:
    bench = a_bench(page_size=4)
    req = a_request_behind_a_cached_page(bench, 4)
    assert bench.account() == (52, 0, 4)
    release_kv_cache(req, bench.memory, is_insert=is_insert)
    assert bench.account() == after


def test_what_the_tree_has_already_goes_back(a_bench) -> None:
    bench = a_bench(page_size=4)
    req = a_request_behind_a_cached_page(bench, 8)
    assert bench.account() == (48, 4, 4)
    release_kv_cache(req, bench.memory)
    assert bench.account() == (56, 8, 0)
    released = bench.probe.of(KvReleased)[-1]
    parts = (released.inserted_tokens, released.duplicate_tokens, released.body_tokens, released.tail_tokens)
    assert (released.protected_tokens, parts, released.allocated_tokens) == (4, (0, 4, 4, 0), 10)


def test_committed_outlives_the_release_and_nothing_else_does(a_bench) -> None:
    bench = a_bench(cache="chunk")
    req = bench.prefill(list(range(1, 13)))
    release_kv_cache(req, bench.memory)
    assert bench.lengths(req) == (None, 0, 12, 0)
    assert bench.account() == (64, 0, 0) and bench.memory.rows.available_size() == 4
    (returned,) = bench.probe.of(RowReturned)
    assert (returned.committed_tokens, returned.allocated_tokens) == (12, 12)


def test_a_second_release_is_refused_and_frees_nothing(a_bench) -> None:
    bench = a_bench()
    req = bench.prefill([1, 2, 3])
    release_kv_cache(req, bench.memory)
    with pytest.raises(KvContractError, match="free-needs-held-row"):
        release_kv_cache(req, bench.memory)
    bench = a_bench(mode=Mode.REPORT)
    req = bench.prefill([1, 2, 3])
    release_kv_cache(req, bench.memory)
    before = bench.account()
    release_kv_cache(req, bench.memory)
    assert bench.account() == before and [f.check for f in bench.probe.of(CheckFailed)] == ["free-needs-held-row"]


def test_a_released_request_may_take_a_fresh_row_again(a_bench) -> None:
    bench = a_bench()
    req = bench.prefill([1, 2, 3])
    row = req.kv.req_pool_idx
    release_kv_cache(req, bench.memory)
    req.restart()
    bench.extend(req)
    assert (req.kv.req_pool_idx, req.kv.generation) == (row, 2)


@pytest.mark.parametrize(("row", "allocated"), [(2, 0), (None, 5)])
def test_a_record_that_contradicts_itself_is_refused(a_bench, row, allocated) -> None:
    for mode in (Mode.STRICT, Mode.REPORT):
        bench = a_bench(mode=mode)
        req = bench.a_request([1, 2, 3])
        req.kv.req_pool_idx, req.kv.kv_allocated_len = row, allocated
        if mode is Mode.STRICT:
            with pytest.raises(KvContractError, match="held-xor-released"):
                release_kv_cache(req, bench.memory)
        else:
            release_kv_cache(req, bench.memory)
            assert not req.kv.holds_kv and req.kv.is_kv_released and bench.account() == (64, 0, 0)


def test_a_record_that_contradicts_itself_still_gives_its_lock_back(a_bench) -> None:
    bench = a_bench(mode=Mode.REPORT)
    release_kv_cache(bench.prefill([1, 2, 3]), bench.memory)
    req = bench.a_request([1, 2, 3, 4])
    req.kv.req_pool_idx = 2
    assert bench.account() == (61, 0, 3)
    release_kv_cache(req, bench.memory)
    assert bench.account() == (61, 3, 0) and req.last_node is None


def test_a_release_forgets_the_node_it_unlocked(a_bench) -> None:
    bench = a_bench()
    req = bench.prefill([1, 2, 3])
    assert req.last_node is not None
    release_kv_cache(req, bench.memory)
    assert req.last_node is None


@pytest.mark.parametrize(("committed", "allocated"), [(10, 11), (11, 10)])
def test_lengths_that_differ_by_one_are_named_in_either_direction(a_bench, committed, allocated) -> None:
    bench = a_bench()
    req = bench.a_request(list(range(1, 12)))
    bench.extend(req)
    req.kv.kv_committed_len, req.kv.kv_allocated_len = committed, allocated
    with pytest.raises(KvContractError, match=f"protected 0, committed {committed}, allocated {allocated}"):
        release_kv_cache(req, bench.memory)
    assert bench.account() == (53, 0, 0) and req.kv.holds_kv


def test_nothing_beyond_what_is_allocated_is_kept_or_freed(a_bench) -> None:
    bench = a_bench(mode=Mode.REPORT)
    req = bench.a_request(list(range(1, 13)))
    bench.extend(req, to=10)
    req.kv.kv_committed_len = 12
    release_kv_cache(req, bench.memory)
    assert bench.account() == (54, 10, 0)
    assert bench.memory.cache.tree_slots().tolist() == list(range(1, 11))
    assert [failed.check for failed in bench.probe.of(CheckFailed)] == ["committed-within-allocated"]


def test_committed_and_allocated_that_differ_are_named_and_the_tail_is_freed(a_bench) -> None:
    bench = a_bench(page_size=4, mode=Mode.REPORT)
    req = bench.prefill(list(range(1, 13)))
    req.kv.kv_committed_len = 10
    release_kv_cache(req, bench.memory)
    available, evictable, protected = bench.account()
    assert available + evictable == 64 and protected == 0
    (failed,) = bench.probe.of(CheckFailed)
    assert failed.facts == {"protected": 12, "committed": 10, "allocated": 12}
    strict = a_bench(page_size=4)
    req = strict.prefill(list(range(1, 13)))
    req.kv.kv_committed_len = 10
    before = strict.account()
    with pytest.raises(KvContractError, match="protected 12, committed 10, allocated 12"):
        release_kv_cache(req, strict.memory)
    assert strict.account() == before


def test_what_was_allocated_beyond_what_was_committed_is_freed_by_whole_pages(a_bench) -> None:
    bench = a_bench(page_size=4, mode=Mode.REPORT)
    req = bench.a_request(list(range(1, 21)))
    bench.extend(req)
    req.kv.kv_committed_len = 10
    assert bench.lengths(req)[1:] == (0, 10, 20) and bench.account() == (44, 0, 0)
    release_kv_cache(req, bench.memory)
    assert bench.account() == (56, 8, 0)
    (released,) = bench.probe.of(KvReleased)
    parts = (released.inserted_tokens, released.duplicate_tokens, released.body_tokens, released.tail_tokens)
    assert (released.allocated_tokens, parts) == (20, (8, 0, 4, 8))


def test_a_retraction_starts_from_an_empty_record_and_needs_a_release_first(a_bench) -> None:
    bench = a_bench()
    req = bench.prefill([1, 2, 3])
    with pytest.raises(ValueError, match="release it before a retraction"):
        req.reset_for_retract()
    release_kv_cache(req, bench.memory, is_insert=False)
    req.reset_for_retract()
    assert bench.lengths(req) == (None, 0, 0, 0) and req.retractions == 1
