"""The census against a slow one that looks at each slot by itself, over pools that are right and pools that are not."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlens.engine.probe import CensusTaken, Holders, OwnerRun, SlotRange
from kvlens.engine.record import ALLOCATED, PROTECTED
from kvlens.observer.census import MOST_OWNERS, take_census

WIDTH = 24


@dataclass
class Pool:
    """A slot pool by hand. Slots are page_size .. page_size + size - 1."""

    size: int
    page_size: int = 1
    name: str = "full"
    bytes_per_slot: int = 64
    free_list: list[int] = field(default_factory=list)
    tree: list[int] = field(default_factory=list)

    def free_slots(self) -> np.ndarray:
        return np.array(self.free_list, np.int64)

    def tree_slots(self) -> np.ndarray:
        return np.array(self.tree, np.int64)


class View:
    """An engine by hand: rows are held, returned (free), or neither."""

    step, mode, waiting, queued = 7, "decode", 0, ()

    def __init__(self, pool: Pool, rows: int = 4) -> None:
        self.pools = [pool]
        self.row_size = rows
        self.lengths = np.zeros((4, rows + 1), np.int32)
        self.generations = np.arange(rows + 1) * 10
        self.tenants = np.arange(rows + 1) * 100
        self.table = np.zeros((rows + 1, WIDTH), np.int64)
        self.held: list[int] = []
        self.free: list[int] = list(range(1, rows + 1))

    @property
    def free_row_count(self) -> int:
        return len(self.free)

    def free_rows(self) -> np.ndarray:
        return np.array(self.free, np.int64)

    def holders(self) -> Holders:
        rows = np.array(self.held, np.int64)
        return Holders(rows, self.tenants[rows], np.full(len(rows), 3, np.uint8))

    def row_slots(self, row: int) -> np.ndarray:
        return self.table[row]

    def line(self, row: int, slots: list[int], *, protected: int = 0, allocated: int | None = None) -> View:
        """Take `row`: its line says `slots`, its record [protected, allocated), by default all of them."""
        self.table[row, : len(slots)] = slots
        self.lengths[PROTECTED, row] = protected
        self.lengths[ALLOCATED, row] = len(slots) if allocated is None else allocated
        self.free.remove(row)
        return self

    def hold(self, row: int, slots: list[int], **lengths: int) -> View:
        self.held.append(row)
        return self.line(row, slots, **lengths)

    def census(self) -> CensusTaken:
        return take_census(self, self.pools[0])


def slots_of(ranges: list[SlotRange]) -> list[int]:
    return [slot for part in ranges for slot in range(part.start, part.end)]


def blamed(census: CensusTaken) -> dict[int, int]:
    """Row by unowned slot."""
    return {slot: part.row for part in census.unowned for slot in range(part.start, part.end)}


# -- the law ----------------------------------------------------------------------------------------------------------


@st.composite
def pools(draw: st.DrawFn) -> View:
    """A pool of up to 60 slots, each claimed by nobody, one, or several."""
    page = draw(st.sampled_from([1, 4]))
    size = draw(st.integers(1, 60 // page)) * page
    slot = st.integers(page, page + size - 1)
    pool = Pool(size, page)
    view = View(pool)
    if draw(st.booleans()):  # a partition first, in health
        for place in range(page, page + size):
            draw(st.sampled_from([pool.free_list, pool.tree])).append(place)
    pool.free_list += draw(st.lists(slot, max_size=8))
    pool.tree += draw(st.lists(slot, max_size=8))
    for row in draw(st.lists(st.integers(1, 4), unique=True, max_size=3)):
        slots = draw(st.lists(slot, min_size=1, max_size=WIDTH))
        view.hold(row, slots, protected=draw(st.integers(0, len(slots))))
    return view


@settings(max_examples=300, deadline=None, derandomize=True)
@given(pools())
def test_every_slot_is_where_a_slow_count_says_it_is(view: View) -> None:
    pool = view.pools[0]
    page = pool.page_size
    private: dict[int, list[int]] = {}
    for row in view.held:
        mine = view.table[row, view.lengths[PROTECTED, row] : view.lengths[ALLOCATED, row]].tolist()
        mine += range(mine[-1] + 1, -(-(mine[-1] + 1) // page) * page) if mine else []
        for slot in mine:
            private.setdefault(slot, []).append(row)
    census = view.census()
    unowned, twice, both, repeated, states = [], [], [], [], []
    for slot in range(page, page + pool.size):
        rows, tree, free = private.get(slot, []), pool.tree.count(slot), pool.free_list.count(slot)
        states.append("row" if rows else "tree" if tree else "free" if free else "unowned")
        unowned += [slot] if states[-1] == "unowned" else []
        twice += [slot] if len(rows) + tree > 1 else []
        both += [slot] if rows + [0] * tree and free else []
        repeated += [slot] if free > 1 else []
    assert slots_of(census.unowned) == unowned
    assert slots_of(census.held_twice) == twice
    assert slots_of(census.held_and_free) == both
    assert slots_of(census.duplicate_free) == repeated
    assert [run.state for run in census.owners for _ in range(run.start, run.end)] == states
    for run in census.owners:
        assert (run.row > 0) == (run.state == "row")
        assert run.row == 0 or all(run.row in private[slot] for slot in range(run.start, run.end))


# -- who lost it ------------------------------------------------------------------------------------------------------


def test_an_orphans_slots_are_its_own_with_generation_and_tenant() -> None:
    view = View(Pool(6, free_list=[1, 2, 6])).line(3, [4, 3, 5])
    assert view.census().unowned == [SlotRange(3, 6, 3, 30, 300)]


def test_a_taken_row_is_asked_before_a_returned_one_and_the_last_returned_before_others() -> None:
    view = View(Pool(4, free_list=[1])).line(1, [2])
    view.table[2, :3], view.table[4, :2] = [2, 3, 4], [2, 3]
    view.free = [3, 2, 4]  # 4 came back last
    assert blamed(view.census()) == {2: 1, 3: 4, 4: 2}


def test_nobody_is_blamed_for_what_stands_in_a_line_beyond_its_allocation() -> None:
    view = View(Pool(4, free_list=[1])).line(1, [2, 3, 4], allocated=1)
    assert blamed(view.census()) == {2: 1, 3: 0, 4: 0}


def test_a_live_request_is_not_blamed_for_what_an_earlier_tenant_of_its_row_lost() -> None:
    view = View(Pool(4, free_list=[1])).hold(1, [2, 3, 4], allocated=1).hold(2, [3, 4], allocated=0)
    assert blamed(view.census()) == {3: 0, 4: 0}


def test_the_unused_end_of_a_page_goes_with_its_page_and_the_next_page_does_not() -> None:
    view = View(Pool(12, page_size=4)).line(2, [8, 9])
    assert blamed(view.census()) == {**dict.fromkeys(range(4, 8), 0), **dict.fromkeys(range(8, 12), 2)} | dict.fromkeys(
        range(12, 16), 0
    )


# -- limits -----------------------------------------------------------------------------------------------------------


def test_what_is_no_slot_of_the_pool_does_not_stop_the_engine() -> None:
    view = View(Pool(4, free_list=[1, -3, 99], tree=[2, 1 << 40])).hold(1, [3, 1 << 33, -1, 0])
    census = view.census()
    assert [run.state for run in census.owners] == ["free", "tree", "row", "unowned"]
    assert slots_of(census.unowned) == [4]


@pytest.mark.parametrize("slot", [0, -1, 5])
def test_the_slots_just_outside_are_nobodys(slot: int) -> None:
    census = View(Pool(4, free_list=[1, 2, 3, 4, slot])).census()
    assert census.owners == [OwnerRun(1, 5, "free", 0)] and census.unowned == census.duplicate_free == []
    assert slots_of(View(Pool(4, free_list=[1, 2, 3, slot])).census().unowned) == [4]


def test_an_empty_pool_of_rows_and_tree_is_one_free_run() -> None:
    assert View(Pool(4, free_list=[4, 2, 3, 1])).census().owners == [OwnerRun(1, 5, "free", 0)]


def test_runs_are_cut_to_64_kib_and_leaks_are_not() -> None:
    size = 4 * MOST_OWNERS
    census = View(Pool(size, free_list=list(range(2, size + 1, 2)))).census()
    assert census.truncated and len(census.owners) == MOST_OWNERS
    assert (census.owners[-1].start, census.owners[-1].end) == (MOST_OWNERS, MOST_OWNERS + 1)
    assert len(census.unowned) == size // 2
    assert len(msgspec.msgpack.encode(census.owners)) < 64 << 10


def test_as_many_runs_as_fit_are_not_called_cut() -> None:
    census = View(Pool(MOST_OWNERS, free_list=list(range(2, MOST_OWNERS + 1, 2)))).census()
    assert not census.truncated and len(census.owners) == MOST_OWNERS
    assert census.owners[-1].end == MOST_OWNERS + 1
