"""The requests that decode together, with the arrays a step needs of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.model.forward import ForwardBatch
from kvlens.engine.record import COMMITTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req


class RunningBatch:
    """All requests in phase RUNNING. Arrays are rebuilt when the composition changes, so a steady step builds none."""

    def __init__(self) -> None:
        self.reqs: list[Req] = []
        self.changes = 0
        """Grows with every change of the composition."""
        self._rebuild()

    def __len__(self) -> int:
        return len(self.reqs)

    def add(self, reqs: Iterable[Req]) -> None:
        self.reqs.extend(reqs)
        self._rebuild()

    def remove(self, gone: Sequence[Req]) -> None:
        """Take out those that finished or were retracted."""
        if gone:
            left = {id(req) for req in gone}
            self.reqs = [req for req in self.reqs if id(req) not in left]
            self._rebuild()

    def _rebuild(self) -> None:
        self.changes += 1
        reqs = self.reqs
        self.rows: NDArray[np.int64] = np.array([req.kv.req_pool_idx for req in reqs], np.int64)
        self.numbers = [req.number for req in reqs]
        self._sampling = [req.sampling for req in reqs]

    def forward_batch(self, memory: KvMemory, out_slots: NDArray[np.int64]) -> ForwardBatch:
        """One token per request, at the position that `alloc_for_decode` has just made room for."""
        seq_lens = memory.rows.lengths[COMMITTED, self.rows].astype(np.int64)
        return ForwardBatch(
            token_ids=np.array([req.output_ids[-1] for req in self.reqs], np.int64),
            positions=seq_lens - 1,
            out_slots=out_slots,
            rows=self.rows,
            prefix_lens=seq_lens - 1,
            seq_lens=seq_lens,
            is_decode=True,
            sampling=self._sampling,
            numbers=self.numbers,
        )


def prefill_batch(reqs: Sequence[Req], rows: NDArray[np.int64], out_slots: NDArray[np.int64]) -> ForwardBatch:
    """Positions [extend_start, extend_end) of each request."""
    tokens = [req.tokens[req.extend_start : req.extend_end] for req in reqs]
    return ForwardBatch(
        token_ids=np.concatenate([np.array(ids, np.int64) for ids in tokens]),
        positions=np.concatenate([np.arange(req.extend_start, req.extend_end, dtype=np.int64) for req in reqs]),
        out_slots=out_slots,
        rows=rows,
        prefix_lens=np.array([req.extend_start for req in reqs], np.int64),
        seq_lens=np.array([req.extend_end for req in reqs], np.int64),
        is_decode=False,
        sampling=[req.sampling for req in reqs],
        numbers=[req.number for req in reqs],
    )
