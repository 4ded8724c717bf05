"""Slots that the last census found in two places at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.engine.probe import CensusTaken, SlotRange
from kvlens.observer.ledger import Ledger
from kvlens.observer.rules.claim import Claim, Owner
from kvlens.observer.schema import AccountResidual, Kind

name: Final = "census"
needs: Final = frozenset({"rows"})


def judge(ledger: Ledger) -> Iterable[Claim]:
    for census in ledger.censuses.values():
        if census.held_and_free:
            yield _claim(ledger, census, Kind.HELD_AND_FREE, census.held_and_free, "are held and in the free list")
        account = ledger.key_accounts.get(census.pool)
        if census.duplicate_free and (account is None or account.unaccounted >= 0):
            # As many are missing as are there twice; otherwise the balance shows it.
            yield _claim(ledger, census, Kind.OVER_RELEASE, census.duplicate_free, "are in the free list twice")
        if census.held_twice:
            yield _claim(ledger, census, Kind.HELD_TWICE, census.held_twice, "have two owners")


def _claim(ledger: Ledger, census: CensusTaken, kind: Kind, ranges: list[SlotRange], what: str) -> Claim:
    slots = sum(part.end - part.start for part in ranges)
    first = next((part for part in ranges if part.row), None)
    owner = Owner.of(ledger, first.request if first else 0)
    return Claim(
        kind,
        census.pool,
        f"{slots:,} slots of pool {census.pool} {what}" + (f"; {owner.name} is among the owners" if first else ""),
        census.pool,
        census.step,
        leaked_slots=slots,
        row=first.row if first else None,
        generation=first.generation if first else None,
        request_id=owner.request_id,
        trace_id=owner.trace_id,
        last_event=owner.last_event,
        evidence={"residual_slots": -slots},
        accounts=(AccountResidual(census.pool, "slot", -slots),),
        slots=tuple(ranges[:64]),
    )
