"""What every cache keeps, and what the radix tree does, with the numbers of the behaviour."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.engine.contracts import KvContractError, Mode
from kvlens.engine.memory.release import release_kv_cache
from kvlens.engine.probe import CheckFailed, Evicted, NodeSplit


def stored(bench, *sequences: list[int]):
    """A bench whose tree holds these sequences, each with slots of its own."""
    for sequence in sequences:
        slots = bench.memory.slots.alloc(len(sequence))
        present = bench.memory.cache.insert(sequence, slots)
        bench.memory.slots.free_segment(slots[:present], 0)
    return bench.memory.cache


# -- every cache ------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["radix", "chunk"])
def any_cache(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("is_insert", [True, False])
def test_a_finished_request_leaves_every_slot_free_or_cached(a_bench, any_cache, page_size, is_insert) -> None:
    bench = a_bench(page_size=page_size, cache=any_cache)
    req = bench.prefill(list(range(1, 24)))
    bench.decode(req, 30, 31)
    release_kv_cache(req, bench.memory, is_insert=is_insert)
    available, evictable, protected = bench.account()
    assert available + evictable == 64 and protected == 0
    kept = 25 if is_insert else 23  # what was kept while it ran stays
    assert evictable == (kept // page_size * page_size if any_cache == "radix" else 0)
    assert bench.memory.rows.available_size() == 4


def test_chunks_follow_each_other_in_one_row(a_bench, any_cache) -> None:
    bench = a_bench(cache=any_cache)
    req = bench.a_request(list(range(1, 11)))
    seen = []
    for end in (4, 8, 10):
        bench.extend(req, to=end)
        bench.memory.cache.cache_unfinished_req(req)
        seen.append(bench.lengths(req))
        assert len(req.prefix_indices) == end
    protected = [0, 0, 0] if any_cache == "chunk" else [4, 8, 10]
    assert seen == [(4, p, end, end) for p, end in zip(protected, (4, 8, 10), strict=True)]


def test_nothing_is_found_for_an_empty_key(a_bench, any_cache) -> None:
    found = a_bench(cache=any_cache).memory.cache.match_prefix([])
    assert len(found.indices) == 0 and found.last_node is None


def test_unlocking_nothing_is_no_mistake(a_bench, any_cache) -> None:
    a_bench(cache=any_cache).memory.cache.dec_lock_ref(None)


# -- the radix tree ---------------------------------------------------------------------------------------------------


def test_a_common_beginning_is_stored_once_and_a_match_may_split(a_bench) -> None:
    bench = a_bench()
    cache = bench.memory.cache
    assert cache.insert([1, 2, 3], bench.memory.slots.alloc(3)) == 0
    assert cache.insert([1, 2, 4, 5], bench.memory.slots.alloc(4)) == 2
    assert cache.evictable_size() == 5
    assert sorted(node.key.tolist() for node in cache.nodes()) == [[1, 2], [3], [4, 5]]
    assert cache.match_prefix([1, 2, 3, 9]).indices.tolist() == [1, 2, 3]
    assert cache.match_prefix([1, 9]).indices.tolist() == [1]
    assert cache.evictable_size() == 5
    assert bench.probe.of(NodeSplit) == [NodeSplit(2, 1), NodeSplit(1, 1)]


def test_a_locked_path_is_protected_and_never_evicted(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1, 2, 3], [1, 2, 4, 5])
    node = cache.match_prefix([1, 2, 3]).last_node
    cache.inc_lock_ref(node)
    assert (cache.protected_size(), cache.evictable_size()) == (3, 2)
    assert cache.evict(10) == 2
    assert bench.probe.of(Evicted) == [Evicted(10, 2)]
    cache.dec_lock_ref(node)
    assert (cache.protected_size(), cache.evictable_size()) == (0, 3)
    assert cache.evict(1) == 1 and cache.evict(10) == 2 and bench.account() == (64, 0, 0)


def test_locks_on_a_node_stay_valid_when_it_is_split(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1, 2, 3, 4])
    node = cache.match_prefix([1, 2, 3, 4]).last_node
    cache.inc_lock_ref(node)
    cache.match_prefix([1, 2, 9])
    assert cache.protected_size() == 4 and cache.evict(10) == 0
    cache.dec_lock_ref(node)
    assert (cache.protected_size(), cache.evictable_size()) == (0, 4)


def test_only_whole_pages_are_kept_and_found(a_bench) -> None:
    bench = a_bench(page_size=4)
    cache = bench.memory.cache
    ten = list(range(1, 11))
    cache.insert(ten, bench.memory.slots.alloc(12))
    assert cache.evictable_size() == 8
    assert len(cache.match_prefix(ten[:7]).indices) == 4
    assert len(cache.match_prefix([1, 2, 3, 9, 5, 6, 7, 8]).indices) == 0


def test_namespaces_share_nothing(a_bench) -> None:
    bench = a_bench()
    cache = bench.memory.cache
    cache.insert([1, 2, 3], bench.memory.slots.alloc(3), "a")
    assert len(cache.match_prefix([1, 2, 3]).indices) == 0
    cache.insert([1, 2, 3], bench.memory.slots.alloc(3))
    assert cache.evictable_size() == 6
    assert cache.match_prefix([1, 2, 3], "a").indices.tolist() == [1, 2, 3]


def test_the_least_recently_used_leaf_goes_first(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1], [2], [3])
    cache.match_prefix([1])
    cache.evict(1)
    assert [len(cache.match_prefix([token]).indices) for token in (1, 2, 3)] == [1, 0, 1]
    cache.evict(1)
    assert [len(cache.match_prefix([token]).indices) for token in (1, 3)] == [0, 1]


def test_storing_is_a_use(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1])
    cache.match_prefix([1])
    stored(bench, [2])
    cache.evict(1)
    assert [len(cache.match_prefix([token]).indices) for token in (1, 2)] == [0, 1]


def test_a_parent_follows_its_last_child(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1, 2, 3], [1, 2, 4])
    assert cache.evict(2) == 2
    assert [node.key.tolist() for node in cache.nodes()] == [[1, 2]]
    assert cache.evict(1) == 2


def test_an_unfinished_prompt_is_kept_up_to_its_last_whole_page(a_bench) -> None:
    bench = a_bench(page_size=4)
    req = bench.prefill(list(range(1, 11)))
    assert bench.lengths(req)[1:] == (8, 10, 10)
    assert bench.account() == (52, 0, 8) and len(req.prefix_indices) == 10


def test_two_equal_prompts_prefilled_together_end_on_the_same_slots(a_bench) -> None:
    bench = a_bench(page_size=4)
    prompt = list(range(1, 11))
    one, two = bench.a_request(prompt), bench.a_request(prompt)
    bench.extend(one, two)
    for req in (one, two):
        bench.memory.cache.cache_unfinished_req(req)
    assert bench.account() == (48, 0, 8)
    rows = bench.memory.rows.req_to_token
    assert rows[one.kv.req_pool_idx, :8].tolist() == rows[two.kv.req_pool_idx, :8].tolist()
    for req in (one, two):
        release_kv_cache(req, bench.memory)
    assert bench.account() == (56, 8, 0)


def test_a_fully_cached_prompt_computes_at_least_its_last_token(a_bench) -> None:
    for page_size, hit in ((4, 28), (1, 31)):
        bench = a_bench(page_size=page_size)
        prompt = list(range(1, 33))
        release_kv_cache(bench.prefill(prompt), bench.memory)
        assert len(bench.a_request(prompt).prefix_indices) == hit


def test_stored_slots_and_tokens_are_copies(a_bench) -> None:
    bench = a_bench()
    slots, tokens = bench.memory.slots.alloc(3), np.array([1, 2, 3], np.int64)
    bench.memory.cache.insert(tokens, slots)
    slots[:] = tokens[:] = 0
    assert bench.memory.cache.match_prefix([1, 2, 3]).indices.tolist() == [1, 2, 3]


@pytest.mark.parametrize("reset", [False, True])
def test_an_unlock_too_many_is_refused_and_protects_who_comes_next(a_bench, reset) -> None:
    bench = a_bench()
    cache = stored(bench, [1, 2, 3])
    node = cache.match_prefix([1, 2, 3]).last_node
    if reset:
        cache.inc_lock_ref(node)
        cache.reset()
    with pytest.raises(KvContractError, match="locks-balance"):
        cache.dec_lock_ref(node)
    bench = a_bench(mode=Mode.REPORT)
    cache = stored(bench, [1, 2, 3])
    node = cache.match_prefix([1, 2, 3]).last_node
    cache.dec_lock_ref(node)
    cache.inc_lock_ref(node)
    assert (cache.protected_size(), len(bench.probe.of(CheckFailed))) == (3, 1)


def test_tree_slots_are_all_of_the_trees(a_bench) -> None:
    bench = a_bench()
    cache = stored(bench, [1, 2, 3], [1, 2, 4, 5])
    assert len(np.unique(cache.tree_slots())) == cache.total_size() == 5
