from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest

from kvlens.exporters import catalog
from kvlens.observer.schema import FindingState, Kind, Severity

ROOT = Path(__file__).parents[3]

# The interface of the architecture: names, types and labels that scripts rely on.
CORE = {
    "kvlens_pool_slots": ("gauge", {"engine", "pool", "state"}),
    "kvlens_pool_size_slots": ("gauge", {"engine", "pool"}),
    "kvlens_pool_size_bytes": ("gauge", {"engine", "pool"}),
    "kvlens_rows": ("gauge", {"engine", "state"}),
    "kvlens_active_rows": ("gauge", {"engine"}),
    "kvlens_kv_allocated_tokens": ("gauge", {"engine", "owner"}),
    "kvlens_kv_committed_tokens": ("gauge", {"engine", "owner"}),
    "kvlens_kv_uncommitted_tokens": ("histogram", {"engine"}),
    "kvlens_assertions_total": ("counter", {"engine", "check"}),
    "kvlens_findings_open": ("gauge", {"engine", "kind", "severity"}),
    "kvlens_findings_total": ("counter", {"engine", "kind", "severity"}),
    "kvlens_leaked_slots": ("gauge", {"engine", "pool"}),
    "kvlens_leaked_rows": ("gauge", {"engine", "pool"}),
    "kvlens_live_requests": ("gauge", {"engine", "phase"}),
    "kvlens_requests_total": ("counter", {"engine", "outcome"}),
    "kvlens_time_to_first_token_seconds": ("histogram", {"engine"}),
    "kvlens_inter_token_seconds": ("histogram", {"engine"}),
    "kvlens_queue_seconds": ("histogram", {"engine"}),
    "kvlens_prefix_cache_queried_tokens_total": ("counter", {"engine"}),
    "kvlens_prefix_cache_hit_tokens_total": ("counter", {"engine"}),
    "kvlens_evicted_tokens_total": ("counter", {"engine"}),
    "kvlens_retractions_total": ("counter", {"engine"}),
    "kvlens_aborts_total": ("counter", {"engine", "phase"}),
    "kvlens_observer_frames_total": ("counter", {"engine"}),
    "kvlens_observer_frames_lost_total": ("counter", {"engine"}),
    "kvlens_observer_lag_seconds": ("gauge", {"engine"}),
    "kvlens_engine_up": ("gauge", {"engine"}),
}
BOUNDED = {"engine", "rank", "pool", "state", "owner", "check", "kind", "severity", "phase", "outcome"}


def test_the_metrics_of_the_architecture_are_there_with_their_type_and_labels() -> None:
    by_name = {metric.name: metric for metric in catalog.METRICS}
    for name, (kind, labels) in CORE.items():
        assert by_name[name].kind == kind
        assert set(by_name[name].label_names) == labels | {"rank"}


def test_names_follow_the_conventions_and_no_two_share_a_family() -> None:
    families = [metric.name.removesuffix("_total") for metric in catalog.METRICS]
    assert len(set(families)) == len(families)
    for metric in catalog.METRICS:
        assert re.fullmatch(r"kvlens_[a-z_]+", metric.name)
        assert (metric.kind == "counter") == metric.name.endswith("_total"), metric.name
        assert set(metric.label_names) <= BOUNDED, metric.name
        assert metric.help.endswith("."), metric.name
        assert metric.answers.endswith("?"), metric.name


def test_each_opentelemetry_name_translates_to_the_prometheus_name() -> None:
    suffixes = {"s": "_seconds", "By": "_bytes"}
    for metric in catalog.METRICS:
        name = metric.otel_name.replace(".", "_")
        assert metric.otel_unit in suffixes or re.fullmatch(r"(\{[a-z]+\})?", metric.otel_unit), metric.name
        suffix = suffixes.get(metric.otel_unit, "")
        name += suffix if not name.endswith(suffix) else ""
        name += "_total" if metric.kind == "counter" else ""
        assert name == metric.name


def test_every_constant_of_the_module_is_in_the_list() -> None:
    declared = [value for value in vars(catalog).values() if isinstance(value, catalog.Metric)]
    assert {id(metric) for metric in declared} == {id(metric) for metric in catalog.METRICS}


def test_the_states_of_a_pool_add_up_to_its_size(states: ModuleType) -> None:
    engine = states.a_leaking_engine()
    state = states.a_state(engine)
    slots = dict(catalog.samples(catalog.POOL_SLOTS, engine, state))
    assert sum(slots.values()) == dict(catalog.samples(catalog.POOL_SIZE, engine, state))["full",] == 1000
    assert slots["full", "unaccounted"] == 40


def test_a_dead_engine_has_no_levels_but_keeps_its_counters_and_its_leak(states: ModuleType) -> None:
    engine = states.a_leaking_engine()
    dead = type(engine)(**{field: getattr(engine, field) for field in engine.__struct_fields__} | {"status": "down"})
    state = states.a_state(dead)
    present = {metric.name for metric in catalog.METRICS if list(catalog.samples(metric, dead, state))}
    assert list(catalog.samples(catalog.UP, dead, state)) == [((), 0)]
    assert "kvlens_pool_slots" not in present and "kvlens_live_requests" not in present
    assert {"kvlens_requests_total", "kvlens_leaked_slots", "kvlens_engine_last_frame_timestamp_seconds"} <= present


@pytest.mark.parametrize("status", ["up", "stalled"])
def test_an_engine_that_lives_is_up_also_when_it_has_stalled(states: ModuleType, status: str) -> None:
    engine = states.an_engine(status=status)
    assert list(catalog.samples(catalog.UP, engine, states.a_state(engine))) == [((), 1)]


def test_open_findings_are_counted_by_kind_for_their_engine_only(states: ModuleType) -> None:
    mine, other = states.an_engine("mine"), states.an_engine("other")
    findings = (
        states.a_finding(engine="mine"),
        states.a_finding(engine="mine", state=FindingState.ACKNOWLEDGED),
        states.a_finding(engine="mine", state=FindingState.RESOLVED),
        states.a_finding(engine="other", kind=Kind.OVER_RELEASE),
    )
    state = states.a_state(mine, other, findings=findings)
    open_ = dict(catalog.samples(catalog.FINDINGS_OPEN, mine, state))
    assert open_[Kind.ORPHAN_ROW.value, Severity.CRITICAL.value] == 2
    assert sum(open_.values()) == 2
    assert {kind for kind, _ in open_} == {kind.value for kind in Kind}


def test_the_page_of_metrics_is_what_the_catalogue_says() -> None:
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == catalog.document(), "run `make dashboards`"
