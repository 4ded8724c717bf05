"""Who gives way when the next decode step does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvlens.engine.memory.allocate import decode_needs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req


def fits_decode(memory: KvMemory, rows: NDArray[np.int64]) -> bool:
    """One more token of each of `rows` (int64 [B]) fits, evicting what nobody uses."""
    return decode_needs(memory, rows) <= memory.slots.available_size() + memory.cache.evictable_size()


def next_victim(reqs: Sequence[Req]) -> Req:
    """The one that loses least: one that is to end anyway; else the fewest tokens produced, then the last to come."""
    return min(reqs, key=lambda req: (req.to_finish is None, len(req.output_ids), -req.number))
