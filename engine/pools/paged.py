"""The allocator of whole pages: a request fills its last page before it takes a new one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.pools.slots import SlotAllocator

if TYPE_CHECKING:
    from numpy.typing import NDArray


class PagedSlotAllocator(SlotAllocator):
    """Page p covers slots [p * page_size, (p + 1) * page_size); last freed, first handed out.

    Pages taken by an extend: sum(ceil(seq / page) - ceil(prefix / page)), derived in docs/architecture.md.
    """

    def alloc(self, count: int) -> NDArray[np.int64] | None:
        """Raises ValueError when `count` is no multiple of the page size."""
        if count % self.page_size:
            raise ValueError(f"{count} slots are no whole pages of {self.page_size}")
        if count > self.available_size():
            return None
        pages = self._take(count // self.page_size)
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def alloc_extend(
        self, prefix_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        size = self.page_size
        new_pages = -(-seq_lens // size) - -(-prefix_lens // size)
        total = int(new_pages.sum())
        if total > len(self._ring):
            return None
        pages = self._take(total)
        lengths = seq_lens - prefix_lens
        out = np.empty(int(lengths.sum()), np.int64)
        at = page_at = 0
        for length, prefix, last, count in zip(
            lengths.tolist(), prefix_lens.tolist(), last_loc.tolist(), new_pages.tolist(), strict=True
        ):
            rest = min(-prefix % size, length)  # room left in the page that `last` is in
            out[at : at + rest] = np.arange(last + 1, last + 1 + rest)
            whole = pages[page_at : page_at + count, None] * size + np.arange(size)
            out[at + rest : at + length] = whole.reshape(-1)[: length - rest]
            at += length
            page_at += count
        return out

    def alloc_decode(self, seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]) -> NDArray[np.int64] | None:
        opens = (seq_lens - 1) % self.page_size == 0
        count = int(np.count_nonzero(opens))
        if count > len(self._ring):
            return None
        out = last_loc + 1
        if count:
            out[opens] = self._take(count) * self.page_size
        return out

    def _give_back(self, pages: NDArray[np.int64]) -> None:
        self._ring.push_front(pages)
