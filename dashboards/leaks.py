"""The dashboard: who holds the KV, and does it leak?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.dashboard import Dashboard, DatasourceVariable, QueryVariable, Row
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, DataSourceRef, VariableRefresh

from kvlens.dashboards.panels import Query, by, figure, lines, quantiles, rate
from kvlens.exporters import catalog as m

Placed = tuple[stat.Panel | timeseries.Panel, int, int]
"""A panel, its width of 24, and its height."""

UID = "kvlens-leaks"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")


def dashboard() -> Dashboard:
    board = (
        Dashboard("kvlens: who holds the KV")
        .uid(UID)
        .tags(["kvlens"])
        .description("Every slot of the KV pools by what holds it; what has leaked; how requests fare.")
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            QueryVariable("engine")
            .label("Engine")
            .datasource(_SOURCE)
            .query(f"label_values({m.UP.name}, engine)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, panels in _sections():
        board.with_row(Row(title))
        for panel, span, height in panels:
            board.with_panel(panel.datasource(_SOURCE).span(span).height(height))
    return board


def _sections() -> list[tuple[str, list[Placed]]]:
    return [
        ("Is KV leaking?", _leaking()),
        ("Who holds it?", _holding()),
        ("How do requests fare?", _faring()),
        ("Does the observer see?", _seeing()),
    ]


def _leaking() -> list[Placed]:
    unaccounted = by(m.POOL_SLOTS, "engine", "pool", state="unaccounted")
    return [
        (_stat("Open findings", m.FINDINGS_OPEN, "engine"), 6, 5),
        (_stat("Leaked slots", m.LEAKED_SLOTS, "engine", "pool"), 6, 5),
        (_stat("Leaked rows", m.LEAKED_ROWS, "engine"), 6, 5),
        (_stat("Frames lost", m.FRAMES_LOST, "engine"), 6, 5),
        (
            lines(
                "Unaccounted slots", "positive: missing; negative: returned twice", "short",
                [Query(unaccounted, "{{engine}} {{pool}}")],
            ),
            12, 7,
        ),
        (_sums("Failed checks", m.ASSERTIONS, "check"), 12, 7),
    ]  # fmt: skip


def _holding() -> list[Placed]:
    tokens = [
        Query(by(m.ALLOCATED, "owner"), "allocated {{owner}}"),
        Query(by(m.COMMITTED, "owner"), "committed {{owner}}"),
    ]
    return [
        (_sums("Pool slots", m.POOL_SLOTS, "pool", "state", stacked=True), 12, 9),
        (_sums("Rows", m.ROWS, "state", stacked=True), 12, 9),
        (lines("Tokens", "how much of what is held is used?", "short", tokens), 8, 7),
        (_sums("Pool size", m.POOL_BYTES, "engine", "pool", unit="bytes"), 8, 7),
        (_sums("Active rows", m.ACTIVE_ROWS, "engine"), 8, 7),
    ]


def _faring() -> list[Placed]:
    hits = f"{rate(m.PREFIX_HIT, 'engine')} / {rate(m.PREFIX_QUERIED, 'engine')}"
    sent_back = [
        Query(by(m.RETRACTIONS, "engine"), "{{engine}} retracted"),
        Query(by(m.ABORTS, "phase"), "aborted {{phase}}"),
    ]
    return [
        (_sums("Live requests", m.LIVE, "phase", stacked=True), 8, 7),
        (_rates("Requests that ended", m.REQUESTS, "outcome", unit="reqps"), 8, 7),
        (_rates("Generated tokens", m.GENERATED, "engine"), 8, 7),
        (lines("Time to first token", m.TTFT.answers, "s", quantiles(m.TTFT)), 8, 7),
        (lines("Between tokens", m.INTER_TOKEN.answers, "s", quantiles(m.INTER_TOKEN)), 8, 7),
        (lines("Queue", m.QUEUE.answers, "s", quantiles(m.QUEUE)), 8, 7),
        (lines("Prefix cache hits", m.PREFIX_HIT.answers, "percentunit", [Query(hits, "{{engine}}")]), 8, 7),
        (_rates("Evicted tokens", m.EVICTED, "engine"), 8, 7),
        (lines("Retractions and aborts", "is too much admitted; who hangs up?", "short", sent_back), 8, 7),
    ]


def _seeing() -> list[Placed]:
    return [
        (_sums("Engine up", m.UP, "engine"), 8, 6),
        (_sums("Lag", m.LAG, "engine", unit="s"), 8, 6),
        (_rates("Frames", m.FRAMES, "engine"), 8, 6),
    ]


def _legend(labels: tuple[str, ...]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def _stat(title: str, metric: m.Metric, *labels: str) -> stat.Panel:
    return figure(title, metric.answers, "short", Query(by(metric, *labels), _legend(labels)))


def _sums(title: str, metric: m.Metric, *labels: str, unit: str = "short", stacked: bool = False) -> timeseries.Panel:
    return lines(title, metric.answers, unit, [Query(by(metric, *labels), _legend(labels))], stacked=stacked)


def _rates(title: str, metric: m.Metric, *labels: str, unit: str = "short") -> timeseries.Panel:
    return lines(title, metric.answers, unit, [Query(rate(metric, *labels), _legend(labels))])
