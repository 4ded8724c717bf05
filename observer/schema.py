"""What crosses the observer's borders: frames coming in; findings, state and timelines going out. Plain data.

Frames are msgpack (tagged arrays, one version per file); everything else is JSON with the field names as keys. A fact
that a source cannot know is None, never zero.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec

from kvlens.engine.probe import AnyEvent, SlotRange


class StrEnum(str, enum.Enum):
    """`enum.StrEnum`, which Python 3.10 lacks."""

    def __str__(self) -> str:
        return str(self.value)


# -- frames -----------------------------------------------------------------------------------------------------------


class PoolInfo(msgspec.Struct, frozen=True):
    """What does not change about a pool. `facts`: accounts, rows, lengths, lifecycle, blocks, usage."""

    name: str
    unit: str  # slot, state or row
    size: int
    page_size: int
    bytes_per_unit: int
    facts: tuple[str, ...] = ("accounts", "rows", "lengths", "lifecycle")


class Identity(msgspec.Struct, frozen=True):
    """Who speaks. `instance` is new at every start and never a metric label."""

    name: str
    instance: str
    rank: str = "dp0-tp0-pp0"
    role: str = "full"
    source: str = "kvlens"
    software: str = "kvlens"
    version: str = ""
    model: str = ""
    pools: tuple[PoolInfo, ...] = ()
    started_at: float = 0.0  # Unix seconds


class PoolAccount(msgspec.Struct, frozen=True, array_like=True):
    """One pool at a quiet moment, in its unit. Every slot is in exactly one state."""

    pool: str  # full, rows, ...
    size: int
    free: int
    evictable: int  # cached, lock count 0
    protected: int  # cached and locked
    private: int  # [P, ceil(A)) of live requests
    session: int  # the same, of idle sessions

    @property
    def unaccounted(self) -> int:
        """Positive: slots are missing. Negative: returned twice. Never clamped."""
        return self.size - (self.free + self.evictable + self.protected + self.private + self.session)


class RowColumns(msgspec.Struct, frozen=True, array_like=True):
    """All held rows of a key frame as little-endian columns: int32 unless said otherwise, one entry per row."""

    rows: bytes
    generations: bytes
    requests: bytes  # int64
    phases: bytes  # uint8, kvlens.engine.record.Phase
    protected: bytes
    committed: bytes
    allocated: bytes


class Frame(msgspec.Struct, frozen=True, array_like=True, tag="frame"):
    """What the engine published after one or more scheduler steps. A key frame also has `columns` and `names`."""

    first_step: int
    last_step: int
    monotonic_ns: int
    wall_ns: int
    mode: str  # prefill, decode or idle: the last step's
    running: int
    waiting: int
    accounts: list[PoolAccount]  # the row pool is one of them
    allocated_tokens: int  # sum over requests
    committed_tokens: int
    events: list[AnyEvent]
    dropped_events: int = 0
    columns: RowColumns | None = None
    names: list[tuple[int, str, str | None]] | None = None  # (number, id, trace) of live requests
    identity: Identity | None = None  # in key frames
    probe_ns: int = 0  # time spent inside the probe since the last frame

    @property
    def is_key(self) -> bool:
        return self.columns is not None


# -- findings ---------------------------------------------------------------------------------------------------------


class Kind(StrEnum):
    """Every kind of finding there is."""

    ORPHAN_ROW = "orphan_row"
    UNOWNED_SLOTS = "unowned_slots"
    OVER_RELEASE = "over_release"
    HELD_AND_FREE = "held_and_free"
    HELD_TWICE = "slots_held_twice"
    DOUBLE_FREE = "double_free"
    RECORD_REUSED = "record_reused_after_release"
    CHECK_FAILED = "check_failed"
    ENGINE_DOWN = "engine_down"


class Severity(StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class FindingState(StrEnum):
    OPEN = "open"
    RESOLVED = "resolved"
    ACKNOWLEDGED = "acknowledged"


class AccountResidual(msgspec.Struct, frozen=True):
    """The part of a finding in one pool; `residual` as in the accounting equation: positive is missing."""

    pool: str
    unit: str
    residual: int


class Finding(msgspec.Struct, frozen=True):
    """A judgement with evidence. One fault is one finding over all the pools it touches; `pool` is the first."""

    id: str
    kind: Kind
    severity: Severity
    state: FindingState
    engine: str
    rank: str
    pool: str
    leaked_slots: int
    leaked_rows: int
    row: int | None
    generation: int | None
    request_id: str | None
    trace_id: str | None
    opened_at: float
    resolved_at: float | None
    opened_step: int
    summary: str  # one sentence: what, who, how much, since
    evidence: dict[str, int]
    runbook: str  # docs/runbooks/NAME.md
    accounts: list[AccountResidual] = []
    slots: list[SlotRange] = []  # the exact ranges, at most 64
    last_event: str | None = None  # the request's last lifecycle event
    site: str | None = None  # the code path that took the row


# -- state, as served by the API --------------------------------------------------------------------------------------


class PoolState(msgspec.Struct, frozen=True):
    """`PoolAccount` with its residual written out; keys as in `kvlens demo --json`."""

    pool: str
    unit: str
    page_size: int
    size_slots: int
    size_bytes: int
    free: int
    evictable: int
    protected: int
    private: int
    session: int
    unaccounted: int


class RowState(msgspec.Struct, frozen=True):
    """One held row. `phase`: chunked, prefill, running, session or orphan."""

    engine: str
    rank: str
    row: int
    generation: int
    request_id: str | None
    trace_id: str | None
    phase: str
    protected_tokens: int
    committed_tokens: int
    allocated_tokens: int
    taken_at: float  # Unix seconds
    site: str | None = None


class HistogramState(msgspec.Struct, frozen=True):
    """Cumulative counts, one per upper bound and one for infinity. `exemplar`: (value, trace id) or None."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float
    exemplar: tuple[float, str] | None = None


class Tallies(msgspec.Struct, frozen=True):
    """Counters since the observer started following this engine; every known key is present from the start."""

    requests: dict[str, int]  # by outcome: stop, length, abort
    aborts: dict[str, int]  # by phase: waiting, chunked, prefill, running
    retractions: int
    prefix_queried_tokens: int
    prefix_hit_tokens: int
    prefilled_tokens: int
    generated_tokens: int
    evicted_tokens: int
    assertions: dict[str, int]  # by check
    findings: dict[str, int]  # by kind, opened ever
    frames: int
    frames_lost: int
    dropped_events: int
    probe_seconds: float  # spent by the engine on being watched
    histograms: dict[str, HistogramState]  # time_to_first_token_seconds, inter_token_seconds, queue_seconds,
    #                                        kv_uncommitted_tokens


class EngineState(msgspec.Struct, frozen=True):
    """One engine now. `up`: alive, stalled (alive, no heartbeat or step for 10 s) or down; figures of a dead engine
    are its last ones."""

    engine: str
    rank: str
    instance: str
    source: str
    role: str
    model: str
    software: str
    version: str
    pid: int
    status: str  # up, stalled or down
    step: int
    mode: str
    updated_at: float  # Unix seconds of the last frame
    lag_seconds: float  # from the frame being written to it being applied
    started_at: float
    running: int
    waiting: int
    live: dict[str, int]  # requests by phase: waiting, chunked, prefill, running
    rows: dict[str, int]  # free, running, chunked, waiting, session, transfer, orphan
    active_rows: int
    allocated_tokens: dict[str, int]  # by owner: request, session
    committed_tokens: dict[str, int]
    allocated_tokens_max: int
    committed_tokens_max: int
    leaked_slots: dict[str, int]  # by pool, open findings
    leaked_rows: dict[str, int]
    pools: list[PoolState]
    tallies: Tallies
    rules: dict[str, str]  # rule -> "ok", or why it cannot run
    tokens_per_second: float  # generated, over the last 5 s


class State(msgspec.Struct, frozen=True):
    """The answer of /api/v1/state, and what exporters are given."""

    at: float
    observer_version: str
    engines: list[EngineState]
    findings_open: list[Finding]


class TimelineEntry(msgspec.Struct, frozen=True):
    """One step in the life of a request: queued, scheduled, chunk, first_token, retracted, abort_requested, finished,
    released, check_failed."""

    at: float
    event: str
    step: int
    row: int | None = None
    generation: int | None = None
    protected_tokens: int | None = None
    committed_tokens: int | None = None
    allocated_tokens: int | None = None
    started_at: float | None = None  # for a span: chunk, released
    detail: dict[str, Any] = {}


class Timeline(msgspec.Struct, frozen=True):
    """The answer of /api/v1/requests/{rid}; given to exporters when `ended_at` is set."""

    engine: str
    rank: str
    request_id: str
    traceparent: str | None
    prompt_tokens: int
    max_new_tokens: int
    output_tokens: int
    cached_tokens: int
    outcome: str | None
    queued_at: float
    ended_at: float | None
    entries: list[TimelineEntry]


class LedgerEvent(msgspec.Struct, frozen=True):
    """One item of the SSE stream /api/v1/events: a finding or check, readable on its own."""

    at: float
    engine: str
    kind: str  # finding_opened, finding_updated, finding_resolved, check_failed, engine_up, engine_down, frames_lost
    data: dict[str, Any]


def trace_id_of(traceparent: str | None) -> str | None:
    """The 32 hex digits of a W3C `traceparent`, or None if it is absent or malformed."""
    parts = (traceparent or "").split("-")
    if (
        len(parts) >= 4
        and len(parts[1]) == 32
        and all(c in "0123456789abcdef" for c in parts[1])
        and set(parts[1]) != {"0"}
    ):
        return parts[1]
    return None
