"""Panels, and the queries they ask. A query is made of catalogue entries, so that panel and metric cannot drift."""

from __future__ import annotations

from dataclasses import dataclass

from grafana_foundation_sdk.builders import prometheus, stat, timeseries
from grafana_foundation_sdk.builders.common import (
    ReduceDataOptions,
    StackingConfig,
    VizLegendOptions,
    VizTooltipOptions,
)
from grafana_foundation_sdk.builders.dashboard import ThresholdsConfig
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
)
from grafana_foundation_sdk.models.dashboard import (
    DataSourceRef,
    DynamicConfigValue,
    Threshold,
    ThresholdsMode,
)

from kvlens.exporters.catalog import Metric

RATE = "[$__rate_interval]"
SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")

# The same state has the same colour everywhere, as on the observer's own page; told apart also by the colour-blind.
COLOURS = {
    "free": "#d9dbde", "evictable": "#59b8c9", "protected": "#4a74c9", "private": "#4fa35a", "session": "#9b66c4",
    "unaccounted": "#d8342f", "running": "#4fa35a", "chunked": "#e0a030", "prefill": "#4a74c9", "waiting": "#9aa0a6",
    "transfer": "#59b8c9", "orphan": "#d8342f",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression with its legend."""

    expr: str
    legend: str
    exemplars: bool = False
    """Show the requests behind it as points that lead to their traces."""


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
    return [Query(quantile(share, metric), f"p{round(share * 100)}", exemplars=True) for share in (0.5, 0.9, 0.99)]


def lines(
    title: str, description: str, unit: str, queries: list[Query], *, stacked: bool = False, signed: bool = False
) -> timeseries.Panel:
    """A graph. description: what is normal, what is bad, what to do. signed: it may go below zero."""
    panel = (
        timeseries.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("no engine chosen, or none observed yet")
        .line_width(1)
        .fill_opacity(70 if stacked else 8)
        .legend(
            VizLegendOptions().show_legend(True).display_mode(LegendDisplayMode.LIST).placement(LegendPlacement.BOTTOM)
        )
        .tooltip(VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING))
    )
    if not signed:
        panel.min(0)
    if stacked:
        panel.stacking(StackingConfig().mode(StackingMode.NORMAL))
        for state, colour in COLOURS.items():
            fixed = DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})
            panel.override_by_regexp(f"/(^| ){state}$/", [fixed])
    for place, query in enumerate(queries):
        panel.with_target(_target(query, place))
    return panel


def figure(title: str, description: str, unit: str, query: Query) -> stat.Panel:
    """One number per series; green at zero, red above."""
    steps = [Threshold(value=None, color="green"), Threshold(value=1.0, color="red")]
    return (
        stat.Panel()
        .title(title)
        .description(description)
        .datasource(SOURCE)
        .unit(unit)
        .no_value("no engine")
        .color_mode(BigValueColorMode.BACKGROUND)
        .reduce_options(ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))
        .with_target(_target(query))
    )


def _target(query: Query, place: int = 0) -> prometheus.Dataquery:
    target = prometheus.Dataquery().datasource(SOURCE).expr(query.expr).legend_format(query.legend)
    if query.exemplars:
        target.exemplar(True)
    return target.ref_id("ABCDEF"[place])
