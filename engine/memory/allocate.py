"""The two ways in: slots for a prompt or a chunk of it, and one more slot for every running request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.record import ALLOCATED, COMMITTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req


def alloc_for_extend(memory: KvMemory, reqs: Sequence[Req]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows for those without one, and slots for positions [extend_start, extend_end) of each request.

    A request's `prefix_indices` are the slots of [0, extend_start). A fresh row gets P = extend_start: what was matched
    is the cache's, and locked. Evicts what is missing; afterwards C = A = extend_end.

    Returns the new slots, int64 [sum(extend_end - extend_start)] in request order, and the rows, int64 [B].
    Raises KvOutOfMemory when rows or slots run short; then no request gained a row and no slot was taken.
    """
    held_before = {req: req.kv.generation if req.kv.holds_kv else None for req in reqs}
    rows = memory.rows.alloc(reqs, "alloc_for_extend")
    if rows is None:
        raise memory.out_of_memory(f"{sum(g is None for g in held_before.values()):,} more rows")
    reqs = list(held_before)  # as the row pool does: each request is served once, or its first slots would be lost
    fresh: list[Req] = []
    for req, generation in held_before.items():
        if generation != req.kv.generation:
            fresh.append(req)
            if generation is not None:  # the pool refused a released row: nothing computed so far can be trusted
                req.restart()
            req.kv.cache_protected_len = len(req.prefix_indices)
    prefix_lens = np.array([req.extend_start for req in reqs], np.int64)
    seq_lens = np.array([req.extend_end for req in reqs], np.int64)
    slots = _extend_slots(memory, reqs, prefix_lens, seq_lens)
    if slots is None:
        for req in fresh:
            memory.rows.free(req.kv, req.number)
        raise memory.out_of_memory(f"{int((seq_lens - prefix_lens).sum()):,} more slots")
    at = 0
    for req, row in zip(reqs, rows, strict=True):
        end = at + req.extend_end - req.extend_start
        memory.rows.write(row, 0, req.prefix_indices)
        memory.rows.write(row, req.extend_start, slots[at:end])
        req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end
        at = end
    return slots, np.array(rows, np.int64)


def _extend_slots(
    memory: KvMemory, reqs: Sequence[Req], prefix_lens: NDArray[np.int64], seq_lens: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    page = memory.page_size
    memory.evict_to_free(int((-(-seq_lens // page) - -(-prefix_lens // page)).sum()) * page)
    last = [int(req.prefix_indices[-1]) if len(req.prefix_indices) else -1 for req in reqs]
    return memory.slots.alloc_extend(prefix_lens, seq_lens, np.array(last, np.int64))


def alloc_for_decode(memory: KvMemory, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """One more position for each of `rows` (int64 [B], distinct, held), and C and A one further.

    Evicts only for the pages that really open. Returns the new slots, int64 [B].
    Raises KvOutOfMemory when they do not fit; then nothing changed.
    """
    lengths, table = memory.rows.lengths, memory.rows.req_to_token
    seq = lengths[COMMITTED, rows].astype(np.int64)
    memory.evict_to_free(int(np.count_nonzero(seq % memory.page_size == 0)) * memory.page_size)
    slots = memory.slots.alloc_decode(seq + 1, table[rows, seq - 1].astype(np.int64))
    if slots is None:
        raise memory.out_of_memory(f"{len(rows):,} slots of a decode step")
    table[rows, seq] = slots
    lengths[COMMITTED, rows] += 1
    lengths[ALLOCATED, rows] += 1
    return slots


def decode_needs(memory: KvMemory, rows: NDArray[np.int64]) -> int:
    """Slots that the next `alloc_for_decode` of these rows takes from the free list."""
    page = memory.page_size
    return int(np.count_nonzero(memory.rows.lengths[COMMITTED, rows] % page == 0)) * page
