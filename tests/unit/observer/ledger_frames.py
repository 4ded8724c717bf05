"""Frames made by hand: an engine of 8 rows and 64 slots that says whatever a test wants."""

from __future__ import annotations

import struct
from typing import NamedTuple

from kvlens.engine.probe import AnyEvent, CensusTaken, RequestQueued, SlotRange
from kvlens.engine.record import Phase
from kvlens.observer.schema import Frame, Identity, PoolAccount, PoolInfo, RowColumns

IDENTITY = Identity("hand", "a" * 32, pools=(PoolInfo("rows", "row", 8, 1, 0), PoolInfo("full", "slot", 64, 4, 16)))


class Row(NamedTuple):
    """One held row of a key frame."""

    row: int
    request: int
    phase: Phase = Phase.RUNNING
    protected: int = 0
    allocated: int = 8
    generation: int = 1


def columns(rows: list[Row]) -> RowColumns:
    def ints(values: list[int], code: str = "i") -> bytes:
        return struct.pack(f"<{len(values)}{code}", *values)

    return RowColumns(
        ints([row.row for row in rows]), ints([row.generation for row in rows]),
        ints([row.request for row in rows], "q"), bytes(int(row.phase) for row in rows),
        ints([row.protected for row in rows]), ints([row.allocated for row in rows]),
        ints([row.allocated for row in rows]),
    )  # fmt: skip


def frame(step: int, *events: AnyEvent, rows: list[Row] | None = None, missing: int = 0, evictable: int = 0) -> Frame:
    """Step `step`, 10 ms after the one before; a key frame with `rows`. `missing`: slots that nobody accounts for."""
    held = rows or []
    known = [row for row in held if row.phase is not Phase.ORPHAN]
    private = sum(row.allocated - row.protected for row in known)
    orphaned = sum(row.allocated - row.protected for row in held if row.phase is Phase.ORPHAN)
    accounts = [
        PoolAccount("rows", 8, 8 - len(held), 0, 0, len(known), 0),
        PoolAccount("full", 64, 64 - evictable - private - orphaned - missing, evictable, 0, private, 0),
    ]
    allocated = sum(row.allocated for row in known)
    at = step * 10_000_000
    return Frame(
        step, step, at, 1_700_000_000_000_000_000 + at, "decode", len(known), 0, accounts, allocated, allocated,
        list(events), columns=columns(held) if rows is not None else None,
        names=[(row.request, f"r{row.request}", None) for row in held] if rows is not None else None,
    )  # fmt: skip


def queued(request: int) -> RequestQueued:
    return RequestQueued(0, request, f"r{request}", None, 8, 4)


def census(step: int, *unowned: SlotRange) -> CensusTaken:
    return CensusTaken(step, "full", list(unowned), [], [], [], [], False)
