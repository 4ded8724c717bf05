"""The contract of a prefix cache: what stays for reuse when a request goes, and what goes back to the allocator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.pools.rows import ReqToTokenPool
    from kvlens.engine.pools.slots import SlotAllocator
    from kvlens.engine.record import Req


@dataclass(frozen=True, slots=True)
class MatchResult:
    """The longest cached prefix: its slots, int64, a whole number of pages; and the node it ends in, if any.

    Nothing is locked by a match: it holds until the next eviction.
    """

    indices: NDArray[np.int64]
    last_node: Any


@dataclass(frozen=True, slots=True)
class ReleasedParts:
    """Where [P, ceil(n)) of a finished row went, in tokens of whole pages."""

    inserted: int
    """Now the tree's."""
    duplicate: int
    """Freed: the tree had it already."""
    body: int
    """Freed: not to be kept, or the partly filled last page."""


class PrefixCache(ABC):
    """Every cache keeps these promises; one suite of tests runs over all of them.

    Keys are whole pages of tokens, and different namespaces share nothing. Slots of [0, P) of a row are the cache's: it
    never frees them for a request. Sizes are in tokens.
    """

    def __init__(self, rows: ReqToTokenPool, slots: SlotAllocator) -> None:
        self._rows = rows
        self._slots = slots
        self.page_size = slots.page_size

    @abstractmethod
    def match_prefix(self, tokens: Sequence[int], namespace: str | None = None) -> MatchResult:
        """Longest prefix of `tokens` in the cache. May split a node; counts as a use of what it found."""

    @abstractmethod
    def inc_lock_ref(self, node: Any) -> None:
        """Pin the path to `node`; None is the root, which is never evicted."""

    @abstractmethod
    def dec_lock_ref(self, node: Any) -> None:
        """Undo one `inc_lock_ref`. Raises KvContractError (strict) when there is none to undo; nothing changes then."""

    @abstractmethod
    def cache_finished_req(self, req: Req, *, is_insert: bool, kv_len_to_handle: int) -> ReleasedParts:
        """Take or free every slot of positions [P, ceil(kv_len_to_handle)), and drop the request's lock.

        The row, and pages past that length, are the caller's business.
        """

    @abstractmethod
    def cache_unfinished_req(self, req: Req) -> None:
        """Keep what is computed so far, [0, C), for others and for the next chunk.

        Moves the lock, rewrites the row where the cache had it already, raises P, refreshes `prefix_indices`.
        """

    @abstractmethod
    def evict(self, tokens: int) -> int:
        """Free at least that much from unlocked entries, if there is as much; returns what was freed."""

    @abstractmethod
    def evictable_size(self) -> int: ...

    @abstractmethod
    def protected_size(self) -> int: ...

    def total_size(self) -> int:
        return self.evictable_size() + self.protected_size()

    @abstractmethod
    def tree_slots(self) -> NDArray[np.int64]:
        """Every slot the cache owns; for the census."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything. Frees no slot: legal only together with a clear of rows and slots."""

    def row_slots(self, req: Req, end: int) -> NDArray[np.int64]:
        """A copy of positions [0, end) of the row a request holds; the row itself is about to change."""
        return self._rows.req_to_token[req.kv.held_row, :end].astype(np.int64)

    def floor(self, tokens: int) -> int:
        """Rounded down to whole pages."""
        return tokens // self.page_size * self.page_size

    def ceil(self, tokens: int) -> int:
        """Rounded up to whole pages."""
        return -(-tokens // self.page_size) * self.page_size
