"""OpenTelemetry: metrics from the latest snapshot, one trace per ended request, a log record per check and finding.

Switched on by the standard variables: nothing is sent unless an `OTEL_EXPORTER_OTLP_*ENDPOINT` is set. The engine
carries no SDK; everything is made here, out of what the observer knows.
"""

from __future__ import annotations

import os
import re
import threading
import time
import uuid
from typing import Final

from opentelemetry._logs import SeverityNumber
from opentelemetry.exporter.otlp.proto.http._log_exporter import OTLPLogExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from kvlens import KvlensError, __version__
from kvlens.exporters.otlp_metrics import meter_provider
from kvlens.exporters.request_trace import build_trace
from kvlens.observer.schema import LedgerEvent, State, Timeline

CLOSE_SECONDS: Final = 5.0
_NAMED: Final = re.compile(r"(?:^|,)\s*([^=,\s]+)\s*=")
_SIGNALS = ("TRACES", "METRICS", "LOGS")


class OtlpError(KvlensError):
    """The `OTEL_*` variables ask for what is not there; the message says what to set."""


def endpoint_of(signal: str) -> str | None:
    """Where TRACES, METRICS or LOGS go by the environment, or None: not asked for, or switched off."""
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporters = [name.strip() for name in os.environ.get(f"OTEL_{signal}_EXPORTER", "").split(",") if name.strip()]
    if exporters and "otlp" not in exporters:
        return None
    return os.environ.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT") or os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")


def _needs_http(signal: str) -> None:
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        protocol = os.environ.get(variable)
        if protocol:
            if protocol != "http/protobuf":
                raise OtlpError(
                    f"{variable}={protocol}, and kvlens speaks http/protobuf only: set {variable}=http/protobuf and "
                    "the collector's HTTP port, usually 4318"
                )
            return


def _resource() -> Resource:
    """`OTEL_SERVICE_NAME` and `OTEL_RESOURCE_ATTRIBUTES` go before what is set here."""
    own = {SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: str(uuid.uuid4())}
    given = Resource.create().attributes
    if str(given[SERVICE_NAME]).startswith("unknown_service"):  # what the SDK says when nobody gave a name
        own[SERVICE_NAME] = "kvlens"
    named = _NAMED.findall(os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    return Resource.create({key: value for key, value in own.items() if key not in named})


class OtlpSink:
    """A `Sink` that never blocks: everything goes through the SDK's own queues and threads."""

    def __init__(self, wanted: set[str]) -> None:
        """wanted: of TRACES, METRICS and LOGS. Addresses, intervals and the like are read from `OTEL_*`."""
        resource = _resource()
        self._state: State | None = None
        self._tracers = self._loggers = self._meters = None
        if "TRACES" in wanted:
            self._tracers = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        if "LOGS" in wanted:
            self._loggers = LoggerProvider(resource=resource, shutdown_on_exit=False)
            self._loggers.add_log_record_processor(BatchLogRecordProcessor(OTLPLogExporter()))
        if "METRICS" in wanted:
            self._meters = meter_provider(resource, lambda: self._state)
        self._tracer = self._tracers.get_tracer("kvlens", __version__) if self._tracers is not None else None
        self._logger = self._loggers.get_logger("kvlens", __version__) if self._loggers is not None else None

    @classmethod
    def from_environment(cls) -> OtlpSink | None:
        """What the `OTEL_*` variables ask for; None when they ask for nothing. Raises OtlpError."""
        wanted = {signal for signal in _SIGNALS if endpoint_of(signal)}
        for signal in sorted(wanted):
            _needs_http(signal)
        return cls(wanted) if wanted else None

    def on_state(self, state: State) -> None:
        self._state = state

    def on_request_ended(self, timeline: Timeline) -> None:
        if self._tracer is not None:
            build_trace(self._tracer, self._logger, timeline)

    def on_event(self, event: LedgerEvent) -> None:
        """Findings, and checks of no request, become log records; a request's checks are told when its trace is."""
        if self._logger is None:
            return
        if event.kind.startswith("finding_"):
            self._log(event, event.data["summary"], error=event.kind == "finding_opened", keys=_FINDING_KEYS)
        elif event.kind == "check_failed" and (self._tracer is None or not event.data["request"]):
            text = f"check {event.data['check']} failed: {event.data['hint']}"
            self._log(event, text, error=True, keys=_CHECK_KEYS)

    def _log(self, event: LedgerEvent, text: str, *, error: bool, keys: dict[str, str]) -> None:
        assert self._logger is not None
        known = {name: event.data[key] for key, name in keys.items() if event.data.get(key) not in (None, -1)}
        self._logger.emit(
            timestamp=int(event.at * 1e9),
            severity_number=SeverityNumber.ERROR if error else SeverityNumber.INFO,
            severity_text="ERROR" if error else "INFO",
            body=text,
            event_name=f"kvlens.{event.kind}",
            attributes={"kvlens.engine": event.engine, **known},
        )

    def close(self) -> None:
        """Send what is left, for at most five seconds in all: a dead collector must not keep the observer."""
        ends = [
            threading.Thread(target=_shut_down, args=(provider,), name="kvlens-otlp-close", daemon=True)
            for provider in (self._tracers, self._loggers, self._meters)
            if provider is not None
        ]
        for thread in ends:
            thread.start()
        until = time.monotonic() + CLOSE_SECONDS
        for thread in ends:
            thread.join(max(0.0, until - time.monotonic()))


_FINDING_KEYS = {
    "id": "kvlens.finding.id", "kind": "kvlens.finding.kind", "severity": "kvlens.finding.severity",
    "pool": "kvlens.pool", "leaked_slots": "kvlens.leaked_slots", "leaked_rows": "kvlens.leaked_rows",
    "request_id": "gen_ai.response.id", "row": "kv.row", "generation": "kv.generation", "runbook": "kvlens.runbook",
}  # fmt: skip
_CHECK_KEYS = {
    "check": "kvlens.check", "hint": "kvlens.hint", "row": "kv.row", "generation": "kv.generation",
    "protected_tokens": "kv.protected_tokens", "committed_tokens": "kv.committed_tokens",
    "allocated_tokens": "kv.allocated_tokens",
}  # fmt: skip


def _shut_down(provider: TracerProvider | LoggerProvider | MeterProvider) -> None:
    """Shutting down sends what is queued; the SDK's own limit of 30 s does not matter, the thread is left behind."""
    provider.shutdown()
