"""Panels, and the queries they ask. A query is made of catalogue entries, so that panel and metric cannot drift."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import StackingConfig, VizLegendOptions, VizTooltipOptions
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import Threshold, ThresholdsMode

from kvlens.exporters.catalog import Metric

RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression with its legend."""

    expr: str
    legend: str


def series(metric: Metric, **labels: str) -> str:
    """Selector of a metric's series, of the engines chosen on the dashboard."""
    unknown = set(labels) - set(metric.label_names)
    if unknown:
        raise ValueError(f"{metric.name} has no label {', '.join(sorted(unknown))}")
    chosen = "".join(f', {name}="{value}"' for name, value in labels.items())
    return f'{metric.name}{{engine=~"$engine"{chosen}}}'


def by(metric: Metric, *labels: str, **selected: str) -> str:
    """The metric summed over everything but `labels`."""
    return f"sum by ({', '.join(labels)}) ({series(metric, **selected)})"


def rate(metric: Metric, *labels: str) -> str:
    return f"sum by ({', '.join(labels)}) (rate({series(metric)}{RATE}))"


def quantile(share: float, metric: Metric) -> str:
    """A quantile of a histogram over the chosen engines."""
    buckets = series(metric).replace(metric.name, f"{metric.name}_bucket", 1)
    return f"histogram_quantile({share}, sum by (le) (rate({buckets}{RATE})))"


def quantiles(metric: Metric) -> list[Query]:
    return [Query(quantile(share, metric), f"p{round(share * 100)}") for share in (0.5, 0.9, 0.99)]


def lines(title: str, why: str, unit: str, queries: list[Query], *, stacked: bool = False) -> timeseries.Panel:
    """A graph. `why` is the question it answers."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(why)
        .unit(unit)
        .min(0)
        .line_width(1)
        .fill_opacity(70 if stacked else 8)
        .legend(VizLegendOptions().display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM))
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
    for place, query in enumerate(queries):
        panel.with_target(_target(query, place))
    return panel


def figure(title: str, why: str, unit: str, query: Query) -> stat.Panel:
    """One number per series; green at zero, red above."""
    steps = [Threshold(value=None, color="green"), Threshold(value=1.0, color="red")]
    return (
        stat.Panel()
        .title(title)
        .description(why)
        .unit(unit)
        .color_mode(BigValueColorMode.BACKGROUND)
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(query))
    )


def _target(query: Query, place: int = 0) -> prometheus.Dataquery:
    return prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id("ABCDEF"[place])
