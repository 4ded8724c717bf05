"""The dashboard: who holds the KV, and does it leak?"""

from __future__ import annotations

from grafana_foundation_sdk.builders import stat, timeseries
from grafana_foundation_sdk.builders.dashboard import (
    AnnotationQuery,
    Dashboard,
    DatasourceVariable,
    QueryVariable,
    Row,
)
from grafana_foundation_sdk.models.dashboard import DashboardCursorSync, VariableRefresh

from kvlens.dashboards.panels import SOURCE, Query, by, figure, lines, quantiles, rate
from kvlens.exporters import catalog as m

Placed = tuple[stat.Panel | timeseries.Panel, int, int]
"""A panel, its width of 24, and its height."""

UID = "kvlens-leaks"


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
        .with_variable(_engines())
        .annotation(
            AnnotationQuery()
            .name("Alerts")
            .datasource(SOURCE)
            .enable(True)
            .icon_color("red")
            .expr('ALERTS{alertname=~"Kvlens.*", alertstate="firing"}')
        )
    )
    number = 0
    for title, panels in _sections():
        number += 1
        board.with_row(Row(title).id(number))
        for panel, span, height in panels:
            number += 1  # panels get no number by themselves, and links need one that stays
            board.with_panel(panel.id(number).span(span).height(height))
    return board


def _engines() -> QueryVariable:
    return (
        QueryVariable("engine")
        .label("Engine")
        .datasource(SOURCE)
        .query(f"label_values({m.UP.name}, engine)")
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
    )


def _sections() -> list[tuple[str, list[Placed]]]:
    return [
        ("Is KV leaking?", _leaking()),
        ("Who holds it?", _holding()),
        ("How do requests fare?", _faring()),
        ("Does the observer see?", _seeing()),
    ]


def _placed(span: int, height: int, *panels: stat.Panel | timeseries.Panel) -> list[Placed]:
    return [(panel, span, height) for panel in panels]


def _leaking() -> list[Placed]:
    unaccounted = lines(
        "Unaccounted slots",
        "0 is health. Positive: slots are missing, KV has leaked. Negative: slots were returned twice, so two requests "
        "may write the same KV.",
        "short",
        [Query(by(m.POOL_SLOTS, "engine", "pool", state="unaccounted"), "{{engine}} {{pool}}")],
        signed=True,
    )
    return [
        *_placed(
            6,
            5,
            _stat("Open findings", m.FINDINGS_OPEN, "0 is health. `kvlens findings list` names them.", "engine"),
            _stat("Leaked slots", m.LEAKED_SLOTS, "0 is health; else the pool is smaller for good.", "engine", "pool"),
            _stat("Leaked rows", m.LEAKED_ROWS, "0 is health; each was a request nobody released.", "engine"),
            _stat("Frames lost", m.FRAMES_LOST, "0 is health; above it, counters have a gap.", "engine"),
        ),
        *_placed(
            8,
            7,
            unaccounted,
            _sums("Open findings by kind", m.FINDINGS_OPEN, "All at 0 is health. Each kind has a runbook.", "kind"),
            _sums("Failed checks", m.ASSERTIONS, "Flat is health. A step up: a code path broke an invariant.", "check"),
        ),
    ]


def _holding() -> list[Placed]:
    pool = "The states add up to the pool's size. Red has leaked. All private and nothing free: too much is admitted."
    rows = "Red is a row that nobody holds. None free: raise --max-running."
    tokens = lines(
        "Tokens",
        "Allocated is what holders have slots for, committed what they count on; a gap is waste.",
        "short",
        [
            Query(by(m.ALLOCATED, "owner"), "allocated {{owner}}"),
            Query(by(m.COMMITTED, "owner"), "committed {{owner}}"),
        ],
    )
    size = "Memory that the pool takes. Changes only with a restart."
    active = "Rows held by queue and batch. Goes to 0 when idle."
    return [
        *_placed(
            12,
            9,
            _sums("Pool slots", m.POOL_SLOTS, pool, "pool", "state", stacked=True),
            _sums("Rows", m.ROWS, rows, "state", stacked=True),
        ),
        *_placed(
            8,
            7,
            tokens,
            _sums("Pool size", m.POOL_BYTES, size, "engine", "pool", unit="bytes"),
            _sums("Active rows", m.ACTIVE_ROWS, active, "engine"),
        ),
    ]


def _faring() -> list[Placed]:
    live = "Waiting that only grows: the engine is over its capacity, or KV leaks."
    ended = "By how. A growing share of aborts: users give up, or time out."
    generated = "Throughput. Falling while requests wait: look at the pool above."
    evicted = "Some is normal under load. Much, with few hits: the cache is thrashing."
    hits = lines(
        "Prefix cache hits",
        "Share of prompt tokens found in the cache. Falling while evictions rise: the pool is small.",
        "percentunit",
        [Query(f"{rate(m.PREFIX_HIT, 'engine')} / {rate(m.PREFIX_QUERIED, 'engine')}", "{{engine}}")],
    )
    sent_back = lines(
        "Retractions and aborts",
        "Since the observer began. Retractions that go on: too much is admitted, and work is done twice.",
        "short",
        [Query(by(m.RETRACTIONS, "engine"), "{{engine}} retracted"), Query(by(m.ABORTS, "phase"), "aborted {{phase}}")],
    )
    return _placed(
        8,
        7,
        _sums("Live requests", m.LIVE, live, "phase", stacked=True),
        _rates("Requests that ended", m.REQUESTS, ended, "outcome", unit="reqps"),
        _rates("Generated tokens", m.GENERATED, generated, "engine"),
        _quantiles("Time to first token", m.TTFT),
        _quantiles("Between tokens", m.INTER_TOKEN),
        _quantiles("Queue", m.QUEUE),
        hits,
        _rates("Evicted tokens", m.EVICTED, evicted, "engine"),
        sent_back,
    )


def _seeing() -> list[Placed]:
    up = "1 is alive. 0: its flight recorder holds the last minutes; `kvlens findings list`."
    lag = "From a frame being written to it being read. Seconds: the observer lacks CPU."
    frames = "One a second when idle, many under load. 0: the engine hangs, or is gone."
    return _placed(
        8,
        6,
        _sums("Engine up", m.UP, up, "engine"),
        _sums("Lag", m.LAG, lag, "engine", unit="s"),
        _rates("Frames", m.FRAMES, frames, "engine"),
    )


def _legend(labels: tuple[str, ...]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def _stat(title: str, metric: m.Metric, description: str, *labels: str) -> stat.Panel:
    return figure(title, description, "short", Query(by(metric, *labels), _legend(labels)))


def _sums(
    title: str, metric: m.Metric, description: str, *labels: str, unit: str = "short", stacked: bool = False
) -> timeseries.Panel:
    signed = metric is m.POOL_SLOTS  # a slot returned twice counts as -1
    query = Query(by(metric, *labels), _legend(labels))
    return lines(title, description, unit, [query], stacked=stacked, signed=signed)


def _rates(title: str, metric: m.Metric, description: str, *labels: str, unit: str = "short") -> timeseries.Panel:
    return lines(title, description, unit, [Query(rate(metric, *labels), _legend(labels))])


def _quantiles(title: str, metric: m.Metric) -> timeseries.Panel:
    description = f"{metric.help} The points are requests: they lead to their traces. p99 far above p50: some starve."
    return lines(title, description, "s", quantiles(metric))
