"""A pool whose account does not add up, after what orphan rows explain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.engine.probe import SlotRange
from kvlens.observer.ledger import Ledger
from kvlens.observer.rules.claim import Claim, Owner, orphan_slots, orphans
from kvlens.observer.schema import AccountResidual, Kind, PoolAccount

name: Final = "balance"
needs: Final = frozenset({"accounts", "rows"})


def judge(ledger: Ledger) -> Iterable[Claim]:
    lost = orphans(ledger)
    explained = {"rows": len(lost), "full": sum(orphan_slots(ledger, held) for held in lost)}
    tenancies = {(held.row, held.generation) for held in lost}
    for pool, account in ledger.key_accounts.items():
        residual = account.unaccounted - explained.get(pool, 0)
        if residual > 0:
            yield _missing(ledger, account, residual, tenancies)
        elif residual < 0:
            yield _returned_twice(ledger, account, residual)


def _missing(ledger: Ledger, account: PoolAccount, residual: int, orphaned: set[tuple[int, int]]) -> Claim:
    census = ledger.censuses.get(account.pool)
    ranges = [part for part in census.unowned if (part.row, part.generation) not in orphaned] if census else []
    tenancy = _only_tenancy(ranges)
    owner = Owner.of(ledger, tenancy.request if tenancy else 0)
    unit = "row" if account.pool == "rows" else "slot"
    by = f", last referenced by {owner.name} in row {tenancy.row}" if tenancy else ""
    return Claim(
        Kind.UNOWNED_SLOTS,
        account.pool,
        f"{residual:,} {unit}s of pool {account.pool} belong to nobody{by}",
        account.pool,
        ledger.key_step,
        leaked_slots=residual if unit == "slot" else 0,
        leaked_rows=residual if unit == "row" else 0,
        row=tenancy.row if tenancy else None,
        generation=tenancy.generation if tenancy else None,
        request_id=owner.request_id,
        trace_id=owner.trace_id,
        last_event=owner.last_event,
        evidence=_equation(account, residual),
        accounts=(AccountResidual(account.pool, unit, residual),),
        slots=tuple(ranges[:64]),
    )


def _returned_twice(ledger: Ledger, account: PoolAccount, residual: int) -> Claim:
    unit = "row" if account.pool == "rows" else "slot"
    return Claim(
        Kind.OVER_RELEASE,
        account.pool,
        f"{-residual:,} {unit}s of pool {account.pool} were returned more often than they were handed out",
        account.pool,
        ledger.key_step,
        leaked_slots=-residual if unit == "slot" else 0,
        leaked_rows=-residual if unit == "row" else 0,
        evidence=_equation(account, residual),
        accounts=(AccountResidual(account.pool, unit, residual),),
    )


def _only_tenancy(ranges: list[SlotRange]) -> SlotRange | None:
    """The one tenancy all ranges point to; None when there are several, or none is known."""
    tenancies = {(part.row, part.generation, part.request) for part in ranges}
    return ranges[0] if len(tenancies) == 1 and ranges[0].row else None


def _equation(account: PoolAccount, residual: int) -> dict[str, int]:
    return {
        "residual_slots": residual, "size": account.size, "free": account.free, "evictable": account.evictable,
        "protected": account.protected, "private": account.private, "session": account.session,
    }  # fmt: skip
