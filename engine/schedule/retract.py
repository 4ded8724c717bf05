"""Who gives way when the next decode step does not fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.memory.allocate import decode_needs

if TYPE_CHECKING:
    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req


def fits_decode(memory: KvMemory, reqs: Sequence[Req]) -> bool:
    """One more token of each of `reqs` fits, evicting what nobody uses."""
    rows = np.array([req.kv.req_pool_idx for req in reqs], np.int64)
    return decode_needs(memory, rows) <= memory.slots.available_size() + memory.cache.evictable_size()


def next_victim(reqs: Sequence[Req]) -> Req:
    """The one that loses least: fewest tokens produced, and among equals the one that came last."""
    return min(reqs, key=lambda req: (len(req.output_ids), -req.number))
