"""The catalogue of named checks, and what happens when one does not hold. Imports without torch.

`strict` raises before any state is touched. `report`, the default, tells the probe and answers False; the caller then
takes its safe path, which leaves the pools consistent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from kvlens.engine.probe import CheckFailed

if TYPE_CHECKING:
    from kvlens.engine.probe import Probe
    from kvlens.engine.record import ReqKvInfo


class KvContractError(RuntimeError):
    """A named check failed in strict mode; nothing was changed."""

    def __init__(self, check: Check, message: str) -> None:
        super().__init__(f"{check.name}: {message}")
        self.check = check


class Mode(str, Enum):
    STRICT = "strict"
    REPORT = "report"


@dataclass(frozen=True, slots=True)
class Check:
    """One named check. The runbook page is docs/runbooks/NAME.md."""

    name: str
    severity: str  # critical or warning
    description: str


class CHECKS:
    """Every check there is."""

    reused_row_carries_kv = Check(
        "reused-row-carries-kv", "critical", "A record that keeps its row has allocated KV (A > 0)."
    )
    free_needs_held_row = Check("free-needs-held-row", "critical", "Only a record that holds a row can free one.")
    held_xor_released = Check("held-xor-released", "critical", "A record either holds a row or is released.")
    committed_within_allocated = Check(
        "committed-within-allocated", "critical", "0 <= P <= C <= A for every holder; C = A without speculation."
    )
    protected_page_aligned = Check("protected-page-aligned", "critical", "P is a multiple of the page size.")
    distinct_requests = Check("distinct-requests", "critical", "A request is asked a row for once per call.")
    row_taken_before_free = Check("row-taken-before-free", "critical", "A row is returned once per hand-out.")
    free_slots_unique = Check("free-slots-unique", "critical", "A slot is returned once per hand-out.")
    free_group_closed = Check("free-group-closed", "critical", "A free group is closed before the next one opens.")
    locks_balance = Check("locks-balance", "critical", "A node is unlocked as often as it was locked.")
    one_chunked_request = Check("one-chunked-request", "critical", "At most one request of a batch is truncated.")
    row_pool_balances = Check("row-pool-balances", "critical", "Free rows and held rows make up the pool.")
    full_pool_balances = Check(
        "full-pool-balances", "critical", "free + evictable + protected + private + session = size, in slots."
    )
    no_held_slot_is_free = Check("no-held-slot-is-free", "critical", "No slot is both held and in the free list.")

    @classmethod
    def all(cls) -> list[Check]:
        return [value for value in vars(cls).values() if isinstance(value, Check)]


class Contracts:
    """Asks checks, and tells the probe about each that fails."""

    def __init__(
        self, mode: Mode = Mode.REPORT, probe: Probe | None = None, step: Callable[[], int] = lambda: 0
    ) -> None:
        self.mode = mode
        self._probe = probe
        self._step = step

    def require(
        self,
        check: Check,
        holds: bool,
        *,
        record: ReqKvInfo | None = None,
        request: int = 0,
        hint: str = "",
        facts: dict[str, int] | None = None,
    ) -> bool:
        """True when the check holds. Otherwise an event, and then False (report) or KvContractError (strict)."""
        if holds:
            return True
        self._fail(check, record, request, hint, facts or {})
        return False

    def _fail(self, check: Check, record: ReqKvInfo | None, request: int, hint: str, facts: dict[str, int]) -> None:
        if self._probe is not None:
            self._probe.emit(
                CheckFailed(
                    at_ns=time.monotonic_ns(),
                    step=self._step(),
                    check=check.name,
                    request=request,
                    row=record.req_pool_idx or -1 if record else -1,
                    generation=record.generation if record else -1,
                    protected_tokens=record.cache_protected_len if record else -1,
                    committed_tokens=record.kv_committed_len if record else -1,
                    allocated_tokens=record.kv_allocated_len if record else -1,
                    hint=hint,
                    facts=facts,
                )
            )
        if self.mode is Mode.STRICT:
            numbers = ", ".join(f"{name} {value:,}" for name, value in facts.items())
            about = f" ({numbers})" if numbers else ""
            raise KvContractError(
                check, f"{check.description}{about} {hint}".rstrip() + (f" [{record}]" if record else "")
            )
