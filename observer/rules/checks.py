"""Checks of the engine that failed, where no account shows the same fault."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvlens.engine.contracts import CHECKS
from kvlens.observer.ledger import FailedCheck, Ledger
from kvlens.observer.rules.claim import Claim, Owner
from kvlens.observer.schema import AccountResidual, Kind, Severity

name: Final = "checks"
needs: Final = frozenset({"lifecycle"})

_SEVERITIES = {check.name: Severity(check.severity) for check in CHECKS.all()}
# Their faults are findings of the balance and census rules.
_ACCOUNTS = {CHECKS.row_pool_balances.name, CHECKS.full_pool_balances.name, CHECKS.no_held_slot_is_free.name}


def judge(ledger: Ledger) -> Iterable[Claim]:
    for failed in ledger.failed.values():
        check = failed.event.check
        if check == CHECKS.free_slots_unique.name:
            yield _double_free(failed)
        elif check == CHECKS.reused_row_carries_kv.name:
            yield _record_reused(ledger, failed)
        elif check not in _ACCOUNTS:
            yield _check_failed(ledger, failed)


def _double_free(failed: FailedCheck) -> Claim:
    event = failed.event
    return Claim(
        Kind.DOUBLE_FREE,
        "full",
        f"{failed.slots:,} slots were returned a second time, from slot {event.facts.get('first_slot', 0):,} on; "
        "they were refused",
        "full",
        event.step,
        leaked_slots=failed.slots,
        evidence={"residual_slots": -failed.slots, "times": failed.count, **event.facts},
        accounts=(AccountResidual("full", "slot", -failed.slots),),
    )


def _record_reused(ledger: Ledger, failed: FailedCheck) -> Claim:
    event, owner = failed.event, Owner.of(ledger, failed.event.request)
    return Claim(
        Kind.RECORD_REUSED,
        f"row {event.row}.{event.generation}",
        f"{owner.name} went on with row {event.row} (generation {event.generation}) after it was released; it was "
        "given a fresh one",
        "rows",
        event.step,
        row=event.row,
        generation=event.generation,
        request_id=owner.request_id,
        trace_id=owner.trace_id,
        last_event=owner.last_event,
        evidence={"times": failed.count, **_record(failed)},
    )


def _check_failed(ledger: Ledger, failed: FailedCheck) -> Claim:
    event, owner = failed.event, Owner.of(ledger, failed.event.request)
    who = f" for {owner.name}" if event.request else ""
    return Claim(
        Kind.CHECK_FAILED,
        f"{event.check} {event.row}.{event.generation} {event.request}",
        f"check {event.check} failed{who}" + (f": {event.hint}" if event.hint else ""),
        "rows",
        event.step,
        row=event.row if event.row >= 0 else None,
        generation=event.generation if event.row >= 0 else None,
        request_id=owner.request_id,
        trace_id=owner.trace_id,
        last_event=owner.last_event,
        evidence={"times": failed.count, **event.facts, **_record(failed)},
        runbook=event.check,
        severity=_SEVERITIES.get(event.check, Severity.WARNING),
    )


def _record(failed: FailedCheck) -> dict[str, int]:
    """The record's fields, where there was one."""
    event = failed.event
    if event.allocated_tokens < 0:
        return {}
    return {
        "protected_tokens": event.protected_tokens, "committed_tokens": event.committed_tokens,
        "allocated_tokens": event.allocated_tokens,
    }  # fmt: skip
