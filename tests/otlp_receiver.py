"""An OTLP/HTTP collector in this process: keeps what it is sent, for tests to look at."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue

_MESSAGES = {
    "/v1/traces": ExportTraceServiceRequest, "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}  # fmt: skip


def attributes(pairs: Any) -> dict[str, Any]:
    """A repeated KeyValue as a dictionary."""
    return {pair.key: _value(pair.value) for pair in pairs}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind) if kind else None


class OtlpReceiver:
    """Listens on a free port of loopback while it is entered."""

    def __init__(self) -> None:
        self.requests: dict[str, list[Any]] = {path: [] for path in _MESSAGES}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self.requests))
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> OtlpReceiver:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def endpoint(self) -> str:
        """For OTEL_EXPORTER_OTLP_ENDPOINT."""
        return f"http://127.0.0.1:{self._server.server_port}"

    # -- what came --------------------------------------------------------------------------------------------------

    def spans(self) -> list[Any]:
        """Span messages, in order of arrival."""
        return [
            span
            for request in list(self.requests["/v1/traces"])
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def traces(self) -> dict[str, list[Any]]:
        """Spans by the hex digits of their trace id."""
        traces: dict[str, list[Any]] = {}
        for span in self.spans():
            traces.setdefault(span.trace_id.hex(), []).append(span)
        return traces

    def logs(self) -> list[Any]:
        """LogRecord messages."""
        return [
            record
            for request in list(self.requests["/v1/logs"])
            for resource in request.resource_logs
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def metrics(self) -> dict[str, Any]:
        """The latest Metric message by name."""
        return {
            metric.name: metric
            for request in list(self.requests["/v1/metrics"])
            for resource in request.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def resources(self) -> list[dict[str, Any]]:
        """Attributes of every resource that sent something."""
        found = []
        for path, field in (
            ("/v1/traces", "resource_spans"),
            ("/v1/metrics", "resource_metrics"),
            ("/v1/logs", "resource_logs"),
        ):
            for request in list(self.requests[path]):
                found += [attributes(part.resource.attributes) for part in getattr(request, field)]
        return found

    def wait_for(self, holds: Callable[[], bool], seconds: float = 30.0) -> bool:
        """Until `holds()`, or the time is up; what it said last."""
        until = time.monotonic() + seconds
        while not holds() and time.monotonic() < until:
            time.sleep(0.05)
        return holds()


def _handler_for(kept: dict[str, list[Any]]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            message = _MESSAGES.get(self.path)
            if message is not None:
                kept[self.path].append(message.FromString(body))
            self.send_response(200 if message is not None else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    return Handler
