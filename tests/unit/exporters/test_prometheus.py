from __future__ import annotations

import subprocess
from types import ModuleType
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from kvlens.exporters import catalog
from kvlens.exporters.prometheus import MetricsPage
from kvlens.observer.schema import State

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"


@pytest.fixture
def busy(states: ModuleType) -> State:
    """Two engines, one with a leak, an exemplar, and a name that has to be escaped."""
    first = states.tallies(
        states.a_leaking_engine('odd "name" \\ here'),
        requests={"stop": 3, "length": 12_345_678, "abort": 1},
        histograms=states.an_engine().tallies.histograms
        | {"queue_seconds": states.a_histogram((1, 3, 4), 7.25, (0.5, states.TRACE))},
    )
    return states.a_state(first, states.an_engine("b"), findings=(states.a_finding(engine=first.engine),))


def samples(body: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_the_text_page_is_what_prometheus_client_itself_writes(busy: State) -> None:
    page = MetricsPage()
    body, content_type = page.render(busy, "")
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert body == generate_latest(page.registry)


def test_the_openmetrics_page_is_what_prometheus_client_itself_writes(busy: State) -> None:
    page = MetricsPage()
    body, content_type = page.render(busy, OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    assert body == generate_openmetrics(page.registry)


def test_an_exemplar_stands_in_the_bucket_its_value_falls_into(busy: State, states: ModuleType) -> None:
    body, _ = MetricsPage().render(busy, OPENMETRICS)
    found = [
        (sample.labels["le"], sample.exemplar)
        for family in parse_openmetrics(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert [(le, exemplar.labels, exemplar.value) for le, exemplar in found] == [
        ("1.0", {"trace_id": states.TRACE}, 0.5)
    ]


def test_the_text_page_has_no_exemplar(busy: State, states: ModuleType) -> None:
    body, _ = MetricsPage().render(busy, "text/plain")
    assert states.TRACE not in body.decode()


def test_a_page_shows_the_state_it_was_given_and_nothing_of_the_one_before(states: ModuleType) -> None:
    page = MetricsPage()
    page.render(states.a_state(states.a_leaking_engine("gone")), "")
    body, _ = page.render(states.a_state(states.an_engine("here")), "")
    assert b'engine="gone"' not in body
    found = samples(body)
    assert found["kvlens_leaked_slots", (("engine", "here"), ("pool", "full"), ("rank", "dp0-tp0-pp0"))] == 0


def test_the_number_of_series_does_not_grow_with_traffic(states: ModuleType) -> None:
    def count(requests: int) -> int:
        engine = states.tallies(
            states.an_engine(),
            requests=dict.fromkeys(("stop", "length", "abort"), requests),
            histograms={name: states.a_histogram((requests,) * 3, 1.0) for name in _histograms()},
        )
        return len(samples(MetricsPage().render(states.a_state(engine), "")[0]))

    assert count(0) == count(10_000) < 250


def _histograms() -> list[str]:
    return [metric.name.removeprefix("kvlens_") for metric in catalog.METRICS if metric.kind == "histogram"]


def test_counters_are_there_at_zero_before_anything_happened(states: ModuleType) -> None:
    found = samples(MetricsPage().render(states.a_state(), "")[0])
    by_name: dict[str, list[Any]] = {}
    for (name, _), value in found.items():
        by_name.setdefault(name, []).append(value)
    for metric in catalog.METRICS:
        if metric.kind == "counter":
            assert by_name[metric.name], metric.name
    assert len(by_name["kvlens_assertions_total"]) > 10 and not any(by_name["kvlens_assertions_total"])


def test_what_a_source_does_not_know_is_absent_not_zero(states: ModuleType) -> None:
    engine = states.tallies(states.an_engine(pools=[]), histograms={})
    body = MetricsPage().render(states.a_state(engine), "")[0].decode()
    assert "kvlens_pool_slots{" not in body and "kvlens_queue_seconds_bucket{" not in body


def test_no_engine_gives_a_page_without_a_series(states: ModuleType) -> None:
    state = State(1.0, "0.1.0", [], [])
    assert samples(MetricsPage().render(state, "")[0]) == {}


def test_promtool_finds_nothing_to_improve(busy: State) -> None:
    body, _ = MetricsPage().render(busy, "")
    done = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True, timeout=30)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
