"""The catalogue over OTLP: observable instruments, and histograms that are already counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import Exemplar, MeterProvider
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    PeriodicExportingMetricReader,
    ResourceMetrics,
    ScopeMetrics,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import INVALID_SPAN_ID

from kvlens import __version__
from kvlens.exporters import catalog
from kvlens.observer.schema import EngineState, HistogramState, State

SCOPE: Final = "kvlens"
Latest = Callable[[], State | None]


def meter_provider(resource: Resource, latest: Latest) -> MeterProvider:
    """Exports what `latest` gives, at the interval and to the address the `OTEL_*` variables say."""
    exporter = WithHistograms(OTLPMetricExporter(), latest)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)], resource=resource, shutdown_on_exit=False)
    meter = provider.get_meter(SCOPE, __version__)
    for metric in catalog.METRICS:
        callbacks = [_reader(metric, latest)]
        if metric.kind == "counter":
            meter.create_observable_counter(metric.otel_name, callbacks, metric.otel_unit, metric.help)
        elif metric.kind == "gauge":
            meter.create_observable_gauge(metric.otel_name, callbacks, metric.otel_unit, metric.help)
    return provider


def _reader(metric: catalog.Metric, latest: Latest) -> Callable[[CallbackOptions], Iterable[Observation]]:
    def read(options: CallbackOptions) -> Iterator[Observation]:
        state = latest()
        if state is None:
            return
        for engine in state.engines:
            for labels, value in catalog.samples(metric, engine, state):
                names = zip(metric.label_names, (engine.engine, engine.rank, *labels), strict=True)
                yield Observation(value, dict(names))

    return read


def _joined(part: ResourceMetrics, more: list[Metric]) -> ResourceMetrics:
    """`more` into our own scope: of two entries for one scope the encoder would keep only the last."""
    scopes = [
        ScopeMetrics(scope.scope, [*scope.metrics, *more], scope.schema_url) if scope.scope.name == SCOPE else scope
        for scope in part.scope_metrics
    ]
    return ResourceMetrics(part.resource, scopes, part.schema_url)


class WithHistograms(MetricExporter):
    """Adds the catalogue's histograms to each export: the SDK has no instrument for counts made elsewhere.

    Their temporality is cumulative, whatever is preferred for the others.
    """

    def __init__(self, inner: OTLPMetricExporter, latest: Latest) -> None:
        super().__init__(inner._preferred_temporality, inner._preferred_aggregation)
        self._inner = inner
        self._latest = latest
        self._started_ns = time.time_ns()

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: Any) -> MetricExportResult:
        state = self._latest()
        if state is not None and state.engines:
            histograms = self._histograms(state)
            metrics_data = MetricsData([_joined(part, histograms) for part in metrics_data.resource_metrics])
        return self._inner.export(metrics_data, timeout_millis, **kwargs)

    def _histograms(self, state: State) -> list[Metric]:
        metrics = []
        for metric in catalog.METRICS:
            if metric.kind == "histogram":
                points = list(self._points(metric, state))
                data = Histogram(points, AggregationTemporality.CUMULATIVE)
                metrics.append(Metric(metric.otel_name, metric.help, metric.otel_unit, data))
        return metrics

    def _points(self, metric: catalog.Metric, state: State) -> Iterator[HistogramDataPoint]:
        for engine in state.engines:
            histogram = catalog.histogram(metric, engine)
            if histogram is not None:
                yield self._point(histogram, engine, int(state.at * 1e9))

    def _point(self, histogram: HistogramState, engine: EngineState, at_ns: int) -> HistogramDataPoint:
        counts = histogram.counts
        apart = [count - before for before, count in zip((0, *counts), counts, strict=False)]
        exemplars = []
        if histogram.exemplar is not None:
            value, trace_id = histogram.exemplar
            # Which span is not known; without any, the encoder would drop the trace as well.
            exemplars.append(Exemplar({}, value, at_ns, INVALID_SPAN_ID, int(trace_id, 16)))
        return HistogramDataPoint(
            attributes={"engine": engine.engine, "rank": engine.rank},
            start_time_unix_nano=self._started_ns,
            time_unix_nano=at_ns,
            count=counts[-1],
            sum=histogram.sum,
            bucket_counts=apart,
            explicit_bounds=histogram.bounds,
            min=None,  # type: ignore[arg-type]  # not kept; absent on the wire
            max=None,  # type: ignore[arg-type]
            exemplars=exemplars,
        )

    def force_flush(self, timeout_millis: float = 10_000) -> bool:
        return self._inner.force_flush(timeout_millis)

    def shutdown(self, timeout_millis: float = 30_000, **kwargs: Any) -> None:
        self._inner.shutdown(timeout_millis, **kwargs)
