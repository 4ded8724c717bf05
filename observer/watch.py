"""One engine under watch: its frames, the ledger they make, and the findings that follow."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvlens.observer.findings import Changes, FindingBook
from kvlens.observer.ledger import Applied, Ledger
from kvlens.observer.rules.catalog import judge
from kvlens.observer.rules.claim import Claim
from kvlens.observer.schema import Finding, Frame, Identity, Kind, LedgerEvent, Timeline
from kvlens.observer.sources.ring import RingSource
from kvlens.observer.store import Store


@dataclass(slots=True)
class News:
    """What a look at an engine brought for others. Already stored when it is handed out."""

    ended: list[Timeline] = field(default_factory=list)
    events: list[LedgerEvent] = field(default_factory=list)
    more: bool = False
    fresh: bool = False


class Watch:
    """Follows one source. Frames up to the stored cursor rebuild the picture; later ones count, open and export."""

    def __init__(self, source: RingSource, store: Store) -> None:
        self.source = source
        self.ledger: Ledger | None = None
        self.book: FindingBook | None = None
        self.status = "down"
        self.applied_at = 0.0
        self.lag_seconds = 0.0
        self._store = store
        self._cursor = 0
        self._resumed = False
        self._subjects: dict[str, str] = {}

    @property
    def identity(self) -> Identity | None:
        return self.ledger.identity if self.ledger is not None else None

    def poll(self) -> News:
        """Take what is new. Raises StoreError when it cannot be kept."""
        news = News()
        poll = self.source.poll()
        if poll.identity is not None:
            self._begin(poll.identity, news)
        if self.ledger is None or self.book is None:
            return news
        news.more = poll.more
        changed: list[Finding] = []
        if poll.lost:
            self.ledger.lost(poll.lost)
            news.events.append(self._event("frames_lost", {"frames": poll.lost}))
        last = self._cursor
        if self._resumed and poll.frames:
            self._resumed = False
            if (missed := poll.frames[0][0] - self._cursor - 1) > 0:  # overwritten while no observer ran
                self.ledger.lost(missed)
                news.events.append(self._event("frames_lost", {"frames": missed}))
        for sequence, frame in poll.frames:
            replay = sequence <= self._cursor
            applied = self.ledger.apply(frame, replay=replay)
            if not replay:
                last = sequence
                self._tell(applied, news)
                if _may_change_findings(frame) or self.book.open():
                    changed += self._reconcile(frame.wall_ns / 1e9, news)
        if poll.frames:
            self.applied_at = time.time()
            self.lag_seconds = max(0.0, self.applied_at - poll.frames[-1][1].wall_ns / 1e9)
            news.fresh = True
        if not poll.more:
            changed += self._look_at_status(news)
        if changed or last > self._cursor:
            self._keep(last, changed)
        return news

    def _begin(self, identity: Identity, news: News) -> None:
        """A new instance: what its predecessor held is gone with it."""
        if self.book is not None:
            now = time.time()
            self._keep(self._cursor, self._announce(self.book.reconcile([], now), news))
        is_over = self.source.status == "down"
        self._store.resolve_predecessors(identity, time.time(), identity.started_at if is_over else math.inf)
        self._cursor = self._store.cursor(identity)
        self._resumed = self._cursor > 0
        stored = self._store.unresolved(identity)
        self._subjects = {finding.id: subject for subject, finding in stored}
        # Counters restart with the observer, not with the engine.
        tallies = self.ledger.tallies if self.ledger is not None else None
        self.ledger, self.book = Ledger(identity, tallies), FindingBook(identity, stored)
        self.status = "up"
        news.events.append(self._event("engine_up", {"instance": identity.instance}))

    def _reconcile(self, now: float, news: News) -> list[Finding]:
        assert self.ledger is not None and self.book is not None
        claims = judge(self.ledger)
        if self.status == "down":
            # Read to its end: what an engine held that stopped cleanly is gone with it.
            claims = [] if self.source.is_closed else [*claims, self._down()]
        return self._announce(self.book.reconcile(claims, now), news)

    def _announce(self, changes: Changes, news: News) -> list[Finding]:
        for kind, findings in (
            ("finding_opened", changes.opened), ("finding_updated", changes.updated),
            ("finding_resolved", changes.resolved),
        ):  # fmt: skip
            news.events += [self._event(kind, msgspec.to_builtins(finding)) for finding in findings]
        if self.ledger is not None:
            self.ledger.tallies.findings.update(finding.kind.value for finding in changes.opened)
        if self.book is not None:
            self._subjects |= {finding.id: self.book.subject_of(finding) for finding in changes.opened}
        return changes.all()

    def _look_at_status(self, news: News) -> list[Finding]:
        status = self.source.status
        if status == self.status:
            return []
        before, self.status = self.status, status
        news.fresh = True
        if status == "down" or before == "down":
            kind = "engine_down" if status == "down" else "engine_up"
            news.events.append(self._event(kind, {"clean": self.source.is_closed}))
            return self._reconcile(time.time(), news)
        return []

    def _down(self) -> Claim:
        assert self.ledger is not None
        frame = self.ledger.frame
        step = frame.last_step if frame is not None else 0
        running = frame.running if frame is not None else 0
        return Claim(
            Kind.ENGINE_DOWN,
            self.ledger.identity.instance,
            f"engine {self.ledger.identity.name} died at step {step:,} with {running:,} requests holding KV",
            "full",
            step,
            evidence={"pid": self.source.pid, "running": running},
        )

    def _keep(self, sequence: int, changed: list[Finding]) -> None:
        assert self.ledger is not None
        newest = {finding.id: finding for finding in changed}
        self._store.commit(
            self.ledger.identity, sequence, [(self._subjects[finding.id], finding) for finding in newest.values()]
        )
        self._cursor = sequence
        if self.book is not None:
            still = {finding.id for finding in self.book.open()}
            self._subjects = {id: subject for id, subject in self._subjects.items() if id in still}

    def acknowledge(self, finding_id: str) -> Finding | None:
        """Somebody is on it; None when it is not an open finding of this engine."""
        finding = self.book.acknowledge(finding_id) if self.book is not None else None
        if finding is not None:
            self._keep(self._cursor, [finding])
        return finding

    def _tell(self, applied: Applied, news: News) -> None:
        news.ended += applied.ended
        news.events += [self._event("check_failed", msgspec.structs.asdict(event)) for event in applied.checks]

    def _event(self, kind: str, data: dict[str, Any]) -> LedgerEvent:
        name = self.ledger.identity.name if self.ledger is not None else self.source.path.name
        return LedgerEvent(time.time(), name, kind, data)


def _may_change_findings(frame: Frame) -> bool:
    """Claims follow from key frames, censuses and checks; a plain step frame changes none."""
    return frame.is_key or any(type(event).__name__ in _TELLING for event in frame.events)


_TELLING = frozenset({"CheckFailed", "CensusTaken", "CacheFlushed"})


def best_of(watches: list[Watch]) -> Iterator[Watch]:
    """One watch per engine and rank: a live one before a dead one, the latest before an earlier one."""
    seen: set[tuple[str, str]] = set()
    known = [watch for watch in watches if watch.identity is not None]
    for watch in sorted(known, key=_rank, reverse=True):
        assert watch.identity is not None
        key = (watch.identity.name, watch.identity.rank)
        if key not in seen:
            seen.add(key)
            yield watch


def _rank(watch: Watch) -> tuple[bool, float]:
    return watch.status != "down", watch.identity.started_at if watch.identity is not None else 0.0
