"""The scheduler as a probe sees it: read only, valid only inside `Probe.step`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.memory.memory import FullPool
from kvlens.engine.probe import Holders, PoolView
from kvlens.engine.record import Phase

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.schedule.scheduler import Scheduler


class SchedulerView:
    """Implements `EngineView`. Holders are those reached from the batch and the chunked slot, never from the pools."""

    def __init__(self, scheduler: Scheduler, bytes_per_slot: int) -> None:
        self._scheduler = scheduler
        self._memory = scheduler.memory
        self._pools = (FullPool(scheduler.memory, bytes_per_slot),)
        self._holders_of: tuple[int, int] = (-1, -1)
        self._holders: Holders | None = None

    @property
    def step(self) -> int:
        return self._scheduler.steps

    @property
    def mode(self) -> str:
        return self._scheduler.mode

    @property
    def pools(self) -> Sequence[PoolView]:
        return self._pools

    @property
    def row_size(self) -> int:
        return self._memory.rows.size

    def free_rows(self) -> NDArray[np.int64]:
        return np.array(self._memory.rows.free_slots, np.int64)

    @property
    def free_row_count(self) -> int:
        return self._memory.rows.available_size()

    def holders(self) -> Holders:
        running, chunked = self._scheduler.running, self._scheduler.chunked
        composition = running.changes, chunked.number if chunked is not None else 0
        if composition != self._holders_of or self._holders is None:
            reqs = running.reqs if chunked is None else [*running.reqs, chunked]
            held = [req for req in reqs if req.kv.holds_kv]
            self._holders = Holders(
                rows=np.array([req.kv.req_pool_idx for req in held], np.int64),
                requests=np.array([req.number for req in held], np.int64),
                phases=np.array([Phase.CHUNKED if req is chunked else Phase.RUNNING for req in held], np.uint8),
            )
            self._holders_of = composition
        return self._holders

    @property
    def lengths(self) -> NDArray[np.int32]:
        return self._memory.rows.lengths

    @property
    def generations(self) -> NDArray[np.int64]:
        return self._memory.rows.req_generation

    @property
    def tenants(self) -> NDArray[np.int64]:
        return self._memory.rows.tenants

    def row_slots(self, row: int) -> NDArray[np.int32]:
        slots: NDArray[np.int32] = self._memory.rows.req_to_token[row]
        slots.flags.writeable = False  # of this view of the line alone
        return slots

    @property
    def waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def queued(self) -> Sequence[tuple[int, str, str | None]]:
        return [(req.number, req.rid, req.trace) for req in self._scheduler.live.values()]
