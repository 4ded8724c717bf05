"""The census: who owns each slot of a pool, exactly. Runs inside the engine's process, at a quiet moment."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from kvlens.engine.probe import CensusTaken, OwnerRun, SlotRange
from kvlens.engine.record import ALLOCATED, PROTECTED

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.probe import EngineView, PoolView

# What `owner` says of a slot; a number above zero is the row that holds it.
_UNOWNED, _FREE, _TREE = 0, -1, -2
_NAMES: Final = {_UNOWNED: "unowned", _FREE: "free", _TREE: "tree"}
MOST_OWNERS: Final = 2000
"""Runs kept, so that a census stays below 64 KiB; leaked ranges are never cut."""


class _Claims(NamedTuple):
    """Slots of a pool by who claims them, int64. `rows`, int32, goes with `private`."""

    free: NDArray[np.int64]
    tree: NDArray[np.int64]
    private: NDArray[np.int64]
    rows: NDArray[np.int32]


def take_census(view: EngineView, pool: PoolView) -> CensusTaken:
    """The partition of `pool` into free, tree, row and unowned slots, with what overlaps.

    Unowned slots are mapped to the row whose line still references them: rows that are taken and that nobody holds
    first, then rows that were returned. Where several claim a slot, the row goes before the tree, and that before the
    free list.
    """
    page, end = pool.page_size, pool.page_size + pool.size
    claims = _claims(view, pool, page, end)
    owner: NDArray[np.int32] = np.zeros(end, np.int32)
    owner[claims.free] = _FREE
    owner[claims.tree] = _TREE
    owner[claims.private] = claims.rows
    owned = np.count_nonzero(owner)
    unowned = np.flatnonzero(owner[page:] == _UNOWNED) + page if owned < pool.size else np.empty(0, np.int64)
    # As many owned slots as claims: then each is claimed once, and there is no need to find out which are not.
    is_partition = owned == len(claims.free) + len(claims.tree) + len(claims.private)
    twice, both, duplicate = ([], [], []) if is_partition else _overlaps(view, claims, owner)
    owners = list(itertools.islice(_owner_runs(owner, page), MOST_OWNERS + 1))
    return CensusTaken(
        step=view.step,
        pool=pool.name,
        unowned=list(_attributed(view, unowned, page)),
        held_and_free=both,
        held_twice=twice,
        duplicate_free=duplicate,
        owners=owners[:MOST_OWNERS],
        truncated=len(owners) > MOST_OWNERS,
    )


# -- who claims what --------------------------------------------------------------------------------------------------


def _claims(view: EngineView, pool: PoolView, page: int, end: int) -> _Claims:
    held = view.holders().rows.tolist()
    parts = [_within(_private(view, row, page), page, end) for row in held]
    return _Claims(
        free=_within(pool.free_slots(), page, end),
        tree=_within(pool.tree_slots(), page, end),
        private=np.concatenate(parts) if parts else np.empty(0, np.int64),
        rows=np.repeat(np.array(held, np.int32), [len(part) for part in parts]),
    )


def _within(slots: NDArray[np.int64], first: int, end: int) -> NDArray[np.int64]:
    """Without what is no slot of the pool: a table that was overwritten must not stop the engine that is watched."""
    if len(slots) and (slots.min() < first or slots.max() >= end):
        return slots[(slots >= first) & (slots < end)]
    return slots


def _private(view: EngineView, row: int, page: int) -> NDArray[np.int64]:
    """Slots of positions [P, ceil(A)) of a held row."""
    protected, allocated = int(view.lengths[PROTECTED, row]), int(view.lengths[ALLOCATED, row])
    slots: NDArray[np.int64] = view.row_slots(row)[protected:allocated].astype(np.int64)
    if page == 1 or not len(slots):
        return slots
    last = int(slots[-1])
    rest = np.arange(last + 1, (last // page + 1) * page)
    return np.concatenate((slots, rest))


def _overlaps(
    view: EngineView, claims: _Claims, owner: NDArray[np.int32]
) -> tuple[list[SlotRange], list[SlotRange], list[SlotRange]]:
    """Slots that are held twice, held and free, and free twice."""
    held = np.bincount(np.concatenate((claims.tree, claims.private)), minlength=len(owner))
    free = np.bincount(claims.free, minlength=len(owner))
    rows = np.maximum(owner, 0)
    found = [np.flatnonzero(wrong) for wrong in (held > 1, (held > 0) & (free > 0), free > 1)]
    twice, both, duplicate = (list(_ranges(view, slots, rows)) for slots in found)
    return twice, both, duplicate


# -- who lost what ----------------------------------------------------------------------------------------------------


def _attributed(view: EngineView, unowned: NDArray[np.int64], page: int) -> Iterable[SlotRange]:
    """Unowned slots with the tenancy that last wrote them into its line."""
    if not len(unowned):
        return
    top = int(unowned[-1]) + 1
    missing = np.zeros(top, np.bool_)
    missing[unowned] = True
    lost_by: NDArray[np.int32] = np.zeros(top, np.int32)
    for row, line in _lines(view):
        if not missing.any():
            break
        line = line[(line > 0) & (line < top)]
        found = line[missing[line]]
        lost_by[found] = row
        missing[found] = False
    _fill_pages(lost_by, unowned, page)
    yield from _ranges(view, unowned, lost_by)


def _lines(view: EngineView) -> Iterable[tuple[int, NDArray[np.int32]]]:
    """Rows nobody holds, with the slots their lines reference: taken ones first, then the last returned."""
    free = view.free_rows()
    taken = np.concatenate((free, view.holders().rows))
    for row in np.setdiff1d(np.arange(1, view.row_size + 1), taken).tolist():
        # Beyond A its line is an earlier tenant's, whom this row would be blamed for.
        yield row, view.row_slots(row)[: int(view.lengths[ALLOCATED, row]) or None]
    for row in free[::-1].tolist():
        yield row, view.row_slots(row)


def _fill_pages(lost_by: NDArray[np.int32], unowned: NDArray[np.int64], page: int) -> None:
    """A slot without a reference goes with its page: it is the end of one that somebody did not fill."""
    if page == 1:
        return
    known = unowned[lost_by[unowned] > 0]
    by_page: NDArray[np.int32] = np.zeros(len(lost_by) // page + 1, np.int32)
    by_page[known // page] = lost_by[known]
    rest = unowned[lost_by[unowned] == 0]
    lost_by[rest] = by_page[rest // page]


# -- ranges -----------------------------------------------------------------------------------------------------------


def _ranges(view: EngineView, slots: NDArray[np.int64], rows: NDArray[np.int32]) -> Iterable[SlotRange]:
    """Ascending `slots` as ranges of one row each; rows: by slot, 0 for none."""
    if not len(slots):
        return
    cut = (np.diff(slots) != 1) | (np.diff(rows[slots]) != 0)
    edges = [0, *(np.flatnonzero(cut) + 1).tolist(), len(slots)]
    for begin, end in itertools.pairwise(edges):
        row = int(rows[slots[begin]])
        generation, request = (int(view.generations[row]), int(view.tenants[row])) if row else (0, 0)
        yield SlotRange(int(slots[begin]), int(slots[end - 1]) + 1, row, generation, request)


def _owner_runs(owner: NDArray[np.int32], page: int) -> Iterable[OwnerRun]:
    """The whole pool, run-length encoded. Lazy: where rows grow in turns, there are as many runs as slots."""
    edges = np.flatnonzero(owner[page + 1 :] != owner[page:-1])[: MOST_OWNERS + 1] + page + 1
    for start, end in itertools.pairwise([page, *edges.tolist(), len(owner)]):
        label = int(owner[start])
        yield OwnerRun(start, end, _NAMES.get(label, "row"), max(label, 0))
