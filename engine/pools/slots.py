"""Which slots of the KV pool are free. The contract of an allocator, and the one for pages of one token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.contracts import CHECKS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.contracts import Contracts


class FreeRing:
    """A double-ended queue of ids in one array: every operation costs what it moves, never what the pool holds."""

    def __init__(self, first: int, count: int) -> None:
        self._ids: NDArray[np.int64] = np.arange(first, first + count, dtype=np.int64)
        self._capacity = count
        self._head = 0
        self._count = count

    def __len__(self) -> int:
        return self._count

    def pop_front(self, count: int) -> NDArray[np.int64]:
        """The first `count` ids; the caller has checked that there are as many."""
        end = self._head + count
        if end <= self._capacity:
            taken: NDArray[np.int64] = self._ids[self._head : end].copy()
        else:
            taken = np.concatenate((self._ids[self._head :], self._ids[: end - self._capacity]))
        self._head = end % self._capacity
        self._count -= count
        return taken

    def push_back(self, ids: NDArray[np.int64]) -> None:
        self._write(self._head + self._count, ids)
        self._count += len(ids)

    def push_front(self, ids: NDArray[np.int64]) -> None:
        self._head = (self._head - len(ids)) % self._capacity
        self._write(self._head, ids)
        self._count += len(ids)

    def snapshot(self) -> NDArray[np.int64]:
        """All ids, front first."""
        return np.concatenate((self._ids, self._ids))[self._head : self._head + self._count]

    def _write(self, at: int, ids: NDArray[np.int64]) -> None:
        at %= self._capacity
        first = min(len(ids), self._capacity - at)
        self._ids[at : at + first] = ids[:first]
        self._ids[: len(ids) - first] = ids[first:]


class SlotAllocator(ABC):
    """Owns the free list of one pool; slots [0, page_size) are a dummy page and never handed out.

    A guard bit per page says whether it is handed out, so that a page cannot enter the free list twice: in report mode
    the repeated part of a free is refused, in strict mode KvContractError is raised and nothing changed.
    """

    def __init__(self, size: int, page_size: int, *, contracts: Contracts) -> None:
        if page_size < 1 or size < page_size:
            raise ValueError(f"a pool of {size} slots has no page of {page_size}: give at least one page")
        self.page_size = page_size
        self.pages = size // page_size
        self.size = self.pages * page_size
        self._contracts = contracts
        self._pending: list[NDArray[np.int64]] | None = None
        self._ring = FreeRing(1, self.pages)
        self._held: NDArray[np.bool_] = np.zeros(self.pages + 1, np.bool_)

    # -- what differs -----------------------------------------------------------------------------------------------

    @abstractmethod
    def alloc(self, count: int) -> NDArray[np.int64] | None:
        """`count` slots (a multiple of the page size), or None when the pool is short; nothing is taken then."""

    @abstractmethod
    def alloc_extend(
        self, prefix_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        """Slots for positions [prefix, seq) of each request.

        prefix_lens, seq_lens: int64 [B], tokens. last_loc: int64 [B], slot of position prefix - 1, or -1.
        Returns int64 [sum(seq - prefix)] in request order; None when the pool is short, and then nothing was taken.
        """

    @abstractmethod
    def alloc_decode(self, seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """One slot per request. seq_lens: int64 [B], lengths after the step. last_loc: int64 [B], slot of seq - 2."""

    @abstractmethod
    def _give_back(self, pages: NDArray[np.int64]) -> None:
        """Put distinct pages, known to be handed out, into the free list."""

    # -- what all share ---------------------------------------------------------------------------------------------

    def available_size(self) -> int:
        """Free slots; frees pending in an open group are not available."""
        return len(self._ring) * self.page_size

    def free(self, slots: NDArray[np.int64]) -> None:
        """Return the pages that `slots` touch, whole. No slots: nothing happens."""
        if len(slots):
            self._free_pages(self._pages_of(slots))

    def free_segment(self, slots: NDArray[np.int64], start: int) -> None:
        """Return one contiguous stretch of a row that begins at position `start`."""
        self.free_segments([(slots, start)])

    def free_segments(self, segments: Sequence[tuple[NDArray[np.int64], int]]) -> None:
        """Return ascending, disjoint stretches (slots, start position) of one row; a shared page goes back once."""
        pages: list[NDArray[np.int64]] = []
        covered = 0  # end, in pages of the row, of what earlier stretches returned
        for slots, start in segments:
            if not len(slots):
                continue
            first_page = start // self.page_size
            skip = max(0, covered * self.page_size - start) if covered > first_page else 0
            end = start + len(slots)
            if skip < len(slots):
                pages.append(self._stretch_pages(slots[skip:], start + skip))
            covered = -(-end // self.page_size)
        if pages:
            self._free_pages(np.concatenate(pages))

    def _stretch_pages(self, slots: NDArray[np.int64], start: int) -> NDArray[np.int64]:
        """Pages of a contiguous stretch by stride instead of by a sort."""
        size = self.page_size
        lead = -start % size
        heads = slots[lead::size]
        if lead:
            heads = np.concatenate((slots[:1], heads))
        return np.asarray(heads // size, np.int64)

    def _pages_of(self, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.page_size == 1:
            return slots
        return np.unique(slots // self.page_size)

    def _free_pages(self, pages: NDArray[np.int64]) -> None:
        if self._pending is not None:
            self._pending.append(np.array(pages))  # a copy: the caller may pass a view that is about to be rewritten
            return
        pages = self._distinct_held(pages)
        self._held[pages] = False
        self._give_back(pages)

    def _distinct_held(self, pages: NDArray[np.int64]) -> NDArray[np.int64]:
        """The pages that may go back: each once, and only what is handed out."""
        known = pages[(pages >= 1) & (pages <= self.pages)]
        held = known[self._held[known]]
        if len(held):
            _, first = np.unique(held, return_index=True)
            distinct = held if len(first) == len(held) else held[np.sort(first)]
        else:
            distinct = held
        refused = len(pages) - len(distinct)
        if refused:
            self._refuse(pages, distinct, refused)
        return distinct

    def _refuse(self, pages: NDArray[np.int64], distinct: NDArray[np.int64], refused: int) -> None:
        _, first = np.unique(pages, return_index=True)
        repeated = np.delete(pages, first)
        unknown = pages[~np.isin(pages, distinct)]
        culprit = int(unknown[0] if len(unknown) else repeated[0])
        self._contracts.require(
            CHECKS.free_slots_unique,
            False,
            hint="the slots are already free; they are not added a second time",
            facts={"slots": refused * self.page_size, "first_slot": culprit * self.page_size},
        )

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Defer frees until the block ends, also when it ends in an exception. Groups do not nest.

        Raises KvContractError (strict) when one is open; in report mode the inner block joins the outer one.
        """
        closed = self._contracts.require(
            CHECKS.free_group_closed,
            self._pending is None,
            hint="the frees join the open group",
            facts={"pending_slots": self.pending_tokens},
        )
        if not closed:
            yield
            return
        self._pending = []
        try:
            yield
        finally:
            pending, self._pending = self._pending, None
            if pending:
                self._free_pages(np.concatenate(pending))

    @property
    def pending_tokens(self) -> int:
        """Slots freed inside the open group, not available yet."""
        return sum(map(len, self._pending or ())) * self.page_size

    def free_slots(self) -> NDArray[np.int64]:
        """Every slot in the free list, duplicates included, in hand-out order; for the census."""
        pages = self._ring.snapshot()
        return (pages[:, None] * self.page_size + np.arange(self.page_size)).reshape(-1)

    def clear(self) -> None:
        """Everything free; an open group's frees are forgotten."""
        self._pending = None
        self._ring = FreeRing(1, self.pages)
        self._held[:] = False

    def verify_accounting(self) -> list[str]:
        """What is wrong with the free list, in words; empty in health."""
        pages = self._ring.snapshot()
        wrong: list[str] = []
        if len(np.unique(pages)) != len(pages):
            wrong.append(f"{len(pages) - len(np.unique(pages)):,} pages are in the free list twice")
        if len(pages) and (pages.min() < 1 or pages.max() > self.pages):
            wrong.append(f"the free list has pages outside 1..{self.pages:,}")
        if int(self._held[pages].sum()):
            wrong.append(f"{int(self._held[pages].sum()):,} free pages are marked as handed out")
        return wrong

    def _take(self, count: int) -> NDArray[np.int64]:
        pages = self._ring.pop_front(count)
        self._held[pages] = True
        return pages


class TokenSlotAllocator(SlotAllocator):
    """Pages of one token: first freed, first handed out."""

    def __init__(self, size: int, *, contracts: Contracts) -> None:
        super().__init__(size, 1, contracts=contracts)

    def alloc(self, count: int) -> NDArray[np.int64] | None:
        return self._take(count) if count <= len(self._ring) else None

    def alloc_extend(
        self, prefix_lens: NDArray[np.int64], seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]
    ) -> NDArray[np.int64] | None:
        return self.alloc(int((seq_lens - prefix_lens).sum()))

    def alloc_decode(self, seq_lens: NDArray[np.int64], last_loc: NDArray[np.int64]) -> NDArray[np.int64] | None:
        return self.alloc(len(seq_lens))

    def _give_back(self, pages: NDArray[np.int64]) -> None:
        self._ring.push_back(pages)
