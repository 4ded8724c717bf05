"""`/metrics`: the latest snapshot through a collector of prometheus_client."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from kvlens.exporters import catalog
from kvlens.exporters.exposition import PageWriter
from kvlens.observer.schema import HistogramState, State

OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"
TEXT = "text/plain; version=0.0.4; charset=utf-8"


class SnapshotCollector(Collector):
    """Yields the families of one immutable snapshot: one scrape never mixes two moments."""

    def __init__(self) -> None:
        self.state: State | None = None

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        if self.state is not None:
            for metric in catalog.METRICS:
                yield _family(metric, self.state)


class MetricsPage:
    """Renders snapshots in a registry of its own: nothing that other code registers appears on the page."""

    def __init__(self) -> None:
        self._collector = SnapshotCollector()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self._collector)
        self._writer = PageWriter()

    def render(self, state: State, accept: str) -> tuple[bytes, str]:
        """The page, and its content type: OpenMetrics with exemplars where `accept` asks for it, else text."""
        self._collector.state = state
        _, content_type = choose_encoder(accept)
        if content_type.startswith("application/openmetrics-text"):
            # A newer version that was asked for is answered with the one that is written here.
            return self._writer.openmetrics(self.registry.collect()), OPENMETRICS
        return self._writer.text(self.registry.collect()), TEXT


def _family(metric: catalog.Metric, state: State) -> Metric:
    if metric.kind == "histogram":
        return _histogram(metric, state)
    family: GaugeMetricFamily | CounterMetricFamily
    if metric.kind == "counter":
        family = CounterMetricFamily(metric.name, metric.help, labels=metric.label_names)
    else:
        family = GaugeMetricFamily(metric.name, metric.help, labels=metric.label_names)
    for engine in state.engines:
        for labels, value in catalog.samples(metric, engine, state):
            family.add_metric((engine.engine, engine.rank, *labels), value)
    return family


def _histogram(metric: catalog.Metric, state: State) -> HistogramMetricFamily:
    family = HistogramMetricFamily(metric.name, metric.help, labels=metric.label_names)
    for engine in state.engines:
        histogram = catalog.histogram(metric, engine)
        if histogram is not None:
            family.add_metric((engine.engine, engine.rank), list(_buckets(histogram)), histogram.sum)
    return family


def _buckets(histogram: HistogramState) -> Iterator[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Cumulative buckets; the exemplar stands in the one its value falls into."""
    exemplar = histogram.exemplar
    for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
        name = "+Inf" if bound == math.inf else str(bound)
        if exemplar is not None and exemplar[0] <= bound:
            yield name, count, Exemplar({"trace_id": exemplar[1]}, exemplar[0])
            exemplar = None
        else:
            yield name, count
