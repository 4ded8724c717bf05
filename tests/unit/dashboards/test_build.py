from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from kvlens import KvlensError
from kvlens.dashboards.build import build, check, files, queries
from kvlens.dashboards.panels import COLOURS, by, series
from kvlens.exporters import catalog

ROOT = Path(__file__).parents[3]
SOURCE = {"type": "prometheus", "uid": "${datasource}"}

# What the dashboard must answer, and from which metric.
ASKED = {
    "Pool slots": catalog.POOL_SLOTS, "Unaccounted slots": catalog.POOL_SLOTS, "Leaked slots": catalog.LEAKED_SLOTS,
    "Leaked rows": catalog.LEAKED_ROWS, "Open findings": catalog.FINDINGS_OPEN, "Rows": catalog.ROWS,
    "Tokens": catalog.ALLOCATED, "Requests that ended": catalog.REQUESTS, "Live requests": catalog.LIVE,
    "Time to first token": catalog.TTFT, "Between tokens": catalog.INTER_TOKEN, "Queue": catalog.QUEUE,
    "Prefix cache hits": catalog.PREFIX_HIT, "Evicted tokens": catalog.EVICTED,
    "Retractions and aborts": catalog.RETRACTIONS, "Failed checks": catalog.ASSERTIONS,
    "Frames lost": catalog.FRAMES_LOST, "Lag": catalog.LAG, "Engine up": catalog.UP,
}  # fmt: skip


def test_what_is_committed_is_what_is_built(tmp_path: Path) -> None:
    for path in build(tmp_path):
        committed = ROOT / "dashboards/built" / path.name
        assert committed.read_bytes() == path.read_bytes(), f"run `make dashboards`: {path.name} differs"
    assert {path.name for path in (ROOT / "dashboards/built").iterdir()} == set(files())


def test_building_twice_gives_the_same_bytes() -> None:
    assert files() == files()


def test_there_is_a_panel_for_every_question(panels: list[dict[str, Any]]) -> None:
    asked = {panel["title"]: " ".join(target["expr"] for target in panel["targets"]) for panel in panels}
    for title, metric in ASKED.items():
        assert metric.name in asked[title], title


def test_every_query_uses_metrics_and_labels_of_the_catalogue() -> None:
    known = {metric.name: set(metric.label_names) for metric in catalog.METRICS}
    for title, expr in queries():
        names = {name.removesuffix("_bucket") for name in re.findall(r"kvlens_\w+", expr)}
        assert names and names <= set(known), title
        labels = {"le"}.union(*(known[name] for name in names))
        for grouped in re.findall(r"by \(([^)]*)\)", expr):
            assert set(grouped.split(", ")) <= labels, (title, grouped)


def test_every_query_is_limited_to_the_chosen_engines(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        for target in panel["targets"]:
            assert target["expr"].count('engine=~"$engine"') == len(re.findall(r"kvlens_\w+", target["expr"]))


def test_a_label_that_a_metric_lacks_is_refused() -> None:
    with pytest.raises(ValueError, match="kvlens_rows has no label pool"):
        series(catalog.ROWS, pool="full")
    assert by(catalog.ROWS, "state") == 'sum by (state) (kvlens_rows{engine=~"$engine"})'


def test_every_panel_says_what_is_normal_in_which_unit_and_from_which_source(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        assert len(panel["description"]) > 20 and panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] and panel["fieldConfig"]["defaults"]["noValue"]
        assert panel["datasource"] == SOURCE
        assert all(target["datasource"] == SOURCE for target in panel["targets"])


def test_panels_have_numbers_and_do_not_overlap(board: dict[str, Any]) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    assert ids == list(range(1, len(ids) + 1))
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"])
                 for y in range(place["y"], place["y"] + place["h"])}  # fmt: skip
        assert place["x"] + place["w"] <= 24 and not taken & cells, panel["title"]
        taken |= cells


def test_slots_returned_twice_are_not_cut_off_at_zero(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        if panel["title"] in ("Unaccounted slots", "Pool slots"):
            assert "min" not in panel["fieldConfig"]["defaults"], panel["title"]


def test_a_state_has_its_own_colour(panels: list[dict[str, Any]]) -> None:
    pool = next(panel for panel in panels if panel["title"] == "Pool slots")
    colours = {}
    for override in pool["fieldConfig"]["overrides"]:
        for state in COLOURS:
            if re.search(override["matcher"]["options"].strip("/"), f"full {state}"):
                colours[state] = override["properties"][0]["value"]["fixedColor"]
    assert colours == COLOURS
    slots = [COLOURS[state] for state in ("free", "evictable", "protected", "private", "session", "unaccounted")]
    assert len(set(slots)) == len(slots)


def test_latencies_show_exemplars(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        if panel["title"] in ("Time to first token", "Between tokens", "Queue"):
            assert all(target["exemplar"] for target in panel["targets"]), panel["title"]


def test_the_dashboard_has_a_fixed_address_and_the_variable_engine(board: dict[str, Any]) -> None:
    assert board["uid"] == "kvlens-leaks" and board["title"] == "kvlens: who holds the KV"
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["engine"]["query"] == "label_values(kvlens_engine_up, engine)"
    assert variables["datasource"]["type"] == "datasource"


def test_a_prometheus_that_is_not_there_is_told_in_one_line() -> None:
    with pytest.raises(KvlensError, match=r"no Prometheus at http://127\.0\.0\.1:1 .*give --prometheus URL"):
        check("http://127.0.0.1:1")
