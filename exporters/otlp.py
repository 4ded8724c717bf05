"""OpenTelemetry: metrics from the latest snapshot, one trace per ended request, one log record per failed check.

Switched on by the standard variables: nothing is sent unless an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set. Spans are built
after the fact, with explicit times, from a request's timeline; the engine carries no SDK.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from opentelemetry import trace
from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvlens import __version__
from kvlens.exporters import catalog
from kvlens.observer.schema import LedgerEvent, State, Timeline, TimelineEntry

FLUSH_MS = 5000
_SIGNALS = ("TRACES", "METRICS", "LOGS")


def endpoint_of(signal: str) -> str | None:
    """Where a signal goes by the environment, or None: not asked for, or switched off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    if os.environ.get(f"OTEL_{signal}_EXPORTER", "otlp") != "otlp":
        return None
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")


class OtlpSink:
    """A `Sink` that never blocks: everything goes through the SDK's own queues and threads."""

    def __init__(
        self, tracers: TracerProvider | None, meters: MeterProvider | None, loggers: LoggerProvider | None
    ) -> None:
        self._tracers, self._meters, self._loggers = tracers, meters, loggers
        self._tracer = tracers.get_tracer("kvlens", __version__) if tracers is not None else None
        self._logger = loggers.get_logger("kvlens", __version__) if loggers is not None else None
        self._state: State | None = None
        if meters is not None:
            self._observe(meters)

    @classmethod
    def from_environment(cls) -> OtlpSink | None:
        """What the `OTEL_*` variables ask for; None when they ask for nothing."""
        wanted = {signal for signal in _SIGNALS if endpoint_of(signal)}
        if not wanted:
            return None
        name = os.environ.get("OTEL_SERVICE_NAME", "kvlens")
        resource = Resource.create({SERVICE_NAME: name, SERVICE_VERSION: __version__})
        tracers = meters = loggers = None
        if "TRACES" in wanted:
            tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        if "METRICS" in wanted:
            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
            meters = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        if "LOGS" in wanted:
            loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
            loggers.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        return cls(tracers, meters, loggers)

    # -- the sink ---------------------------------------------------------------------------------------------------

    def on_state(self, state: State) -> None:
        self._state = state

    def on_request_ended(self, timeline: Timeline) -> None:
        if self._tracer is not None:
            RequestTrace(self._tracer, self._logger, timeline).build()

    def on_event(self, event: LedgerEvent) -> None:
        """Findings become log records; checks of a request are told beside its span, when it ends."""
        if self._logger is None or not event.kind.startswith("finding_"):
            return
        data = event.data
        self._logger.emit(
            timestamp=int(event.at * 1e9),
            severity_number=SeverityNumber.ERROR if event.kind == "finding_opened" else SeverityNumber.INFO,
            body=data["summary"],
            event_name=f"kvlens.{event.kind}",
            attributes={
                "kvlens.engine": event.engine, "kvlens.finding.id": data["id"], "kvlens.finding.kind": data["kind"],
                "kvlens.pool": data["pool"], "kvlens.leaked_slots": data["leaked_slots"],
            },
        )  # fmt: skip

    def close(self) -> None:
        """Send what is left, for at most five seconds."""
        for provider in (self._tracers, self._meters, self._loggers):
            if provider is not None:
                provider.force_flush(FLUSH_MS)
                provider.shutdown()

    # -- metrics ----------------------------------------------------------------------------------------------------

    def _observe(self, meters: MeterProvider) -> None:
        meter = meters.get_meter("kvlens", __version__)
        for metric in catalog.METRICS:
            name = metric.name.removesuffix("_total").replace("kvlens_", "kvlens.", 1)
            if metric.kind == "counter":
                meter.create_observable_counter(name, [self._reader(metric)], metric.unit, metric.help)
            elif metric.kind == "gauge":
                meter.create_observable_gauge(name, [self._reader(metric)], metric.unit, metric.help)
            else:  # the snapshot has sums and counts of a histogram; its buckets are on the Prometheus page
                meter.create_observable_counter(
                    f"{name}.sum", [self._histogram(metric, "sum")], metric.unit, metric.help
                )
                meter.create_observable_counter(f"{name}.count", [self._histogram(metric, "count")], "1", metric.help)

    def _reader(self, metric: catalog.Metric) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            state = self._state
            for engine in state.engines if state is not None else ():
                for labels, value in catalog.samples(metric, engine, state):  # type: ignore[arg-type]
                    names = zip(metric.label_names, (engine.engine, engine.rank, *labels), strict=True)
                    yield Observation(value, dict(names))

        return read

    def _histogram(self, metric: catalog.Metric, part: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def read(options: CallbackOptions) -> Iterator[Observation]:
            state = self._state
            for engine in state.engines if state is not None else ():
                histogram = engine.tallies.histograms[metric.name.removeprefix("kvlens_")]
                value = histogram.sum if part == "sum" else histogram.counts[-1]
                yield Observation(value, {"engine": engine.engine, "rank": engine.rank})

        return read


class RequestTrace:
    """The spans of one request: request, queue, prefill per chunk, decode, retracted, release."""

    def __init__(self, tracer: trace.Tracer, logger: Any, timeline: Timeline) -> None:
        self._tracer = tracer
        self._logger = logger
        self._timeline = timeline

    def build(self) -> None:
        timeline = self._timeline
        carrier = {"traceparent": timeline.traceparent} if timeline.traceparent else {}
        parent = TraceContextTextMapPropagator().extract(carrier)
        request = self._tracer.start_span(
            "request", parent, SpanKind.SERVER, self._request_attributes(), start_time=_ns(timeline.queued_at)
        )
        if timeline.outcome == "abort":
            request.set_status(Status(StatusCode.ERROR, _message(timeline)))
        inside = trace.set_span_in_context(request)
        for name, start, end, attributes in self._phases():
            span = self._tracer.start_span(name, inside, attributes=attributes, start_time=_ns(start))
            span.end(_ns(end))
        for entry in timeline.entries:
            if entry.event in ("check_failed", "first_token", "abort_requested"):
                request.add_event(entry.event, _entry_attributes(entry), _ns(entry.at))
            if entry.event == "check_failed":
                self._log_check(request, entry)
        request.end(_ns(timeline.ended_at or timeline.queued_at))

    def _request_attributes(self) -> dict[str, Any]:
        timeline = self._timeline
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
            **self._held(),
        }

    def _held(self) -> dict[str, Any]:
        """The record as it stood last."""
        with_record = [entry for entry in self._timeline.entries if entry.row is not None]
        return _record_attributes(with_record[-1]) if with_record else {}

    def _phases(self) -> Iterator[tuple[str, float, float, dict[str, Any]]]:
        """Name, begin and end of each phase, in order."""
        waits_from: float | None = self._timeline.queued_at
        decodes_from: float | None = None
        wait = "queue"
        for entry in self._timeline.entries:
            if entry.event == "scheduled" and waits_from is not None:
                yield wait, waits_from, entry.at, _entry_attributes(entry)
                waits_from = None
            elif entry.event == "chunk":
                yield "prefill", entry.started_at or entry.at, entry.at, self._prefill_attributes(entry)
                decodes_from = entry.at if entry.detail["last"] else None
            elif entry.event in ("retracted", "finished"):
                if decodes_from is not None:
                    yield "decode", decodes_from, entry.at, {}
                if waits_from is not None and entry.event == "finished":
                    yield wait, waits_from, entry.at, {}
                decodes_from, waits_from, wait = None, entry.at, "retracted"
            elif entry.event == "released":
                yield "release", entry.started_at or entry.at, entry.at, _entry_attributes(entry)

    def _prefill_attributes(self, entry: TimelineEntry) -> dict[str, Any]:
        """Recomputed positions are told apart: prompt minus cached is what a request costs, the rest a retraction."""
        start, end = entry.detail["start"], entry.detail["end"]
        again = any(earlier.event == "retracted" and earlier.at <= entry.at for earlier in self._timeline.entries)
        tokens = {"kvlens.prefill.start": start, "kvlens.prefill.end": end, "kvlens.prefill.tokens": end - start}
        return {**tokens, "kvlens.prefill.recomputed": again, **_record_attributes(entry)}

    def _log_check(self, request: Span, entry: TimelineEntry) -> None:
        if self._logger is None:
            return
        self._logger.emit(
            timestamp=_ns(entry.at),
            context=trace.set_span_in_context(request),
            severity_number=SeverityNumber.ERROR,
            body=f"check {entry.detail['check']} failed: {entry.detail['hint']}",
            event_name="kvlens.check_failed",
            attributes=_entry_attributes(entry),
        )


def _record_attributes(entry: TimelineEntry) -> dict[str, Any]:
    named = {
        "kv.row": entry.row, "kv.generation": entry.generation, "kv.protected_tokens": entry.protected_tokens,
        "kv.committed_tokens": entry.committed_tokens, "kv.allocated_tokens": entry.allocated_tokens,
    }  # fmt: skip
    return {name: value for name, value in named.items() if value is not None}


def _entry_attributes(entry: TimelineEntry) -> dict[str, Any]:
    return {f"kvlens.{name}": value for name, value in entry.detail.items()} | _record_attributes(entry)


def _message(timeline: Timeline) -> str:
    return str(next((entry.detail["message"] for entry in timeline.entries if entry.event == "finished"), ""))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
