"""A row that is taken, and that no request in queue or batch holds: its slots will never come back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.observer.ledger import HeldRow, Ledger
from kvlens.observer.rules.claim import Claim, Owner, orphan_slots, orphans
from kvlens.observer.schema import AccountResidual, Kind

name: Final = "orphan_row"
needs: Final = frozenset({"accounts", "rows", "lengths"})


def judge(ledger: Ledger) -> Iterable[Claim]:
    for held in orphans(ledger):
        yield _claim(ledger, held)


def _claim(ledger: Ledger, held: HeldRow) -> Claim:
    slots, owner = orphan_slots(ledger, held), Owner.of(ledger, held.request)
    census, tenancy = ledger.censuses.get("full"), (held.row, held.generation)
    ranges = [part for part in census.unowned if (part.row, part.generation) == tenancy] if census is not None else []
    evidence = {
        "residual_slots": slots, "protected_tokens": held.protected, "committed_tokens": held.committed,
        "allocated_tokens": held.allocated,
    }  # fmt: skip
    if held.protected:
        evidence["locked_slots"] = held.protected
    for pool, account in ledger.key_accounts.items():
        evidence[f"{pool}_unaccounted"] = account.unaccounted
    return Claim(
        Kind.ORPHAN_ROW,
        f"row {held.row}.{held.generation}",
        f"{owner.name} is gone and left row {held.row} (generation {held.generation}) and {slots:,} slots behind",
        "full",
        ledger.key_step,
        leaked_slots=slots,
        leaked_rows=1,
        row=held.row,
        generation=held.generation,
        request_id=owner.request_id,
        trace_id=owner.trace_id,
        last_event=owner.last_event,
        site=held.site,
        evidence=evidence,
        accounts=(AccountResidual("full", "slot", slots), AccountResidual("rows", "row", 1)),
        slots=tuple(ranges[:64]),
    )
