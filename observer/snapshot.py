"""The state of now, made from what is under watch."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable

from kvlens import __version__
from kvlens.engine.record import Phase
from kvlens.observer.ledger import HeldRow, Ledger
from kvlens.observer.rules.catalog import standing
from kvlens.observer.schema import (
    EngineState,
    Finding,
    Kind,
    PoolAccount,
    PoolInfo,
    PoolState,
    RowState,
    State,
    trace_id_of,
)
from kvlens.observer.watch import Watch, best_of

_ROW_STATES = ("free", "running", "chunked", "waiting", "session", "transfer", "orphan")
_ROW_STATE_OF = {Phase.CHUNKED: "chunked", Phase.WAITING: "waiting", Phase.ORPHAN: "orphan"}
_LIVE = ("waiting", "chunked", "prefill", "running")
# A fault that was refused costs no slot.
_LOSING = (Kind.ORPHAN_ROW, Kind.UNOWNED_SLOTS)


def take_snapshot(watches: list[Watch]) -> State:
    """One entry per engine and rank, and every open finding."""
    now = time.time()
    chosen = sorted(best_of(watches), key=lambda watch: watch.identity.name if watch.identity is not None else "")
    engines = [_engine_state(watch, watch.ledger, now) for watch in chosen if watch.ledger is not None]
    findings = [finding for watch in chosen if watch.book is not None for finding in watch.book.open()]
    return State(now, __version__, engines, sorted(findings, key=lambda finding: finding.opened_at))


def _engine_state(watch: Watch, ledger: Ledger, now: float) -> EngineState:
    identity, frame = ledger.identity, ledger.frame
    findings = watch.book.open() if watch.book is not None else []
    phases = Counter(held.phase for held in ledger.rows.values())
    rows_free = ledger.accounts["rows"].free if "rows" in ledger.accounts else 0
    waiting = frame.waiting if frame is not None else 0
    return EngineState(
        engine=identity.name,
        rank=identity.rank,
        instance=identity.instance,
        source=identity.source,
        role=identity.role,
        model=identity.model,
        software=identity.software,
        version=identity.version,
        pid=watch.source.pid,
        status=watch.status,
        step=frame.last_step if frame is not None else 0,
        mode=frame.mode if frame is not None else "",
        updated_at=frame.wall_ns / 1e9 if frame is not None else 0.0,
        lag_seconds=watch.lag_seconds,
        started_at=identity.started_at,
        running=frame.running if frame is not None else 0,
        waiting=waiting,
        live={phase: waiting if phase == "waiting" else phases[Phase[phase.upper()]] for phase in _LIVE},
        rows=_row_states(phases, rows_free),
        active_rows=sum(count for phase, count in phases.items() if phase is not Phase.ORPHAN),
        allocated_tokens={"request": frame.allocated_tokens if frame is not None else 0, "session": 0},
        committed_tokens={"request": frame.committed_tokens if frame is not None else 0, "session": 0},
        allocated_tokens_max=ledger.allocated_max,
        committed_tokens_max=ledger.committed_max,
        leaked_slots=_leaked(findings, "slot", identity.pools),
        leaked_rows=_leaked(findings, "row", identity.pools),
        pools=[
            _pool_state(info, ledger.accounts[info.name]) for info in identity.pools if info.name in ledger.accounts
        ],
        tallies=ledger.tallies.state(),
        rules=standing(identity),
        tokens_per_second=ledger.tokens_per_second(now),
    )


def _row_states(phases: Counter[Phase], free: int) -> dict[str, int]:
    states = dict.fromkeys(_ROW_STATES, 0)
    states["free"] = free
    for phase, count in phases.items():
        states[_ROW_STATE_OF.get(phase, "running")] += count
    return states


def _leaked(findings: Iterable[Finding], unit: str, pools: Iterable[PoolInfo]) -> dict[str, int]:
    """By pool of that unit, summed over what open findings say is lost."""
    leaked = {pool.name: 0 for pool in pools if pool.unit == unit}
    for finding in findings:
        if finding.kind in _LOSING:
            for part in finding.accounts:
                if part.pool in leaked:
                    leaked[part.pool] += part.residual
    return leaked


def _pool_state(info: PoolInfo, account: PoolAccount) -> PoolState:
    return PoolState(
        pool=info.name,
        unit=info.unit,
        page_size=info.page_size,
        size_slots=account.size,
        size_bytes=account.size * info.bytes_per_unit,
        free=account.free,
        evictable=account.evictable,
        protected=account.protected,
        private=account.private,
        session=account.session,
        unaccounted=account.unaccounted,
    )


def row_states(watches: list[Watch]) -> list[RowState]:
    """Every held row of every engine: orphans first, then by what they hold."""
    rows = [
        _row_state(watch.ledger, held)
        for watch in best_of(watches)
        if watch.ledger is not None
        for held in watch.ledger.rows.values()
    ]
    return sorted(rows, key=lambda row: (row.phase != "orphan", -row.allocated_tokens, row.engine, row.row))


def _row_state(ledger: Ledger, held: HeldRow) -> RowState:
    story = ledger.stories.get(held.request)
    committed, allocated = ledger.lengths(held)
    return RowState(
        engine=ledger.identity.name,
        rank=ledger.identity.rank,
        row=held.row,
        generation=held.generation,
        request_id=story.rid if story is not None else None,
        trace_id=trace_id_of(story.trace) if story is not None else None,
        phase=held.phase.name.lower(),
        protected_tokens=held.protected,
        committed_tokens=committed,
        allocated_tokens=allocated,
        taken_at=held.taken_at,
        site=held.site,
    )
