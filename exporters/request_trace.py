"""The trace of one request, built when it has ended, out of its timeline.

    request                 SERVER, child of the caller's span; checks, first token and abort are its events
    ├─ queue                arrival to first admission
    ├─ prefill              one per chunk
    ├─ decode               last chunk to the release; one per admission
    ├─ release              one per admission
    └─ retracted            from a retraction to the next admission

`kvlens.prefill.tokens` of the prefill spans, less their `kvlens.prefill.recomputed_tokens`, adds up to prompt minus
cached (`gen_ai.usage.input_tokens` less `gen_ai.usage.cache_read.input_tokens`): what was computed again after a
retraction, be it prompt or answer, is told apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import Logger, SeverityNumber
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvlens.observer.schema import Timeline, TimelineEntry

Attributes = dict[str, Any]


@dataclass(slots=True)
class Phase:
    """One child span. Times are Unix seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


def build_trace(tracer: trace.Tracer, logger: Logger | None, timeline: Timeline) -> None:
    """Hand the spans of an ended request to `tracer`, and a log record for each check that failed to `logger`."""
    carrier = {"traceparent": timeline.traceparent} if timeline.traceparent else {}
    parent = TraceContextTextMapPropagator().extract(carrier)
    request = tracer.start_span(
        "request", parent, SpanKind.SERVER, _request_attributes(timeline), start_time=_ns(timeline.queued_at)
    )
    if timeline.outcome == "abort":
        request.set_status(Status(StatusCode.ERROR, _message(timeline)))
    inside = trace.set_span_in_context(request)
    for phase in phases_of(timeline):
        span = tracer.start_span(phase.name, inside, attributes=phase.attributes, start_time=_ns(phase.start))
        span.end(_ns(phase.end))
    for entry in timeline.entries:
        if entry.event in ("check_failed", "first_token", "abort_requested"):
            request.add_event(entry.event, _entry_attributes(entry), _ns(entry.at))
        if entry.event == "check_failed" and logger is not None:
            _log_check(logger, inside, entry)
    request.end(_ns(timeline.ended_at or timeline.queued_at))


def phases_of(timeline: Timeline) -> Iterator[Phase]:
    """The child spans, in the order in which they end."""
    waiting: Phase | None = Phase("queue", timeline.queued_at, timeline.queued_at)
    decode: Phase | None = None
    computed = 0  # positions of the prompt that some chunk has computed
    for entry in timeline.entries:
        if entry.event == "scheduled" and waiting is not None:
            waiting.end = entry.at
            waiting.attributes = _entry_attributes(entry)
            yield waiting
            waiting = None
        elif entry.event == "chunk":
            yield _prefill(entry, computed, timeline.prompt_tokens)
            computed = max(computed, min(entry.detail["end"], timeline.prompt_tokens))
            if entry.detail["last"]:
                decode = Phase("decode", entry.at, entry.at, _record_attributes(entry))
        elif entry.event == "released":
            begun = entry.started_at or entry.at
            if decode is not None:
                decode.end = begun
                decode.attributes |= _record_attributes(entry)
                yield decode
                decode = None
            yield Phase("release", begun, entry.at, _entry_attributes(entry))
        elif entry.event == "retracted":
            waiting = Phase("retracted", entry.at, entry.at, _entry_attributes(entry))
        elif entry.event == "finished":
            # Without a release before: it never got a row, or it leaked. The trace says what happened, and no more.
            for left in (decode, waiting):
                if left is not None:
                    left.end = entry.at
                    yield left
            decode = waiting = None


def _prefill(entry: TimelineEntry, computed: int, prompt_tokens: int) -> Phase:
    start, end = entry.detail["start"], entry.detail["end"]
    new = max(0, min(end, prompt_tokens) - max(start, computed))
    attributes = {
        "kvlens.prefill.start": start, "kvlens.prefill.end": end, "kvlens.prefill.tokens": end - start,
        "kvlens.prefill.recomputed_tokens": end - start - new, **_record_attributes(entry),
    }  # fmt: skip
    return Phase("prefill", entry.started_at or entry.at, entry.at, attributes)


def _request_attributes(timeline: Timeline) -> Attributes:
    with_record = [entry for entry in timeline.entries if entry.row is not None]
    return {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "kvlens",
        "gen_ai.response.id": timeline.request_id,
        "gen_ai.request.max_tokens": timeline.max_new_tokens,
        "gen_ai.usage.input_tokens": timeline.prompt_tokens,
        "gen_ai.usage.output_tokens": timeline.output_tokens,
        "gen_ai.usage.cache_read.input_tokens": timeline.cached_tokens,
        "gen_ai.response.finish_reasons": [timeline.outcome or "unknown"],
        "kvlens.engine": timeline.engine,
        "kvlens.rank": timeline.rank,
        **(_record_attributes(with_record[-1]) if with_record else {}),
    }


def _log_check(logger: Logger, inside: Any, entry: TimelineEntry) -> None:
    logger.emit(
        timestamp=_ns(entry.at),
        context=inside,
        severity_number=SeverityNumber.ERROR,
        severity_text="ERROR",
        body=f"check {entry.detail['check']} failed: {entry.detail['hint']}",
        event_name="kvlens.check_failed",
        attributes=_entry_attributes(entry),
    )


def _record_attributes(entry: TimelineEntry) -> Attributes:
    """The record's fields as far as they are known; -1 is how a check says that there was no record."""
    named = {
        "kv.row": entry.row, "kv.generation": entry.generation, "kv.protected_tokens": entry.protected_tokens,
        "kv.committed_tokens": entry.committed_tokens, "kv.allocated_tokens": entry.allocated_tokens,
    }  # fmt: skip
    return {name: value for name, value in named.items() if value is not None and value >= 0}


def _entry_attributes(entry: TimelineEntry) -> Attributes:
    return {f"kvlens.{name}": value for name, value in entry.detail.items()} | _record_attributes(entry)


def _message(timeline: Timeline) -> str:
    return str(next((entry.detail["message"] for entry in timeline.entries if entry.event == "finished"), ""))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
