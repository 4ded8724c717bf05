"""Hand-made states and timelines with sane defaults, for tests of what shows them."""

from __future__ import annotations

from typing import Any

import msgspec

from kvlens.observer.schema import (
    AccountResidual,
    EngineState,
    Finding,
    FindingState,
    HistogramState,
    Kind,
    PoolState,
    Severity,
    State,
    Timeline,
    TimelineEntry,
)
from kvlens.observer.tallies import TallyBook

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT = f"00-{TRACE}-00f067aa0ba902b7-01"


def a_pool(pool: str = "full", **changes: Any) -> PoolState:
    """1,000 slots, all accounted for."""
    fields = {
        "pool": pool, "unit": "row" if pool == "rows" else "slot", "page_size": 1, "size_slots": 1000,
        "size_bytes": 64_000, "free": 500, "evictable": 200, "protected": 100, "private": 200, "session": 0,
        "unaccounted": 0,
    }  # fmt: skip
    return PoolState(**(fields | changes))


def an_engine(name: str = "engine", **changes: Any) -> EngineState:
    """A healthy engine in the middle of its work."""
    fields: dict[str, Any] = {
        "engine": name, "rank": "dp0-tp0-pp0", "instance": "0" * 32, "source": "kvlens", "role": "full",
        "model": "builtin", "software": "kvlens", "version": "0.1.0", "pid": 1, "status": "up", "step": 1234,
        "mode": "decode", "updated_at": 1000.0, "lag_seconds": 0.01, "started_at": 900.0, "running": 3, "waiting": 2,
        "live": {"waiting": 2, "chunked": 1, "prefill": 0, "running": 3},
        "rows": {"free": 60, "running": 3, "chunked": 1, "waiting": 0, "session": 0, "transfer": 0, "orphan": 0},
        "active_rows": 4, "allocated_tokens": {"request": 300, "session": 0},
        "committed_tokens": {"request": 290, "session": 0}, "allocated_tokens_max": 400, "committed_tokens_max": 390,
        "leaked_slots": {"full": 0}, "leaked_rows": {"rows": 0},
        "pools": [a_pool("rows", size_slots=64, free=60, evictable=0, protected=0, private=4), a_pool()],
        "tallies": TallyBook().state(), "rules": {"orphan_row": "ok"}, "tokens_per_second": 100.0,
    }  # fmt: skip
    return EngineState(**(fields | changes))


def a_leaking_engine(name: str = "engine", slots: int = 40) -> EngineState:
    """One whose row pool lacks a row, and whose pool lacks `slots`."""
    return an_engine(
        name,
        leaked_slots={"full": slots},
        leaked_rows={"rows": 1},
        pools=[
            a_pool("rows", size_slots=64, free=60, evictable=0, protected=0, private=3, unaccounted=1),
            a_pool(private=200 - slots, unaccounted=slots),
        ],
    )


def tallies(engine: EngineState, **changes: Any) -> EngineState:
    """The engine with other counters."""
    return msgspec.structs.replace(engine, tallies=msgspec.structs.replace(engine.tallies, **changes))


def a_histogram(counts: tuple[int, ...], total: float, exemplar: tuple[float, str] | None = None) -> HistogramState:
    """Bounds 0.1 and 1; cumulative counts."""
    return HistogramState((0.1, 1.0), counts, total, exemplar)


def a_finding(**changes: Any) -> Finding:
    """An orphan row of 40 slots."""
    fields: dict[str, Any] = {
        "id": "0123456789ab", "kind": Kind.ORPHAN_ROW, "severity": Severity.CRITICAL, "state": FindingState.OPEN,
        "engine": "engine", "rank": "dp0-tp0-pp0", "pool": "full", "leaked_slots": 40, "leaked_rows": 1, "row": 5,
        "generation": 7, "request_id": "cmpl-5", "trace_id": TRACE, "opened_at": 1000.0, "resolved_at": None,
        "opened_step": 1200, "summary": "row 5 is held by nobody", "evidence": {"residual_slots": 40},
        "runbook": "docs/runbooks/orphan-row.md", "accounts": [AccountResidual("full", "slot", 40)],
    }  # fmt: skip
    return Finding(**(fields | changes))


def a_state(*engines: EngineState, findings: tuple[Finding, ...] = (), at: float = 1000.0) -> State:
    return State(at, "0.1.0", list(engines or (an_engine(),)), list(findings))


def entry(at: float, event: str, **changes: Any) -> TimelineEntry:
    return TimelineEntry(at, event, int(at), **changes)


def chunk(at: float, start: int, end: int, *, last: bool) -> TimelineEntry:
    """A prefill chunk that took 0.1 s."""
    detail = {"start": start, "end": end, "last": last}
    return entry(
        at, "chunk", row=5, generation=7, protected_tokens=0, committed_tokens=end, allocated_tokens=end,
        started_at=at - 0.1, detail=detail,
    )  # fmt: skip


def scheduled(at: float, cached: int) -> TimelineEntry:
    return entry(at, "scheduled", row=5, generation=7, detail={"cached_tokens": cached, "queried_tokens": 100})


def released(at: float, allocated: int) -> TimelineEntry:
    """A release that took 0.1 s."""
    detail = {"inserted": 0, "duplicate": 0, "body": allocated, "tail": 0}
    return entry(
        at, "released", row=5, generation=7, protected_tokens=0, allocated_tokens=allocated, started_at=at - 0.1,
        detail=detail,
    )  # fmt: skip


def finished(at: float, outcome: str = "length", output_tokens: int = 8, message: str = "") -> TimelineEntry:
    return entry(
        at, "finished", detail={"outcome": outcome, "output_tokens": output_tokens, "message": message}
    )  # fmt: skip


def a_timeline(*entries: TimelineEntry, **changes: Any) -> Timeline:
    """A prompt of 100 tokens of which 20 were cached, computed in two chunks, and 8 tokens of answer."""
    fields: dict[str, Any] = {
        "engine": "engine", "rank": "dp0-tp0-pp0", "request_id": "cmpl-5", "traceparent": TRACEPARENT,
        "prompt_tokens": 100, "max_new_tokens": 8, "output_tokens": 8, "cached_tokens": 20, "outcome": "length",
        "queued_at": 10.0, "ended_at": 20.0,
        "entries": list(entries) or [
            entry(10.0, "queued"), scheduled(11.0, 20), chunk(12.0, 20, 60, last=False),
            chunk(13.0, 60, 100, last=True), entry(13.0, "first_token"), released(20.0, 108), finished(20.0),
        ],
    }  # fmt: skip
    return Timeline(**(fields | changes))
