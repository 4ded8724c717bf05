"""What a rule says. Each module beside this one is a rule: a pure function `judge` of the ledger, and what it needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvlens.engine.probe import SlotRange
from kvlens.observer.ledger import HeldRow, Ledger
from kvlens.observer.schema import AccountResidual, Kind, Severity, trace_id_of


@dataclass(frozen=True, slots=True)
class Claim:
    """One thing that is wrong now. (kind, subject) names it for as long as it lasts."""

    kind: Kind
    subject: str
    summary: str
    """One sentence: what, who, how much."""
    pool: str
    step: int
    leaked_slots: int = 0
    leaked_rows: int = 0
    row: int | None = None
    generation: int | None = None
    request_id: str | None = None
    trace_id: str | None = None
    last_event: str | None = None
    site: str | None = None
    evidence: dict[str, int] = field(default_factory=dict)
    accounts: tuple[AccountResidual, ...] = ()
    slots: tuple[SlotRange, ...] = ()
    runbook: str = ""
    severity: Severity = Severity.CRITICAL

    @property
    def runbook_page(self) -> str:
        return f"docs/runbooks/{self.runbook or self.kind.value.replace('_', '-')}.md"


@dataclass(frozen=True, slots=True)
class Owner:
    """Who took a row, as far as the ledger knows."""

    request_id: str | None
    trace_id: str | None
    last_event: str | None

    @classmethod
    def of(cls, ledger: Ledger, request: int) -> Owner:
        story = ledger.stories.get(request) if request else None
        if story is None:
            return cls(None, None, None)
        return cls(story.rid, trace_id_of(story.trace), story.last_event)

    @property
    def name(self) -> str:
        return f"request {self.request_id}" if self.request_id else "an unknown request"


def orphans(ledger: Ledger) -> list[HeldRow]:
    """Rows that were taken at the last key frame, and that nobody in queue or batch held."""
    return ledger.key_orphans


def orphan_slots(ledger: Ledger, held: HeldRow) -> int:
    """ceil(A) - P of an orphan: the slots nobody will return."""
    page = next((pool.page_size for pool in ledger.identity.pools if pool.name == "full"), 1)
    return max(0, -(-held.allocated // page) * page - held.protected)
