"""The three things that hold KV, put together: rows, slots and the prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.engine.cache.chunk import ChunkCache
from kvlens.engine.cache.radix import RadixCache
from kvlens.engine.pools.paged import PagedSlotAllocator
from kvlens.engine.pools.rows import ReqToTokenPool
from kvlens.engine.pools.slots import SlotAllocator, TokenSlotAllocator

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvlens.engine.cache.base import PrefixCache
    from kvlens.engine.contracts import Contracts
    from kvlens.engine.probe import Probe


class KvOutOfMemory(RuntimeError):
    """An allocation that admission should have prevented; nothing was taken."""


@dataclass(frozen=True, slots=True)
class KvMemory:
    """Rows, slots and cache of one engine. At every quiet moment each slot has exactly one owner among them."""

    rows: ReqToTokenPool
    slots: SlotAllocator
    cache: PrefixCache
    contracts: Contracts
    probe: Probe

    @property
    def page_size(self) -> int:
        return self.slots.page_size

    def evict_to_free(self, tokens: int) -> None:
        """Evict what is missing for `tokens` to be available; may free less when the cache has less."""
        short = tokens - self.slots.available_size()
        if short > 0:
            self.cache.evict(short)

    def out_of_memory(self, wanted: str) -> KvOutOfMemory:
        """The error for an allocation of `wanted`, with the account it failed on."""
        free, evictable = self.slots.available_size(), self.cache.evictable_size()
        protected = self.cache.protected_size()
        private = self.slots.size - free - evictable - protected
        return KvOutOfMemory(
            f"{wanted} do not fit: size {self.slots.size:,} = free {free:,} + evictable {evictable:,} + protected "
            f"{protected:,} + private {private:,} slots; rows {self.rows.available_size():,} free of "
            f"{self.rows.size:,}. Admission should have prevented this: lower --max-running, or raise --pool-slots"
        )

    def clear(self) -> None:
        """Everything free. Legal only when no request holds KV."""
        self.cache.reset()
        self.slots.clear()
        self.rows.clear()


@dataclass(frozen=True, slots=True)
class FullPool:
    """The slot pool as a probe sees it."""

    memory: KvMemory
    bytes_per_slot: int
    name: str = "full"

    @property
    def size(self) -> int:
        return self.memory.slots.size

    @property
    def page_size(self) -> int:
        return self.memory.page_size

    def free(self) -> int:
        return self.memory.slots.available_size()

    def evictable(self) -> int:
        return self.memory.cache.evictable_size()

    def protected(self) -> int:
        return self.memory.cache.protected_size()

    def free_slots(self) -> NDArray[np.int64]:
        return self.memory.slots.free_slots()

    def tree_slots(self) -> NDArray[np.int64]:
        return self.memory.cache.tree_slots()


def build_memory(
    *,
    rows: int,
    width: int,
    slots: int,
    page_size: int,
    cache: str,
    contracts: Contracts,
    probe: Probe,
    step: Callable[[], int] = lambda: 0,
) -> KvMemory:
    """Pools and cache of one engine. `width`: positions per row; `cache`: radix or chunk."""
    row_pool = ReqToTokenPool(rows, width, contracts=contracts, probe=probe, step=step)
    allocator: SlotAllocator
    if page_size == 1:
        allocator = TokenSlotAllocator(slots, contracts=contracts)
    else:
        allocator = PagedSlotAllocator(slots, page_size, contracts=contracts)
    prefix_cache: PrefixCache
    if cache == "radix":
        prefix_cache = RadixCache(row_pool, allocator, contracts=contracts, probe=probe)
    elif cache == "chunk":
        prefix_cache = ChunkCache(row_pool, allocator)
    else:
        raise ValueError(f"there is no cache {cache!r}: choose radix or chunk")
    return KvMemory(row_pool, allocator, prefix_cache, contracts, probe)
