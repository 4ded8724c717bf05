"""What the screens show: one frozen view of the observer, and figures as people read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from kvlens.observer.schema import EngineState, Finding, PoolState, RowState, State

MISSING = "–"
"""A figure nobody knows: never a zero."""
POOL_STATES = ("free", "evictable", "protected", "private", "session", "unaccounted")


@dataclass(frozen=True, slots=True)
class View:
    """The last complete answer of the observer, and how the last try to get one went. Times are Unix seconds."""

    url: str
    now: float
    state: State | None = None
    rows: tuple[RowState, ...] = ()
    total_rows: int = 0
    fetched_at: float | None = None
    problem: str | None = None
    """Why the last try failed; None when it did not."""
    lost_at: float | None = None
    """When the observer stopped answering."""
    back_at: float | None = None
    """When it answered again."""

    @property
    def is_connected(self) -> bool:
        return self.problem is None and self.fetched_at is not None

    @property
    def findings(self) -> tuple[Finding, ...]:
        return tuple(self.state.findings_open) if self.state is not None else ()

    def answered(self, now: float, state: State, rows: tuple[RowState, ...], total: int) -> View:
        """The view after a complete answer."""
        back_at = now if self.problem is not None and self.fetched_at is not None else self.back_at
        return replace(
            self, now=now, state=state, rows=rows, total_rows=total, fetched_at=now, problem=None, lost_at=None,
            back_at=back_at,
        )  # fmt: skip

    def failed(self, now: float, problem: str) -> View:
        """The view after a try that brought nothing: what was known stays, and is marked as old."""
        return replace(self, now=now, problem=problem, lost_at=self.lost_at or now)


def age(seconds: float) -> str:
    """`0.4 s`, `12 s`, `3 m 05 s`, `2 h 07 m`; never negative."""
    seconds = max(0.0, seconds)
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 3600:
        return f"{int(seconds) // 60} m {int(seconds) % 60:02d} s"
    return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60:02d} m"


def number(value: float | None) -> str:
    """With thousands separated; `–` for what is not known."""
    return MISSING if value is None else f"{value:,.0f}"


def equation(pool: PoolState, width: int = 200) -> str:
    """The account of a pool, with the numbers in it; where it must be short, without the zeros."""
    parts = [f"{state} {getattr(pool, state):,}" for state in POOL_STATES]
    full = f"size {pool.size_slots:,} = {' + '.join(parts)}"
    if len(full) <= width:
        return full
    shown = [part for state, part in zip(POOL_STATES, parts, strict=True) if getattr(pool, state)]
    return f"{pool.size_slots:,} = {'+'.join(shown)}"


def shares(pool: PoolState, width: int) -> list[tuple[str, int]]:
    """Cells of a bar of `width` per state. What is there is seen: a state that is not zero gets at least one cell."""
    values = {state: max(0, getattr(pool, state)) for state in POOL_STATES}
    total = sum(values.values()) or 1
    cells = {state: max(1, round(value * width / total)) if value else 0 for state, value in values.items()}
    while sum(cells.values()) != width:
        largest = max(cells, key=lambda state: cells[state])
        cells[largest] += 1 if sum(cells.values()) < width else -1
    return list(cells.items())


def verdict(view: View) -> tuple[str, str]:
    """(level, sentence): level is ok, bad, gone or waiting."""
    if view.state is None:
        return ("gone", view.problem) if view.problem else ("waiting", "connecting")
    if view.problem is not None:
        since = age(view.now - (view.lost_at or view.now))
        return "gone", f"the observer has not answered for {since}: {view.problem}"
    if view.findings:
        count = len(view.findings)
        return "bad", f"{count} finding{'s' if count > 1 else ''} open"
    if not view.state.engines:
        return "waiting", "no engine yet"
    down = [engine.engine for engine in view.state.engines if engine.status != "up"]
    if down:
        return "bad", f"{', '.join(down)} not up"
    return "ok", "every slot is accounted for"


def engine_line(engine: EngineState, now: float) -> str:
    """One engine in one line; a silent one shows for how long, and no rate."""
    silent = f"silent {age(now - engine.updated_at)}"
    rate = f"{engine.tokens_per_second:,.0f} tok/s" if engine.status == "up" else silent
    return (
        f"{engine.engine[:15]:<15} {engine.status:<7} {engine.mode:<7} step {engine.step:>9,} run {engine.running:>3} "
        f"wait {engine.waiting:>3} {rate:>11}"
    )


SORTS = ("allocated", "age", "row", "phase")


def sort_rows(rows: Iterable[RowState], by: str) -> list[RowState]:
    """Orphans always first: the row nobody holds is the one to look at."""
    return sorted(rows, key=lambda row: (row.phase != "orphan", _place(row, by), row.engine, row.row))


def _place(row: RowState, by: str) -> tuple[str, float]:
    if by == "row":
        return row.engine, row.row
    if by == "age":
        return "", row.taken_at
    return (row.phase if by == "phase" else ""), -row.allocated_tokens


def matches(row: RowState, wanted: str) -> bool:
    """Every word of the filter is somewhere in the row."""
    text = f"{row.engine} {row.row} {row.request_id or ''} {row.phase} {row.trace_id or ''}".lower()
    return all(word in text for word in wanted.lower().split())
