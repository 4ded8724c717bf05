"""The row pool: which request writes its slots into which line of the request-to-token table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.contracts import CHECKS
from kvlens.engine.probe import RowReturned, RowTaken
from kvlens.engine.record import LENGTHS, ReqKvInfo

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.contracts import Contracts
    from kvlens.engine.probe import Probe
    from kvlens.engine.record import Req


class ReqToTokenPool:
    """Hands out rows 1..size, last returned first; row 0 is padding and never handed out.

    `req_to_token` int32 [size + 1, width]: slot of each position of each row; never zeroed, stale beyond A.
    `lengths` int32 [4, size + 1]: P, C, A, E of the record bound to each row; zero where none is.
    `req_generation` int64 [size + 1]: hand-outs so far. `tenants` int64 [size + 1]: who took the row last.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        *,
        contracts: Contracts,
        probe: Probe,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        if size < 1 or max_context_len < 1:
            raise ValueError(f"a row pool needs at least one row of one token, got {size} of {max_context_len}")
        self.size = size
        self.width = max_context_len
        self.req_to_token: NDArray[np.int32] = np.zeros((size + 1, max_context_len), np.int32)
        self.lengths: NDArray[np.int32] = np.zeros((LENGTHS, size + 1), np.int32)
        self.req_generation: NDArray[np.int64] = np.zeros(size + 1, np.int64)
        self.tenants: NDArray[np.int64] = np.zeros(size + 1, np.int64)
        self.free_slots: list[int] = list(range(1, size + 1))
        self._taken = bytearray(size + 1)
        self._contracts = contracts
        self._probe = probe
        self._step = step

    def available_size(self) -> int:
        """Free rows."""
        return len(self.free_slots)

    def alloc(self, reqs: Sequence[Req], site: str) -> list[int] | None:
        """A row for each request that holds none; all rows in the order of `reqs`.

        None when there are too few, in which case nothing changed. A request that keeps its row must have allocated KV;
        one that does not was released behind its own back: in report mode it loses its claim and gets a fresh row.
        Raises KvContractError (strict).
        """
        distinct = len({id(req) for req in reqs}) == len(reqs)
        if not self._contracts.require(
            CHECKS.distinct_requests,
            distinct,
            hint="the same request is in the batch twice; each is served once",
            facts={"requests": len(reqs), "distinct": len({id(req) for req in reqs})},
        ):
            reqs = list(dict.fromkeys(reqs))
        stale = [req for req in reqs if req.kv.holds_kv and not self._may_reuse(req)]
        fresh = sum(1 for req in reqs if not req.kv.holds_kv) + len(stale)
        rows = self.alloc_rows(fresh)
        if rows is None:
            return None
        for req in stale:
            req.kv.disown()
        fresh_rows = iter(rows)
        for req in reqs:
            if not req.kv.holds_kv:
                self._bind(req, next(fresh_rows), site)
        return [req.kv.held_row for req in reqs]

    def _may_reuse(self, req: Req) -> bool:
        return self._contracts.require(
            CHECKS.reused_row_carries_kv,
            req.kv.kv_allocated_len > 0,
            record=req.kv,
            request=req.number,
            hint="the row was released; only a record that still holds slots may continue",
        )

    def _bind(self, req: Req, row: int, site: str) -> None:
        generation = int(self.req_generation[row])
        self.tenants[row] = req.number
        req.kv.bind(row, generation, self.lengths)
        self._probe.emit(RowTaken(self._step(), row, generation, req.number, site))

    def alloc_rows(self, count: int) -> list[int] | None:
        """The last `count` rows of the free list, bound to nobody yet; None when there are fewer."""
        if count > len(self.free_slots):
            return None
        if count == 0:  # a [-0:] slice would be the whole list
            return []
        rows = self.free_slots[-count:]
        del self.free_slots[-count:]
        for row in rows:
            self.req_generation[row] += 1
            self._taken[row] = 1
        return rows

    def free_rows(self, rows: Sequence[int]) -> None:
        """Back to the free list. A row that was not handed out is refused. Raises KvContractError (strict)."""
        for row in rows:
            if self._is_taken(row):
                self._taken[row] = 0
                self.free_slots.append(row)

    def _is_taken(self, row: int) -> bool:
        return self._contracts.require(
            CHECKS.row_taken_before_free,
            1 <= row <= self.size and self._taken[row] == 1,
            hint="the row is already free; it is not added a second time",
            facts={"free_row": row},
        )

    def free(self, record: ReqKvInfo, request: int) -> None:
        """Return the row a record holds; the record then holds none and keeps its lengths.

        Raises KvContractError (strict) when it holds none, or one that is free already; nothing changed then. In report
        mode a record whose row is free already only loses its claim.
        """
        if not self._contracts.require(
            CHECKS.free_needs_held_row,
            record.holds_kv,
            record=record,
            request=request,
            hint="nothing is freed",
        ):
            return
        row = record.held_row
        if not self._is_taken(row):  # asked here too, so that nothing is lost when it raises
            record.disown()
            return
        returned = RowReturned(
            self._step(), row, record.generation, request, record.kv_committed_len, record.kv_allocated_len
        )
        record.unbind()
        self.free_rows([row])
        self._probe.emit(returned)

    def write(self, row: int, start: int, slots: NDArray[np.int64]) -> None:
        """Positions [start, start + len) of `row` now live in `slots`."""
        self.req_to_token[row, start : start + len(slots)] = slots

    def clear(self) -> None:
        """All rows free, generations 0. Legal only when nothing is held; the table is not zeroed."""
        self.free_slots = list(range(1, self.size + 1))
        self._taken = bytearray(self.size + 1)
        self.lengths[:] = 0
        self.req_generation[:] = 0
        self.tenants[:] = 0
