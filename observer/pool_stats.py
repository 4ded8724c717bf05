"""PoolStatsObserver: reads the KV records at each quiet moment, balances every pool, and publishes frames."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from kvlens.engine.contracts import CHECKS, Check
from kvlens.engine.probe import (
    AbortRequested,
    AnyEvent,
    CacheFlushed,
    CensusTaken,
    CheckFailed,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    RowReturned,
    RowTaken,
)
from kvlens.engine.record import ALLOCATED, COMMITTED, PROTECTED, Phase
from kvlens.observer.census import take_census
from kvlens.observer.frames import encode
from kvlens.observer.schema import Frame, Identity, PoolAccount, RowColumns

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvlens.engine.probe import EngineView, Holders

_MS = 1_000_000
_BALANCES = {"rows": CHECKS.row_pool_balances, "full": CHECKS.full_pool_balances}
_URGENT = frozenset({AbortRequested, CacheFlushed, CheckFailed, RequestFinished, RequestRetracted})

FEW = 24
"""Holders up to which their lengths are summed one by one."""
_sum = np.add.reduce


class Totals(NamedTuple):
    """Sums over the holders: C, A, and ceil(A) - P. `in_order`: every record was seen to be consistent."""

    committed: int
    allocated: int
    private: int
    in_order: bool


def active_pool_idxs(view: EngineView) -> NDArray[np.int64]:
    """Rows held by whoever is in a queue or a batch, ascending."""
    return np.sort(view.holders().rows)


class PoolStatsObserver:
    """A probe. Every step it asks the records of the holders what they hold, and compares the sum with the pools.

    Steps within `coalesce_ms` share a frame, unless one has something urgent. A balance that is off is told in that
    very step, with a census and a key frame; once for each amount, however long it stands.
    """

    KEY_NS = 1_000 * _MS
    ALARM_NS = 100 * _MS
    CENSUS_NS = 5_000 * _MS
    REPEAT_NS = 60_000 * _MS
    """Lengths that stay wrong are told again that often: a finding ends five minutes after its last failure."""

    def __init__(
        self,
        write: Callable[[bytes], object],
        identity: Identity,
        *,
        coalesce_ms: float = 5.0,
        largest: int = 1 << 22,
        close: Callable[[], None] = lambda: None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """write: takes one encoded frame, at most `largest` bytes; close: called when the engine stops cleanly."""
        self._write = write
        self._identity = identity
        self._coalesce_ns = int(coalesce_ms * _MS)
        self._largest = largest
        self._close = close
        self._clock = clock
        self._events: list[AnyEvent] = []
        self._urgent = False
        self._alarm = False
        self._holders: Holders | None = None
        self._rows: list[int] = []
        self._names: dict[int, tuple[int, str, str | None]] = {}
        self._tenants: dict[int, tuple[int, str, str | None]] = {}
        self._residuals: dict[str, int] = {}
        self._wrong: dict[tuple[str, int, int], int] = {}
        self._first_step = -1
        self._framed = self._keyed = self._censused = -(1 << 62)
        self._mode = ""
        self._probe_ns = 0
        self._dropped = 0
        self._last: Frame | None = None
        self._follow: dict[type, Callable[[Any], None]] = {
            RequestQueued: self._queued,
            RequestFinished: self._finished,
            RowTaken: self._taken,
            RowReturned: self._returned,
            CheckFailed: self._failed,
            CacheFlushed: self._flushed,
        }

    # -- events -----------------------------------------------------------------------------------------------------

    def emit(self, event: AnyEvent) -> None:
        kind = type(event)
        self._events.append(event)
        if kind in _URGENT:
            self._urgent = True
        follow = self._follow.get(kind)
        if follow is not None:
            follow(event)

    def _queued(self, event: RequestQueued) -> None:
        self._names[event.request] = (event.request, event.rid, event.trace)

    def _finished(self, event: RequestFinished) -> None:
        self._names.pop(event.request, None)

    def _taken(self, event: RowTaken) -> None:
        name = self._names.get(event.request)
        if name is not None:
            self._tenants[event.row] = name

    def _returned(self, event: RowReturned) -> None:
        self._tenants.pop(event.row, None)

    def _flushed(self, event: CacheFlushed) -> None:
        self._tenants.clear()

    def _failed(self, event: CheckFailed) -> None:
        """Published before the caller goes on: in strict mode it raises next, and no quiet moment comes."""
        self._alarm = True
        self._publish_between()

    def _publish_between(self) -> None:
        """Tell the events now, beside the accounts of the last quiet moment."""
        last = self._last
        if last is None:  # nothing was looked at yet
            self._publish(self._clock(), 0, 0, "idle", 0, 0, [], (0, 0), None)
            return
        self._publish(
            self._clock(), last.last_step, last.last_step, last.mode, last.running, last.waiting, last.accounts,
            (last.allocated_tokens, last.committed_tokens), None,
        )  # fmt: skip

    # -- quiet moments ----------------------------------------------------------------------------------------------

    def step(self, view: EngineView) -> None:
        started = self._clock()
        holders = view.holders()
        held = len(holders.rows)
        totals = self._totals(view, holders)
        accounts = [PoolAccount("rows", view.row_size, view.free_row_count, 0, 0, held, 0)]
        for pool in view.pools:
            accounts.append(
                PoolAccount(pool.name, pool.size, pool.free(), pool.evictable(), pool.protected(), totals.private, 0)
            )
        changed = self._balance(view, accounts)
        if self._first_step < 0:
            self._first_step = view.step
        mode = view.mode
        turned_idle = mode == "idle" != self._mode
        if started - self._censused >= (self.KEY_NS if turned_idle else self.CENSUS_NS):
            self._take_census(view)
        key = changed or turned_idle or started - self._keyed >= (self.ALARM_NS if self._alarm else self.KEY_NS)
        if key or self._urgent or started - self._framed >= self._coalesce_ns:
            self._mode = mode
            if held and (self._wrong or not totals.in_order):
                self._check_lengths(view, holders)
            self._publish(
                started, self._first_step, view.step, mode, held, view.waiting, accounts,
                (totals.allocated, totals.committed), view if key else None,
            )  # fmt: skip
        self._probe_ns += self._clock() - started

    def close(self) -> None:
        """What is still untold is published, and the recorder says that this end was clean."""
        if self._events:
            self._publish_between()
        self._close()

    # -- accounts ---------------------------------------------------------------------------------------------------

    def _totals(self, view: EngineView, holders: Holders) -> Totals:
        """Sums over the holders; the pools of one engine share a page size."""
        page = view.pools[0].page_size
        if len(holders.rows) > FEW:
            lengths = view.lengths.take(holders.rows, 1)
            protected, committed, allocated, _ = _sum(lengths, 1).tolist()
            ceiled = allocated if page == 1 else int(_sum((lengths[ALLOCATED] + (page - 1)) // page)) * page
            return Totals(committed, allocated, ceiled - protected, in_order=False)
        # A handful of rows is read cell by cell: this runs after a forward pass, with everything cold, and then each
        # call of numpy costs more than all of them.
        if holders is not self._holders:
            self._holders, self._rows = holders, holders.rows.tolist()
        cells = view.lengths.data
        committed = allocated = private = 0
        in_order = True
        for row in self._rows:
            p, c, a = cells[PROTECTED, row], cells[COMMITTED, row], cells[ALLOCATED, row]
            committed += c
            allocated += a
            private += -(-a // page) * page - p
            in_order = in_order and p <= c <= a and p % page == 0
        return Totals(committed, allocated, private, in_order)

    def _balance(self, view: EngineView, accounts: list[PoolAccount]) -> bool:
        """Tell each amount that is off once; True when one has changed, for better or worse."""
        off = False
        for account in accounts:
            residual = account.unaccounted
            if residual != self._residuals.get(account.pool, 0):
                self._residuals[account.pool] = residual
                off = True
                if residual:
                    self._report(view, _BALANCES[account.pool], account.pool, residual, account)
        if off:
            self._take_census(view)
        return off

    def _report(self, view: EngineView, check: Check, pool: str, residual: int, account: PoolAccount) -> None:
        facts = {
            "residual": residual, "size": account.size, "free": account.free, "evictable": account.evictable,
            "protected": account.protected, "private": account.private, "session": account.session,
        }  # fmt: skip
        self._tell(self._check_failed(view, check, f"pool {pool}", facts))

    def _tell(self, event: CheckFailed) -> None:
        self._events.append(event)
        self._urgent = self._alarm = True

    def _check_lengths(self, view: EngineView, holders: Holders) -> None:
        """P <= C <= A of every holder (the lengths are stored in that order), and P on a page border."""
        lengths = view.lengths.take(holders.rows, 1)
        page = view.pools[0].page_size
        # One look at all rows together: this runs with every frame, and next to never is one of them wrong.
        if self._wrong or (lengths[1:3] < lengths[:2]).any() or (page > 1 and (lengths[PROTECTED] % page).any()):
            self._report_lengths(view, holders, lengths, page)

    def _report_lengths(self, view: EngineView, holders: Holders, lengths: NDArray[np.int32], page: int) -> None:
        """Tell each tenancy that is wrong when it begins to be, and from time to time while it is."""
        known, self._wrong, now = self._wrong, {}, self._clock()
        for check, wrong in (
            (CHECKS.committed_within_allocated, np.any(lengths[1:3] < lengths[:2], axis=0)),
            (CHECKS.protected_page_aligned, (lengths[PROTECTED] % page).astype(np.bool_)),
        ):
            for row in holders.rows[wrong].tolist():
                tenancy = check.name, row, int(view.generations[row])
                told = known.get(tenancy)
                if told is None or now - told >= self.REPEAT_NS:
                    told = now
                    facts = dict(zip(("P", "C", "A"), view.lengths[:3, row].tolist(), strict=True))
                    self._tell(self._check_failed(view, check, f"row {row}", facts, row))
                self._wrong[tenancy] = told

    def _check_failed(
        self, view: EngineView, check: Check, hint: str, facts: dict[str, int], row: int = -1
    ) -> CheckFailed:
        lengths = view.lengths[:3, row].tolist() if row > 0 else [-1, -1, -1]
        return CheckFailed(
            at_ns=self._clock(), step=view.step, check=check.name,
            request=int(view.tenants[row]) if row > 0 else 0, row=row,
            generation=int(view.generations[row]) if row > 0 else -1,
            protected_tokens=lengths[PROTECTED], committed_tokens=lengths[COMMITTED],
            allocated_tokens=lengths[ALLOCATED], hint=hint, facts=facts,
        )  # fmt: skip

    # -- census -----------------------------------------------------------------------------------------------------

    def _take_census(self, view: EngineView) -> None:
        self._censused = self._clock()
        for pool in view.pools:
            census = take_census(view, pool)
            self._events.append(census)
            both = sum(part.end - part.start for part in (*census.held_and_free, *census.held_twice))
            if both != self._residuals.get(f"both in {pool.name}", 0):
                self._residuals[f"both in {pool.name}"] = both
                if both:
                    facts = {"slots": both}
                    self._tell(self._check_failed(view, CHECKS.no_held_slot_is_free, pool.name, facts))

    # -- frames -----------------------------------------------------------------------------------------------------

    def _publish(
        self,
        now: int,
        first_step: int,
        last_step: int,
        mode: str,
        running: int,
        waiting: int,
        accounts: list[PoolAccount],
        tokens: tuple[int, int],
        key_view: EngineView | None,
    ) -> None:
        """Write one frame with what happened since the last; a key frame when there is a view to take it from."""
        frame = Frame(
            first_step, last_step, now, time.time_ns(), mode, running, waiting, accounts, tokens[0], tokens[1],
            self._events, self._dropped,
            self._columns(key_view) if key_view is not None else None,
            [*{**self._names, **{name[0]: name for name in self._tenants.values()}}.values()] if key_view else None,
            self._identity if key_view is not None else None,
            self._probe_ns,
        )  # fmt: skip
        payload = encode(frame)
        if len(payload) <= self._largest:
            self._write(payload)
        else:
            self._write_lighter(frame)
        self._events = []
        self._urgent = False
        self._probe_ns = 0
        self._first_step = -1
        self._framed = now
        if key_view is not None:
            self._keyed = now
            self._alarm = False
        self._last = frame

    def _write_lighter(self, frame: Frame) -> None:
        """Write as much of a frame as fits. What is watched must not stop because of the size of what it did."""
        self._keyed = -(1 << 62)  # after events that nobody will see, the next key frame sets the rows right
        for lighter in self._lighter(frame):
            payload = encode(lighter)
            if len(payload) <= self._largest:
                self._write(payload)
                return

    def _lighter(self, frame: Frame) -> Iterator[Frame]:
        """The frame with less and less: names of who waits, the pool map, events (these are counted), the key part."""
        replace = msgspec.structs.replace
        if frame.names is not None:
            frame = replace(frame, names=[*self._tenants.values()])
            yield frame
        frame = replace(frame, events=[_without_map(event) for event in frame.events])
        yield frame
        kept: list[AnyEvent] = [event for event in frame.events if isinstance(event, CheckFailed)]
        self._dropped += len(frame.events) - len(kept[:16])
        frame = replace(frame, events=kept[:16], dropped_events=self._dropped)
        yield frame
        yield replace(frame, columns=None, names=None, identity=None)

    def _columns(self, view: EngineView) -> RowColumns:
        """Every taken row: the holders', and those that nobody holds."""
        holders = view.holders()
        rows, phases, requests = holders.rows, holders.phases, holders.requests
        if view.row_size - view.free_row_count != len(rows):
            taken = np.setdiff1d(np.arange(1, view.row_size + 1), view.free_rows())
            orphans = np.setdiff1d(taken, rows)
            rows = np.concatenate((rows, orphans))
            phases = np.concatenate((phases, np.full(len(orphans), Phase.ORPHAN, np.uint8)))
            requests = np.concatenate((requests, view.tenants[orphans]))
        lengths = view.lengths.take(rows, axis=1)
        return RowColumns(
            rows.astype("<i4").tobytes(), view.generations[rows].astype("<i4").tobytes(),
            requests.astype("<i8").tobytes(), phases.tobytes(), lengths[PROTECTED].tobytes(),
            lengths[COMMITTED].tobytes(), lengths[ALLOCATED].tobytes(),
        )  # fmt: skip


def _without_map(event: AnyEvent) -> AnyEvent:
    """A census keeps what is wrong, and loses who owns the rest."""
    return msgspec.structs.replace(event, owners=[], truncated=True) if isinstance(event, CensusTaken) else event
