"""Law of the memory layer: whatever is allocated, kept, evicted and released, every slot has exactly one owner."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.allocate import alloc_for_decode, alloc_for_extend, decode_needs
from kvlens.engine.memory.memory import KvMemory, KvOutOfMemory, build_memory
from kvlens.engine.memory.release import release_kv_cache
from kvlens.engine.probe import KvReleased, NullProbe
from kvlens.engine.record import Req

SLOTS, ROWS, WIDTH = 96, 5, 80


class Released(NullProbe):
    """Keeps the last release."""

    last: KvReleased | None = None

    def emit(self, event) -> None:
        if isinstance(event, KvReleased):
            self.last = event


class Memory(RuleBasedStateMachine):
    memory: KvMemory

    @initialize(page_size=st.sampled_from([1, 4, 16]), cache=st.sampled_from(["radix", "radix", "chunk"]))
    def build(self, page_size: int, cache: str) -> None:
        self.probe = Released()
        self.memory = build_memory(
            rows=ROWS, width=WIDTH, slots=SLOTS, page_size=page_size, cache=cache,
            contracts=Contracts(Mode.STRICT, self.probe), probe=self.probe,
        )  # fmt: skip
        self.chunked: list[Req] = []
        self.running: list[Req] = []
        self.number = 0

    # -- what an engine does ----------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.chunked) + len(self.running) < ROWS)
    @rule(prompt=st.lists(st.integers(1, 2), min_size=1, max_size=50), chunk=st.integers(1, 50))
    def admit(self, prompt: list[int], chunk: int) -> None:
        self.number += 1
        req = Req(self.number, f"r{self.number}", prompt)
        match = self.memory.cache.match_prefix(prompt[:-1])
        self.memory.cache.inc_lock_ref(match.last_node)
        req.prefix_indices, req.last_node = match.indices, match.last_node
        if not self._extend(req, chunk):
            assert not req.kv.holds_kv
            self.memory.cache.dec_lock_ref(req.last_node)

    @precondition(lambda self: self.chunked)
    @rule(data=st.data(), chunk=st.integers(1, 50))
    def next_chunk(self, data: st.DataObject, chunk: int) -> None:
        req = self.chunked.pop(data.draw(st.integers(0, len(self.chunked) - 1)))
        before = (req.kv.req_pool_idx, req.kv.generation)
        if not self._extend(req, chunk):
            self.chunked.append(req)
        assert (req.kv.req_pool_idx, req.kv.generation) == before

    def _extend(self, req: Req, chunk: int) -> bool:
        req.extend_start = len(req.prefix_indices)
        req.extend_end = min(len(req.prompt_ids), req.extend_start + chunk)
        free = self.memory.slots.available_size()
        try:
            slots, rows = alloc_for_extend(self.memory, [req])
        except KvOutOfMemory:
            assert self.memory.slots.available_size() >= free
            return False
        assert len(slots) == req.extend_end - req.extend_start
        assert rows.tolist() == [req.kv.req_pool_idx]
        self.memory.cache.cache_unfinished_req(req)
        assert len(req.prefix_indices) == req.extend_end
        (self.running if req.extend_end == len(req.prompt_ids) else self.chunked).append(req)
        return True

    @precondition(lambda self: self.running)
    @rule()
    def decode(self) -> None:
        rows = np.array([req.kv.req_pool_idx for req in self.running], np.int64)
        if (self.memory.rows.lengths[1, rows] >= WIDTH).any():
            return
        needs, free = decode_needs(self.memory, rows), self.memory.slots.available_size()
        available = free + self.memory.cache.evictable_size()
        try:
            alloc_for_decode(self.memory, rows)
        except KvOutOfMemory:
            assert needs > available
            return
        for req in self.running:
            req.output_ids.append(1 + req.number % 2)

    @precondition(lambda self: self.chunked or self.running)
    @rule(data=st.data(), is_insert=st.booleans())
    def release(self, data: st.DataObject, is_insert: bool) -> None:
        holders = self.chunked + self.running
        req = holders[data.draw(st.integers(0, len(holders) - 1))]
        (self.chunked if req in self.chunked else self.running).remove(req)
        committed, owned = req.kv.kv_committed_len, self._owned(req)
        before = self.memory.slots.available_size() + self.memory.cache.total_size()
        release_kv_cache(req, self.memory, is_insert=is_insert)
        assert not req.kv.holds_kv and req.kv.is_kv_released and req.kv.kv_committed_len == committed
        assert self.memory.slots.available_size() + self.memory.cache.total_size() - before == owned
        event = self.probe.last
        parts = event.inserted_tokens + event.duplicate_tokens + event.body_tokens + event.tail_tokens
        assert event.protected_tokens + parts == self.memory.cache.ceil(event.allocated_tokens)

    @rule(tokens=st.integers(1, SLOTS))
    def evict(self, tokens: int) -> None:
        evictable, free = self.memory.cache.evictable_size(), self.memory.slots.available_size()
        freed = self.memory.cache.evict(tokens)
        assert freed >= min(tokens, evictable)
        assert self.memory.slots.available_size() == free + freed

    # -- what must hold ---------------------------------------------------------------------------------------------

    def _owned(self, req: Req) -> int:
        return self.memory.cache.ceil(req.kv.kv_allocated_len) - req.kv.cache_protected_len

    @invariant()
    def every_slot_has_exactly_one_owner(self) -> None:
        if not hasattr(self, "memory"):
            return
        memory, page = self.memory, self.memory.page_size
        owners = Counter(memory.slots.free_slots().tolist())
        owners.update(memory.cache.tree_slots().tolist())
        for req in self.chunked + self.running:
            line = memory.rows.req_to_token[req.kv.req_pool_idx]
            own = line[req.kv.cache_protected_len : req.kv.kv_allocated_len].tolist()
            owners.update({slot // page * page + i for slot in own for i in range(page)})
        assert owners == Counter(range(page, page + SLOTS))
        assert memory.slots.verify_accounting() == []
        free, evictable, protected = (
            memory.slots.available_size(), memory.cache.evictable_size(), memory.cache.protected_size()
        )  # fmt: skip
        private = sum(map(self._owned, self.chunked + self.running))
        assert free + evictable + protected + private == SLOTS

    @invariant()
    def locks_are_what_the_holders_hold(self) -> None:
        if not hasattr(self, "memory"):
            return
        cache = self.memory.cache
        protected = {
            slot
            for req in self.chunked + self.running
            for slot in self.memory.rows.req_to_token[req.kv.req_pool_idx, : req.kv.cache_protected_len].tolist()
        }
        assert cache.protected_size() == len(protected)
        assert cache.total_size() == len(cache.tree_slots())
        assert self.memory.rows.available_size() == ROWS - len(self.chunked) - len(self.running)

    def teardown(self) -> None:
        if not hasattr(self, "memory"):
            return
        for req in self.chunked + self.running:
            release_kv_cache(req, self.memory)
        assert self.memory.slots.available_size() + self.memory.cache.evictable_size() == SLOTS
        assert self.memory.cache.protected_size() == 0
        assert self.memory.rows.available_size() == ROWS


TestMemory = pytest.mark.filterwarnings("error")(Memory.TestCase)
TestMemory.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
