"""Every metric, once, as data: the page, OTLP, the dashboard, the alerts and docs/metrics.md are made from it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from kvlens.observer.schema import EngineState, Finding, FindingState, HistogramState, Kind, Severity, State

Sample = tuple[tuple[str, ...], float]
"""Label values behind engine and rank, and the value."""

ENGINE_LABELS = ("engine", "rank")
_BASE_UNITS = {"seconds": "s", "bytes": "By"}


@dataclass(frozen=True, slots=True)
class Metric:
    """One family. Every series also has the labels engine and rank."""

    name: str
    kind: str  # gauge, counter or histogram
    help: str
    answers: str
    """The question of a person that it answers."""
    read: Callable[[EngineState], Iterable[Sample]] = lambda engine: ()
    labels: tuple[str, ...] = ()
    unit: str = ""
    of_the_living: bool = False
    """What a dead engine no longer has: its series end with it."""

    @property
    def label_names(self) -> tuple[str, ...]:
        return (*ENGINE_LABELS, *self.labels)

    @property
    def otel_name(self) -> str:
        """The name in OpenTelemetry, where a base unit is not part of it; Prometheus translates it back to `name`."""
        base = self.name.removesuffix("_total").replace("kvlens_", "kvlens.", 1)
        return base.removesuffix(f"_{self.unit}") if self.unit in _BASE_UNITS else base

    @property
    def otel_unit(self) -> str:
        """In UCUM; what is counted stands in braces, and does not become part of the Prometheus name."""
        return _BASE_UNITS.get(self.unit) or (f"{{{self.unit.removesuffix('s')}}}" if self.unit else "")


def _one(read: Callable[[EngineState], float]) -> Callable[[EngineState], Iterator[Sample]]:
    def samples(engine: EngineState) -> Iterator[Sample]:
        yield (), read(engine)

    return samples


def _by(read: Callable[[EngineState], dict[str, int]]) -> Callable[[EngineState], Iterator[Sample]]:
    def samples(engine: EngineState) -> Iterator[Sample]:
        for key, value in read(engine).items():
            yield (key,), value

    return samples


def _pool_slots(engine: EngineState) -> Iterator[Sample]:
    for pool in engine.pools:
        if pool.unit == "slot":
            for state in ("free", "evictable", "protected", "private", "session", "unaccounted"):
                yield (pool.pool, state), getattr(pool, state)


def _slot_pools(field: str) -> Callable[[EngineState], Iterator[Sample]]:
    def samples(engine: EngineState) -> Iterator[Sample]:
        for pool in engine.pools:
            if pool.unit == "slot":
                yield (pool.pool,), getattr(pool, field)

    return samples


UP = Metric(
    "kvlens_engine_up", "gauge", "1 while the engine is alive, 0 when it is down.",
    "is it alive?", _one(lambda e: int(e.status != "down")),
)  # fmt: skip
LAST_FRAME = Metric(
    "kvlens_engine_last_frame_timestamp_seconds", "gauge", "When the engine last published a frame, in Unix time.",
    "how old is what I see?", _one(lambda e: e.updated_at), unit="seconds",
)  # fmt: skip
STEPS = Metric(
    "kvlens_steps_total", "counter", "Scheduler steps of the engine.", "is it stepping?", _one(lambda e: e.step),
    unit="steps",
)  # fmt: skip
POOL_SLOTS = Metric(
    "kvlens_pool_slots", "gauge", "Slots of a pool by what holds them; the states add up to its size.",
    "where did my KV go?", _pool_slots, ("pool", "state"), "slots", of_the_living=True,
)  # fmt: skip
POOL_SIZE = Metric(
    "kvlens_pool_size_slots", "gauge", "Slots a pool has.", "how big is it?", _slot_pools("size_slots"), ("pool",),
    "slots", of_the_living=True,
)  # fmt: skip
POOL_BYTES = Metric(
    "kvlens_pool_size_bytes", "gauge", "Bytes a pool takes.", "how much memory is that?", _slot_pools("size_bytes"),
    ("pool",), "bytes", of_the_living=True,
)  # fmt: skip
ROWS = Metric(
    "kvlens_rows", "gauge", "Rows of the request-to-token table by state.", "how many requests hold KV?",
    _by(lambda e: e.rows), ("state",), "rows", of_the_living=True,
)  # fmt: skip
ACTIVE_ROWS = Metric(
    "kvlens_active_rows", "gauge", "Rows held by requests in a queue or batch.", "how full is the batch?",
    _one(lambda e: e.active_rows), unit="rows", of_the_living=True,
)  # fmt: skip
ALLOCATED = Metric(
    "kvlens_kv_allocated_tokens", "gauge", "Positions for which holders have slots.", "how much is held?",
    _by(lambda e: e.allocated_tokens), ("owner",), "tokens", of_the_living=True,
)  # fmt: skip
COMMITTED = Metric(
    "kvlens_kv_committed_tokens", "gauge", "Positions whose content holders count on.", "how much of it is used?",
    _by(lambda e: e.committed_tokens), ("owner",), "tokens", of_the_living=True,
)  # fmt: skip
UNCOMMITTED = Metric(
    "kvlens_kv_uncommitted_tokens", "histogram", "Allocated and never committed, once per row at its release.",
    "how much was reserved for nothing?", unit="tokens",
)  # fmt: skip
ASSERTIONS = Metric(
    "kvlens_assertions_total", "counter", "Named checks of the engine that failed.", "which invariant broke?",
    _by(lambda e: e.tallies.assertions), ("check",), "failures",
)  # fmt: skip
FINDINGS_OPEN = Metric(
    "kvlens_findings_open", "gauge", "Findings that are not resolved.", "what is wrong now?",
    labels=("kind", "severity"), unit="findings",
)  # fmt: skip
FINDINGS = Metric(
    "kvlens_findings_total", "counter", "Findings ever opened.", "how often does it happen?",
    labels=("kind", "severity"), unit="findings",
)  # fmt: skip
LEAKED_SLOTS = Metric(
    "kvlens_leaked_slots", "gauge", "Slots that open findings say are lost.", "how much has leaked?",
    _by(lambda e: e.leaked_slots), ("pool",), "slots",
)  # fmt: skip
LEAKED_ROWS = Metric(
    "kvlens_leaked_rows", "gauge", "Rows that open findings say are lost.", "how many rows have leaked?",
    _by(lambda e: e.leaked_rows), ("pool",), "rows",
)  # fmt: skip
LIVE = Metric(
    "kvlens_live_requests", "gauge", "Requests by where they are.", "how many are waiting?",
    _by(lambda e: e.live), ("phase",), "requests", of_the_living=True,
)  # fmt: skip
REQUESTS = Metric(
    "kvlens_requests_total", "counter", "Requests that ended, by how.", "how many were served?",
    _by(lambda e: e.tallies.requests), ("outcome",), "requests",
)  # fmt: skip
TTFT = Metric(
    "kvlens_time_to_first_token_seconds", "histogram", "From a request's arrival to its first token.",
    "how long do users wait?", unit="seconds",
)  # fmt: skip
INTER_TOKEN = Metric(
    "kvlens_inter_token_seconds", "histogram", "Between two tokens of a request.", "how fast do answers flow?",
    unit="seconds",
)  # fmt: skip
QUEUE = Metric(
    "kvlens_queue_seconds", "histogram", "From a request's arrival to its first admission.", "how long is the queue?",
    unit="seconds",
)  # fmt: skip
PREFIX_QUERIED = Metric(
    "kvlens_prefix_cache_queried_tokens_total", "counter", "Tokens the prefix cache was asked for.",
    "does the cache help?", _one(lambda e: e.tallies.prefix_queried_tokens), unit="tokens",
)  # fmt: skip
PREFIX_HIT = Metric(
    "kvlens_prefix_cache_hit_tokens_total", "counter", "Tokens found in the prefix cache.", "does the cache help?",
    _one(lambda e: e.tallies.prefix_hit_tokens), unit="tokens",
)  # fmt: skip
PREFILLED = Metric(
    "kvlens_prefilled_tokens_total", "counter", "Prompt tokens computed.", "what does prefill cost?",
    _one(lambda e: e.tallies.prefilled_tokens), unit="tokens",
)  # fmt: skip
GENERATED = Metric(
    "kvlens_generated_tokens_total", "counter", "Tokens sampled.", "how fast is it?",
    _one(lambda e: e.tallies.generated_tokens), unit="tokens",
)  # fmt: skip
EVICTED = Metric(
    "kvlens_evicted_tokens_total", "counter", "Tokens the prefix cache gave back.", "is the pool under pressure?",
    _one(lambda e: e.tallies.evicted_tokens), unit="tokens",
)  # fmt: skip
RETRACTIONS = Metric(
    "kvlens_retractions_total", "counter", "Running requests sent back to the queue for want of slots.",
    "is too much admitted?", _one(lambda e: e.tallies.retractions), unit="retractions",
)  # fmt: skip
ABORTS = Metric(
    "kvlens_aborts_total", "counter", "Aborts asked for, by where the request was.", "who hangs up, and when?",
    _by(lambda e: e.tallies.aborts), ("phase",), "requests",
)  # fmt: skip
FRAMES = Metric(
    "kvlens_observer_frames_total", "counter", "Frames read from the engine's recorder.", "does the observer see?",
    _one(lambda e: e.tallies.frames), unit="frames",
)  # fmt: skip
FRAMES_LOST = Metric(
    "kvlens_observer_frames_lost_total", "counter", "Frames overwritten before they were read.",
    "does the observer see everything?", _one(lambda e: e.tallies.frames_lost), unit="frames",
)  # fmt: skip
EVENTS_DROPPED = Metric(
    "kvlens_observer_events_dropped_total", "counter", "Events the engine's probe had no room for in a frame.",
    "does the observer see everything?", _one(lambda e: e.tallies.dropped_events), unit="events",
)  # fmt: skip
PROBE = Metric(
    "kvlens_probe_seconds_total", "counter", "Time the engine spent on being watched.", "what does watching cost?",
    _one(lambda e: e.tallies.probe_seconds), unit="seconds",
)  # fmt: skip
LAG = Metric(
    "kvlens_observer_lag_seconds", "gauge", "From a frame being written to it being read.", "is the observer behind?",
    _one(lambda e: e.lag_seconds), unit="seconds", of_the_living=True,
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    UP, LAST_FRAME, STEPS, POOL_SLOTS, POOL_SIZE, POOL_BYTES, ROWS, ACTIVE_ROWS, ALLOCATED, COMMITTED, UNCOMMITTED,
    ASSERTIONS, FINDINGS_OPEN, FINDINGS, LEAKED_SLOTS, LEAKED_ROWS, LIVE, REQUESTS, TTFT, INTER_TOKEN, QUEUE,
    PREFIX_QUERIED, PREFIX_HIT, PREFILLED, GENERATED, EVICTED, RETRACTIONS, ABORTS, FRAMES, FRAMES_LOST,
    EVENTS_DROPPED, PROBE, LAG,
)  # fmt: skip

# Of each kind the severity it has; a failed check has that of the check.
_SEVERITIES_OF = {
    kind: (Severity.CRITICAL, Severity.WARNING) if kind is Kind.CHECK_FAILED else (Severity.CRITICAL,) for kind in Kind
}


def samples(metric: Metric, engine: EngineState, state: State) -> Iterator[Sample]:
    """Label values behind engine and rank, and value, of one engine's series; none for what a dead one has not."""
    if metric is FINDINGS_OPEN:
        yield from _findings_open(engine, state.findings_open)
    elif metric is FINDINGS:
        for kind, severities in _SEVERITIES_OF.items():
            yield (kind.value, severities[0].value), engine.tallies.findings.get(kind.value, 0)
    elif not (metric.of_the_living and engine.status == "down"):
        yield from metric.read(engine)


def histogram(metric: Metric, engine: EngineState) -> HistogramState | None:
    """What the engine's tallies have of a histogram; None when its source does not know it."""
    return engine.tallies.histograms.get(metric.name.removeprefix("kvlens_"))


def _findings_open(engine: EngineState, findings: Iterable[Finding]) -> Iterator[Sample]:
    count = Counter(
        (finding.kind, finding.severity)
        for finding in findings
        if (finding.engine, finding.rank) == (engine.engine, engine.rank) and finding.state is not FindingState.RESOLVED
    )
    for kind, severities in _SEVERITIES_OF.items():
        for severity in severities:
            yield (kind.value, severity.value), count[kind, severity]


def document() -> str:
    """docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Made from `exporters/catalog.py`; `make dashboards` writes it. Every series has the labels `engine` and "
        "`rank`. Base units; no label ever holds a request id. Counters start at 0 with all label values; a gauge "
        "marked *alive* ends with its engine, and what a source does not know is absent.",
        "",
        "Over OTLP the same metrics have dots and UCUM units: `kvlens_pool_size_bytes` is `kvlens.pool_size` in `By`, "
        "and Prometheus translates each back to the name here.",
        "",
        "| metric | type | unit | labels | what it is | answers |",
        "|---|---|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        kind = f"{metric.kind}, alive" if metric.of_the_living else metric.kind
        lines.append(f"| `{metric.name}` | {kind} | {metric.unit} | {labels} | {metric.help} | {metric.answers} |")
    return "\n".join(lines) + "\n"
