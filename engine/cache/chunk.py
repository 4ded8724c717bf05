"""The cache that keeps nothing: a row carries its own prefix from chunk to chunk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kvlens.engine.cache.base import MatchResult, PrefixCache, ReleasedParts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.record import Req


class ChunkCache(PrefixCache):
    """P stays 0, nothing is shared, and a finished row is freed whole."""

    def match_prefix(self, tokens: Sequence[int], namespace: str | None = None) -> MatchResult:
        return MatchResult(np.empty(0, np.int64), None)

    def inc_lock_ref(self, node: Any) -> None:
        """There is nothing to lock: no match ever returns a node."""

    def dec_lock_ref(self, node: Any) -> None:
        """There is nothing to unlock."""

    def cache_finished_req(self, req: Req, *, is_insert: bool, kv_len_to_handle: int) -> ReleasedParts:
        self._slots.free_segment(self.row_slots(req, kv_len_to_handle), 0)
        return ReleasedParts(inserted=0, duplicate=0, body=self.ceil(kv_len_to_handle))

    def cache_unfinished_req(self, req: Req) -> None:
        req.prefix_indices = self.row_slots(req, req.kv.kv_committed_len)

    def evict(self, tokens: int) -> int:
        return 0

    def evictable_size(self) -> int:
        return 0

    def protected_size(self) -> int:
        return 0

    def tree_slots(self) -> NDArray[np.int64]:
        return np.empty(0, np.int64)

    def reset(self) -> None:
        """There is nothing to forget."""
