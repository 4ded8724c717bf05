"""The ledger: who holds what, who held it before, and what every request went through. Built from frames alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvlens.engine.probe import (
    AbortRequested,
    CacheFlushed,
    CensusTaken,
    CheckFailed,
    ChunkComputed,
    DecodeStepped,
    Evicted,
    FirstToken,
    KvReleased,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    RequestScheduled,
    RowReturned,
    RowSet,
    RowTaken,
    SlotRange,
)
from kvlens.engine.record import Phase
from kvlens.observer.schema import Frame, Identity, PoolAccount, RowColumns, Timeline, trace_id_of
from kvlens.observer.stories import Stories, Story
from kvlens.observer.tallies import TallyBook

RATE_SECONDS: Final = 5.0
CHECK_SECONDS: Final = 300.0
"""A check that failed is spoken of for that long after its last failure."""
MOST_FAILED: Final = 1000
"""Tenancies remembered with a check that failed; beyond that, the one that failed longest ago is forgotten."""
_PHASES: Final = {int(phase): phase for phase in Phase}


@dataclass(slots=True)
class HeldRow:
    """One tenancy. While RUNNING, C and A grow with the ledger's count of decode steps since `joined`."""

    row: int
    generation: int
    request: int
    phase: Phase
    protected: int
    committed: int
    allocated: int
    taken_at: float
    site: str | None = None
    joined: int = 0


@dataclass(slots=True)
class FailedCheck:
    """A check that failed, once or again and again for the same tenancy."""

    event: CheckFailed
    last_at: float
    count: int = 1
    slots: int = 0


@dataclass(slots=True)
class Applied:
    """What one frame brought that others want to hear of."""

    ended: list[Timeline] = field(default_factory=list)
    checks: list[CheckFailed] = field(default_factory=list)


class Ledger:
    """Follows one engine instance. Who joins late, or loses frames, is right again after the next key frame."""

    def __init__(self, identity: Identity, tallies: TallyBook | None = None) -> None:
        """tallies: what was counted of earlier instances, to be continued."""
        self.identity = identity
        self.tallies = tallies or TallyBook()
        self.stories = Stories()
        self.rows: dict[int, HeldRow] = {}
        self.accounts: dict[str, PoolAccount] = {}
        self.key_accounts: dict[str, PoolAccount] = {}
        """Accounts of the last key frame; empty after a flush, until the next one."""
        self.key_orphans: list[HeldRow] = []
        """Rows that nobody held at that moment. Beside `rows`, which events move on before the accounts follow."""
        self.key_step = 0
        self.censuses: dict[str, CensusTaken] = {}
        self.failed: dict[tuple[str, int, int, int], FailedCheck] = {}
        self.frame: Frame | None = None
        self.allocated_max = self.committed_max = 0
        self._decoded = 0
        self._generated = 0
        self._gap_from = 0
        self._dropped = 0
        self._joined_since: list[int] = []
        self._rate: deque[tuple[float, int]] = deque()
        self._scratch = TallyBook()
        self._counting = self.tallies
        self._applied = Applied()
        self._offset_ns = 0
        self._at = 0.0
        self._step = 0
        self._follow: dict[type, Callable[[Any], None]] = {
            RequestQueued: self._queued, RequestScheduled: self._scheduled, ChunkComputed: self._chunk,
            FirstToken: self._first_token, RequestRetracted: self._retracted, AbortRequested: self._abort,
            RequestFinished: self._finished, RowTaken: self._row_taken, RowSet: self._row_set,
            DecodeStepped: self._decode, RowReturned: self._row_returned, KvReleased: self._released,
            Evicted: self._evicted, CacheFlushed: self._flushed, CheckFailed: self._check, CensusTaken: self._census,
        }  # fmt: skip

    # -- frames -----------------------------------------------------------------------------------------------------

    def apply(self, frame: Frame, *, replay: bool = False) -> Applied:
        """Take one frame. With `replay` the picture is rebuilt, and nothing is counted or told again."""
        self._counting = self._scratch if replay else self.tallies
        self._applied = Applied()
        self._offset_ns = frame.wall_ns - frame.monotonic_ns
        self._at = frame.wall_ns / 1e9
        self._step = frame.last_step
        for event in frame.events:
            follow = self._follow.get(type(event))
            if follow is not None:
                follow(event)
        self.accounts = {account.pool: account for account in frame.accounts}
        if frame.columns is not None:
            self._resynchronise(frame, frame.columns)
        self._counting.counts["frames"] += 1
        self._counting.counts["probe_ns"] += frame.probe_ns
        self._counting.counts["dropped_events"] += max(0, frame.dropped_events - self._dropped)
        self._dropped = frame.dropped_events
        self.frame = frame
        self.allocated_max = max(self.allocated_max, frame.allocated_tokens)
        self.committed_max = max(self.committed_max, frame.committed_tokens)
        self._rate.append((frame.wall_ns / 1e9, self._generated))
        while len(self._rate) > 2 and self._rate[-1][0] - self._rate[1][0] >= RATE_SECONDS:
            self._rate.popleft()
        self._forget_old_checks(frame.wall_ns / 1e9)
        return Applied() if replay else self._applied

    def lost(self, frames: int) -> None:
        """That many frames were overwritten before they were read."""
        self.tallies.counts["frames_lost"] += frames
        self._gap_from = 0  # the time to the next token is not one gap
        self._joined_since = []

    def _resynchronise(self, frame: Frame, columns: RowColumns) -> None:
        """A key frame says everything about held rows; what events told before is only kept where it adds to that."""
        at = frame.wall_ns / 1e9
        rows: dict[int, HeldRow] = {}
        for row in _read_columns(columns, at):
            known = self.rows.get(row.row)
            if known is not None and known.generation == row.generation:
                row.taken_at, row.site = known.taken_at, known.site
            row.joined = self._decoded
            rows[row.row] = row
        self.rows = rows
        self.key_accounts = self.accounts
        self.key_orphans = [row for row in rows.values() if row.phase is Phase.ORPHAN]
        self.key_step = frame.last_step
        names = frame.names or []
        self.stories.introduce(names, at)
        alive = {name[0] for name in names}
        for number in [number for number in self.stories.live if number not in alive]:
            self.stories.end(number)  # it ended in a frame that was lost
        for row in rows.values():
            story = self.stories.get(row.request)
            if story is not None:
                story.row = row.row

    # -- requests ---------------------------------------------------------------------------------------------------

    def _wall(self, monotonic_ns: int) -> float:
        return (monotonic_ns + self._offset_ns) / 1e9

    def _queued(self, event: RequestQueued) -> None:
        story = Story(
            event.request, event.rid, event.trace, self._wall(event.at_ns), event.prompt_tokens, event.max_new_tokens,
            whole=True,
        )  # fmt: skip
        self.stories.begin(story).tell(story.queued_at, "queued", self._step)

    def _scheduled(self, event: RequestScheduled) -> None:
        counts = self._counting.counts
        counts["prefix_queried_tokens"] += event.queried_tokens
        counts["prefix_hit_tokens"] += event.cached_tokens
        story = self.stories.get(event.request)
        if story is None:
            return
        at = self._wall(event.at_ns)
        if not story.scheduled and story.whole:
            self._counting.histograms["queue_seconds"].observe(at - story.queued_at, 1, trace_id_of(story.trace))
            story.cached_tokens = event.cached_tokens
        story.scheduled = True
        story.row = event.row
        detail = {"cached_tokens": event.cached_tokens, "queried_tokens": event.queried_tokens}
        story.tell(at, "scheduled", self._step, row=event.row, generation=event.generation, detail=detail)

    def _chunk(self, event: ChunkComputed) -> None:
        self._counting.counts["prefilled_tokens"] += event.end - event.start
        if event.last:
            self._counting.counts["generated_tokens"] += 1
            self._generated += 1
        story = self.stories.get(event.request)
        if story is not None:
            detail = {"start": event.start, "end": event.end, "last": event.last}
            story.tell(
                self._wall(event.at_ns), "chunk", self._step, started_at=self._wall(event.started_ns), detail=detail,
                **self._lengths(story),
            )  # fmt: skip

    def _first_token(self, event: FirstToken) -> None:
        story = self.stories.get(event.request)
        if story is not None:
            at = self._wall(event.at_ns)
            if story.whole:
                histogram = self._counting.histograms["time_to_first_token_seconds"]
                histogram.observe(at - story.queued_at, 1, trace_id_of(story.trace))
            story.tell(at, "first_token", self._step)

    def _retracted(self, event: RequestRetracted) -> None:
        self._counting.counts["retractions"] += 1
        story = self.stories.get(event.request)
        if story is not None:
            story.row = None
            detail = {"output_tokens": event.output_tokens}
            story.tell(self._wall(event.at_ns), "retracted", self._step, detail=detail)

    def _abort(self, event: AbortRequested) -> None:
        self._counting.aborts[event.phase] += 1
        story = self.stories.get(event.request)
        if story is not None:
            detail = {"phase": event.phase}
            story.tell(self._wall(event.at_ns), "abort_requested", self._step, detail=detail, **self._lengths(story))

    def _finished(self, event: RequestFinished) -> None:
        self._counting.requests[event.outcome] += 1
        story = self.stories.end(event.request) or self.stories.get(event.request)
        if story is None or story.outcome is not None:
            return
        story.outcome, story.output_tokens, story.cached_tokens = (
            event.outcome,
            event.output_tokens,
            event.cached_tokens,
        )
        story.ended_at = self._wall(event.at_ns)
        detail = {"outcome": event.outcome, "output_tokens": event.output_tokens, "message": event.message}
        story.tell(story.ended_at, "finished", self._step, detail=detail)
        if story.whole:
            self._applied.ended.append(story.timeline(self.identity.name, self.identity.rank))

    def _lengths(self, story: Story) -> dict[str, Any]:
        """Where the record of a request stands, for its timeline."""
        held = self.rows.get(story.row) if story.row is not None else None
        if held is None or held.request != story.number:
            return {}
        committed, allocated = self.lengths(held)
        return {
            "row": held.row, "generation": held.generation, "protected_tokens": held.protected,
            "committed_tokens": committed, "allocated_tokens": allocated,
        }  # fmt: skip

    # -- rows -------------------------------------------------------------------------------------------------------

    def lengths(self, held: HeldRow) -> tuple[int, int]:
        """C and A of a row now."""
        grown = self._decoded - held.joined if held.phase is Phase.RUNNING else 0
        return held.committed + grown, held.allocated + grown

    def _row_taken(self, event: RowTaken) -> None:
        story = self.stories.get(event.request)
        if story is not None:
            story.row = event.row
        self.rows[event.row] = HeldRow(
            event.row, event.generation, event.request, Phase.WAITING, 0, 0, 0, self._at, event.site, self._decoded
        )

    def _row_set(self, event: RowSet) -> None:
        held = self.rows.get(event.row)
        if held is None or held.generation != event.generation:
            return
        if event.phase == Phase.RUNNING != held.phase:
            self._joined_since.append(event.row)
        held.phase = _phase(event.phase)
        held.protected, held.committed = event.protected_tokens, event.committed_tokens
        held.allocated, held.joined = event.allocated_tokens, self._decoded

    def _decode(self, event: DecodeStepped) -> None:
        self._decoded += event.tokens
        grown = event.rows * event.tokens
        self._counting.counts["generated_tokens"] += grown
        self._generated += grown
        # Rows that joined since the last decode step have no gap yet: their first token came from a prefill.
        waited = max(0, event.rows - len(self._joined_since))
        if self._gap_from and waited:
            gap = (event.at_ns - self._gap_from) / 1e9
            self._counting.histograms["inter_token_seconds"].observe(gap, waited)
        self._joined_since = []
        self._gap_from = event.at_ns

    def _row_returned(self, event: RowReturned) -> None:
        uncommitted = event.allocated_tokens - event.committed_tokens
        self._counting.histograms["kv_uncommitted_tokens"].observe(float(uncommitted))
        held = self.rows.get(event.row)
        if held is not None and held.generation == event.generation:
            del self.rows[event.row]

    def _released(self, event: KvReleased) -> None:
        story = self.stories.get(event.request)
        if story is not None:
            story.row = None
            detail = {
                "inserted": event.inserted_tokens, "duplicate": event.duplicate_tokens, "body": event.body_tokens,
                "tail": event.tail_tokens,
            }  # fmt: skip
            story.tell(
                self._wall(event.at_ns), "released", self._step, started_at=self._wall(event.started_ns),
                row=event.row, generation=event.generation, protected_tokens=event.protected_tokens,
                allocated_tokens=event.allocated_tokens, detail=detail,
            )  # fmt: skip

    def _evicted(self, event: Evicted) -> None:
        self._counting.counts["evicted_tokens"] += event.freed_tokens

    def _flushed(self, event: CacheFlushed) -> None:
        self.rows.clear()
        self.key_accounts = {}
        self.key_orphans = []
        self.censuses.clear()
        self.failed.clear()

    # -- checks -----------------------------------------------------------------------------------------------------

    def _check(self, event: CheckFailed) -> None:
        self._counting.assertions[event.check] += 1
        self._applied.checks.append(event)
        at = self._wall(event.at_ns)
        key = (event.check, event.row, event.generation, event.request)
        known = self.failed.pop(key, None) or FailedCheck(event, at, count=0)
        known.last_at, known.count, known.slots = at, known.count + 1, known.slots + event.facts.get("slots", 0)
        self.failed[key] = known
        if len(self.failed) > MOST_FAILED:
            del self.failed[next(iter(self.failed))]
        story = self.stories.get(event.request) if event.request else None
        if story is not None:
            story.tell(
                at, "check_failed", event.step, row=event.row, generation=event.generation,
                protected_tokens=event.protected_tokens, committed_tokens=event.committed_tokens,
                allocated_tokens=event.allocated_tokens, detail={"check": event.check, "hint": event.hint},
            )  # fmt: skip

    def _forget_old_checks(self, now: float) -> None:
        for key in [key for key, failed in self.failed.items() if now - failed.last_at > CHECK_SECONDS]:
            del self.failed[key]

    def _census(self, event: CensusTaken) -> None:
        before = self.censuses.get(event.pool)
        if before is not None and before.unowned and event.unowned:
            event = msgspec.structs.replace(event, unowned=_blamed_first(before.unowned, event.unowned))
        self.censuses[event.pool] = event

    # -- questions --------------------------------------------------------------------------------------------------

    def tokens_per_second(self, now: float) -> float:
        """Generated over the last seconds; 0 when the newest frame is older than that."""
        if len(self._rate) < 2 or now - self._rate[-1][0] > RATE_SECONDS:
            return 0.0
        (begun, before), (_, after) = self._rate[0], self._rate[-1]
        return (after - before) / max(now - begun, 1e-3)

    def timeline(self, rid: str) -> Timeline | None:
        story = self.stories.by_rid(rid)
        return story.timeline(self.identity.name, self.identity.rank) if story is not None else None


def _read_columns(columns: RowColumns, at: float) -> Iterator[HeldRow]:
    ints = [
        memoryview(column).cast("i")
        for column in (columns.rows, columns.generations, columns.protected, columns.committed, columns.allocated)
    ]
    requests = memoryview(columns.requests).cast("q")
    for row, generation, protected, committed, allocated, request, phase in zip(
        *ints, requests, columns.phases, strict=True
    ):
        yield HeldRow(row, generation, request, _phase(phase), protected, committed, allocated, at)


def _phase(value: int) -> Phase:
    """One that only a later engine knows counts as held, and as not growing."""
    return _PHASES.get(value, Phase.PREFILL)


def _blamed_first(before: list[SlotRange], now: list[SlotRange]) -> list[SlotRange]:
    """The ranges of `now`; slots that were lost before stay with whom they were blamed on then.

    A slot that nobody owns comes back at a flush only, and that forgets the census. Its row is taken again meanwhile,
    and a later look at the line would blame whoever came after.
    """
    known = sorted((part for part in before if part.row), key=lambda part: part.start)
    ranges: list[SlotRange] = []
    for part in now:
        start = part.start
        for old in known:
            if old.end <= start or old.start >= part.end:
                continue
            if old.start > start:
                ranges.append(SlotRange(start, old.start, part.row, part.generation, part.request))
            end = min(old.end, part.end)
            ranges.append(SlotRange(max(start, old.start), end, old.row, old.generation, old.request))
            start = end
        if start < part.end:
            ranges.append(SlotRange(start, part.end, part.row, part.generation, part.request))
    return ranges
