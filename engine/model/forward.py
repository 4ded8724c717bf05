"""What the scheduler hands a model, and gets back. Imports without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvlens.engine.record import SamplingParams


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """One step's work. Tokens of all requests stand one after another; B requests, N tokens."""

    token_ids: NDArray[np.int64]  # [N]
    positions: NDArray[np.int64]  # [N]
    out_slots: NDArray[np.int64]  # [N]
    rows: NDArray[np.int64]  # [B]
    prefix_lens: NDArray[np.int64]  # [B], tokens already in the pool
    seq_lens: NDArray[np.int64]  # [B], with the new ones
    is_decode: bool  # one new token per request
    sampling: Sequence[SamplingParams]
    numbers: Sequence[int]


class Runner(Protocol):
    """What the scheduler needs of a model."""

    def forward(self, batch: ForwardBatch) -> NDArray[np.int64]:
        """The next token of each request, int64 [B]."""
        ...
