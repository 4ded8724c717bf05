"""The life of a finding: it opens, is updated, is acknowledged, and resolves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from hashlib import blake2b

import msgspec

from kvlens.engine.probe import SlotRange
from kvlens.observer.rules.claim import Claim
from kvlens.observer.schema import Finding, FindingState, Identity


@dataclass(slots=True)
class Changes:
    """What one comparison of claims with findings brought."""

    opened: list[Finding] = field(default_factory=list)
    updated: list[Finding] = field(default_factory=list)
    resolved: list[Finding] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.opened or self.updated or self.resolved)

    def all(self) -> list[Finding]:
        return [*self.opened, *self.updated, *self.resolved]


class FindingBook:
    """Open findings of one engine instance, by (kind, subject). A fault keeps its id over restarts of the observer."""

    def __init__(self, identity: Identity, stored: Iterable[tuple[str, Finding]] = ()) -> None:
        """stored: subject and finding, as they were left open by an earlier observer of the same instance."""
        self._identity = identity
        self._open: dict[tuple[str, str], Finding] = {
            (finding.kind.value, subject): finding for subject, finding in stored
        }

    def open(self) -> list[Finding]:
        return list(self._open.values())

    def subject_of(self, finding: Finding) -> str:
        """What a finding of this book is about; what `stored` has to bring back."""
        return next(key[1] for key, known in self._open.items() if known.id == finding.id)

    def reconcile(self, claims: Iterable[Claim], now: float) -> Changes:
        """Open what is new, update what has changed, resolve what no claim stands for any more."""
        changes = Changes()
        claimed: set[tuple[str, str]] = set()
        for claim in claims:
            key = (claim.kind.value, claim.subject)
            claimed.add(key)
            known = self._open.get(key)
            finding = self._finding(claim, known, now)
            if known is None:
                changes.opened.append(finding)
            elif finding != known:
                changes.updated.append(finding)
            self._open[key] = finding
        for key in [key for key in self._open if key not in claimed]:
            changes.resolved.append(resolved(self._open.pop(key), now))
        return changes

    def acknowledge(self, finding_id: str) -> Finding | None:
        """Somebody is on it; None when no open finding has that id."""
        for key, finding in self._open.items():
            if finding.id == finding_id:
                self._open[key] = msgspec.structs.replace(finding, state=FindingState.ACKNOWLEDGED)
                return self._open[key]
        return None

    def _finding(self, claim: Claim, known: Finding | None, now: float) -> Finding:
        opened_at, opened_step = (known.opened_at, known.opened_step) if known else (now, claim.step)
        if known is not None and _same_slots(known, claim):
            claim = _with_owner_of(known, claim)
        return Finding(
            id=known.id if known else self._id(claim),
            kind=claim.kind,
            severity=claim.severity,
            state=known.state if known else FindingState.OPEN,
            engine=self._identity.name,
            rank=self._identity.rank,
            pool=claim.pool,
            leaked_slots=claim.leaked_slots,
            leaked_rows=claim.leaked_rows,
            row=claim.row,
            generation=claim.generation,
            request_id=claim.request_id,
            trace_id=claim.trace_id,
            opened_at=opened_at,
            resolved_at=None,
            opened_step=opened_step,
            summary=claim.summary,
            evidence=known.evidence if known is not None and _same_amount(known, claim) else claim.evidence,
            runbook=claim.runbook_page,
            accounts=list(claim.accounts),
            slots=list(claim.slots),
            last_event=claim.last_event,
            site=claim.site,
        )

    def _id(self, claim: Claim) -> str:
        """The same for the same fault, also when another observer reads the same frames."""
        source = f"{self._identity.instance}/{self._identity.rank}/{claim.kind.value}/{claim.subject}/{claim.step}"
        return blake2b(source.encode(), digest_size=6).hexdigest()


def resolved(finding: Finding, now: float) -> Finding:
    return msgspec.structs.replace(finding, state=FindingState.RESOLVED, resolved_at=now)


def _same_slots(finding: Finding, claim: Claim) -> bool:
    """The same loss, whoever it is blamed on."""
    return (finding.leaked_slots, finding.leaked_rows, _merged(finding.slots)) == (
        claim.leaked_slots, claim.leaked_rows, _merged(claim.slots),
    )  # fmt: skip


def _merged(ranges: Iterable[SlotRange]) -> list[tuple[int, int]]:
    """Slots as [start, end), cut only where there is a gap."""
    merged: list[tuple[int, int]] = []
    for part in sorted(ranges, key=lambda part: part.start):
        if merged and merged[-1][1] == part.start:
            merged[-1] = (merged[-1][0], part.end)
        else:
            merged.append((part.start, part.end))
    return merged


def _with_owner_of(finding: Finding, claim: Claim) -> Claim:
    """Who was blamed first is blamed still: stories are forgotten, and rows are taken again, before a leak is gone."""
    if finding.request_id in (None, claim.request_id):
        return claim
    return replace(
        claim, summary=finding.summary, row=finding.row, generation=finding.generation, request_id=finding.request_id,
        trace_id=finding.trace_id, last_event=finding.last_event, site=finding.site, slots=tuple(finding.slots),
    )  # fmt: skip


def _same_amount(finding: Finding, claim: Claim) -> bool:
    """What was lost is as it was: the rest of the account moves with every step, and is no news."""
    return (finding.leaked_slots, finding.leaked_rows, finding.slots, finding.row) == (
        claim.leaked_slots, claim.leaked_rows, list(claim.slots), claim.row,
    ) and finding.evidence.get("times") == claim.evidence.get("times")  # fmt: skip
