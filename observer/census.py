"""The census: who owns each slot of a pool, exactly. Runs inside the engine's process, at a quiet moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from kvlens.engine.probe import CensusTaken, OwnerRun, SlotRange
from kvlens.engine.record import ALLOCATED, PROTECTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.probe import EngineView, PoolView

# One count per kind of owner would do for health; separate marks tell what is wrong.
_FREE, _TREE, _ROW = 1, 2, 4
MOST_OWNERS = 2000
"""Runs kept, so that a census stays below 64 KiB; leaked ranges are never cut."""


def take_census(view: EngineView, pool: PoolView) -> CensusTaken:
    """The partition of `pool` into free, tree, row and unowned slots, with what overlaps.

    Unowned slots are mapped to the row whose line still references them: rows that are taken and that nobody holds
    first, then rows that were returned.
    """
    page, end = pool.page_size, pool.page_size + pool.size
    marks: NDArray[np.uint8] = np.zeros(end, np.uint8)
    owner_row: NDArray[np.int32] = np.zeros(end, np.int32)
    holders: NDArray[np.int16] = np.zeros(end, np.int16)
    free = pool.free_slots()
    marks[free] |= _FREE
    tree = pool.tree_slots()
    marks[tree] |= _TREE
    np.add.at(holders, tree, 1)
    held = view.holders().rows
    for row in held.tolist():
        slots = _private(view, row, page)
        marks[slots] |= _ROW
        owner_row[slots] = row
        np.add.at(holders, slots, 1)
    marks[:page] = _FREE  # the dummy page belongs to nobody, and is nobody's loss
    unowned = np.flatnonzero(marks == 0)
    taken = (marks & (_TREE | _ROW)) != 0
    owners = list(_owner_runs(marks, owner_row, page))
    return CensusTaken(
        step=view.step,
        pool=pool.name,
        unowned=list(_attributed(view, unowned, held)),
        held_and_free=list(_ranges(view, np.flatnonzero(taken & ((marks & _FREE) != 0)), owner_row)),
        held_twice=list(_ranges(view, np.flatnonzero(holders > 1), owner_row)),
        duplicate_free=list(_ranges(view, _repeated(free), owner_row)),
        owners=owners[:MOST_OWNERS],
        truncated=len(owners) > MOST_OWNERS,
    )


def _private(view: EngineView, row: int, page: int) -> NDArray[np.int64]:
    """Slots of positions [P, ceil(A)) of a held row."""
    protected, allocated = int(view.lengths[PROTECTED, row]), int(view.lengths[ALLOCATED, row])
    slots = view.row_slots(row)[protected:allocated]
    if page == 1 or not len(slots):
        return slots
    last = int(slots[-1])
    rest = np.arange(last + 1, (last // page + 1) * page)
    return np.concatenate((slots, rest))


def _repeated(free: NDArray[np.int64]) -> NDArray[np.int64]:
    values, counts = np.unique(free, return_counts=True)
    repeated: NDArray[np.int64] = values[counts > 1]
    return repeated


def _runs(slots: NDArray[np.int64], *labels: NDArray[np.int32]) -> Iterable[tuple[int, int]]:
    """Index ranges of consecutive slots that agree in every label."""
    if not len(slots):
        return
    cut = np.diff(slots) != 1
    for label in labels:
        cut |= np.diff(label[slots]) != 0
    edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(slots)]
    yield from itertools.pairwise(edges)


def _ranges(view: EngineView, slots: NDArray[np.int64], owner_row: NDArray[np.int32]) -> Iterable[SlotRange]:
    for begin, end in _runs(slots, owner_row):
        row = int(owner_row[slots[begin]])
        yield _slot_range(view, int(slots[begin]), int(slots[end - 1]) + 1, row)


def _slot_range(view: EngineView, start: int, end: int, row: int) -> SlotRange:
    generation, request = (int(view.generations[row]), int(view.tenants[row])) if row else (0, 0)
    return SlotRange(start, end, row, generation, request)


def _attributed(view: EngineView, unowned: NDArray[np.int64], held: NDArray[np.int64]) -> Iterable[SlotRange]:
    """Unowned slots with the tenancy that last wrote them into its line."""
    if not len(unowned):
        return
    free = view.free_rows()
    orphans = np.setdiff1d(np.arange(1, view.row_size + 1), np.concatenate((free, held)))
    top = int(unowned[-1]) + 1
    missing = np.zeros(top, np.bool_)
    missing[unowned] = True
    lost_by: NDArray[np.int32] = np.zeros(top, np.int32)
    for row in (*orphans.tolist(), *free[::-1].tolist()):
        if not missing.any():
            break
        line = view.row_slots(row)
        line = line[(line > 0) & (line < top)]
        found = line[missing[line]]
        lost_by[found] = row
        missing[found] = False
    yield from _ranges(view, unowned, _fill_pages(lost_by, unowned))


def _fill_pages(lost_by: NDArray[np.int32], unowned: NDArray[np.int64]) -> NDArray[np.int32]:
    """A slot without a reference takes the row of the slot before it: the unused end of a request's last page."""
    for slot in unowned[lost_by[unowned] == 0].tolist():
        lost_by[slot] = lost_by[slot - 1]
    return lost_by


def _owner_runs(marks: NDArray[np.uint8], owner_row: NDArray[np.int32], page: int) -> Iterable[OwnerRun]:
    """The whole pool, run-length encoded; where several own a slot, the holder is named."""
    names = {0: "unowned", _FREE: "free", _TREE: "tree", _FREE | _TREE: "tree"}
    state = marks.astype(np.int32)
    for begin, end in _runs(np.arange(page, len(marks)), state, owner_row):
        start = begin + page
        row = int(owner_row[start])
        yield OwnerRun(start, end + page, names.get(int(marks[start]), "row") if not row else "row", row)
