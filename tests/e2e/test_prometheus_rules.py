"""Every alert fires, clears, and leaves a healthy engine alone: `promtool test rules` on what is committed."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvlens.dashboards.rules import ALERTS, JOB, RUNBOOKS

ROOT = Path(__file__).parents[2]
RULES = ROOT / "dashboards/built/kvlens-rules.yml"
ENGINE = {"engine": "e", "rank": "dp0-tp0-pp0"}


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def series(name: str, values: str, **labels: str) -> dict[str, str]:
    inside = ",".join(f'{key}="{value}"' for key, value in (ENGINE | labels).items())
    return {"series": f"{name}{{{inside}}}", "values": values}


def target(values: str) -> dict[str, str]:
    return {"series": f'up{{job="{JOB}",instance="observer:9400"}}', "values": values}


# One sample every 5 s: 60 samples are 5 minutes.
HEALTHY = [
    series("kvlens_engine_up", "1x240"),
    series("kvlens_engine_last_frame_timestamp_seconds", "0+5x240"),
    series("kvlens_leaked_rows", "0x240", pool="rows"),
    series("kvlens_leaked_slots", "0x240", pool="full"),
    # Whoever holds slots with good reason is no leak.
    *(series("kvlens_pool_slots", "200x240", pool="full", state=state)
      for state in ("free", "evictable", "protected", "private", "session")),
    series("kvlens_pool_slots", "0x240", pool="full", state="unaccounted"),
    series("kvlens_findings_open", "0x240", kind="orphan_row", severity="critical"),
    series("kvlens_findings_open", "0x240", kind="over_release", severity="critical"),
    series("kvlens_findings_open", "0x240", kind="engine_down", severity="critical"),
    series("kvlens_findings_total", "5x240", kind="orphan_row", severity="critical"),
    series("kvlens_assertions_total", "7x240", check="free-slots-unique"),
    series("kvlens_observer_frames_lost_total", "3x240"),
    series("kvlens_requests_total", "0+9x240", outcome="stop"),
    target("1x240"),
]  # fmt: skip


@dataclass(frozen=True)
class Story:
    """How an alert comes and goes: series that replace those of HEALTHY, and what is said while it fires."""

    alert: str
    series: list[dict[str, str]]
    fires_at: str
    clear_at: str
    labels: dict[str, str]
    summary: str


STORIES = [
    Story(
        "KvlensRowLeak", [series("kvlens_leaked_rows", "0x10 2x60 0x170", pool="rows")], "2m", "7m",
        ENGINE | {"pool": "rows"}, "2 rows of e are held by nobody",
    ),
    Story(
        "KvlensSlotLeak", [series("kvlens_leaked_slots", "0x10 40x60 0x170", pool="full")], "2m", "7m",
        ENGINE | {"pool": "full"}, "40 slots of pool full of e are held by nobody",
    ),
    Story(
        "KvlensOverRelease",
        [series("kvlens_findings_open", "0x10 1x60 0x170", kind="over_release", severity="critical")], "2m", "7m",
        ENGINE | {"kind": "over_release"}, "slots of e have two owners, or were returned twice (over_release)",
    ),
    Story(
        "KvlensAssertionFired", [series("kvlens_assertions_total", "7x10 8x230", check="free-slots-unique")],
        "1m", "8m", ENGINE | {"check": "free-slots-unique"}, "check free-slots-unique failed on e",
    ),
    Story(
        "KvlensEngineDown",
        [series("kvlens_engine_up", "1x10 0x60 1x170"),
         series("kvlens_findings_open", "0x10 1x60 0x170", kind="engine_down", severity="critical")],
        "2m", "7m", ENGINE | {"kind": "engine_down"}, "engine e has died",
    ),
    Story(
        "KvlensEngineStalled", [series("kvlens_engine_last_frame_timestamp_seconds", "0+5x10 50x60 355+5x170")],
        "4m", "7m", ENGINE, "engine e is alive and has published nothing for 3m 10s",
    ),
    Story(
        "KvlensFramesLost", [series("kvlens_observer_frames_lost_total", "3x10 33x230")], "2m", "8m", ENGINE,
        "the observer lost about 31 frames of e in five minutes",
    ),
    Story(
        "KvlensObserverGone", [target("1x10 0x60 1x170")], "3m", "7m",
        {"job": JOB, "instance": "observer:9400"}, "no observer answers: a leak would not be seen",
    ),
]  # fmt: skip


def rules_test(path: Path, given: list[dict[str, str]], expected: list[dict[str, Any]]) -> Path:
    """A file for `promtool test rules`: what each alert does at each time."""
    document = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "5s",
        "tests": [{"interval": "5s", "input_series": given, "alert_rule_test": expected}],
    }
    path.write_text(yaml.safe_dump(document))
    return path


def firing(story: Story) -> dict[str, Any]:
    alert = next(alert for alert in ALERTS if alert.name == story.alert)
    annotations = alert.rule(RUNBOOKS)["annotations"] | {"summary": story.summary}
    return {"exp_labels": story.labels | {"severity": alert.severity}, "exp_annotations": annotations}


def replaced(changes: list[dict[str, str]]) -> list[dict[str, str]]:
    names = {change["series"] for change in changes}
    return [one for one in HEALTHY if one["series"] not in names] + changes


def silent(at: str, *alerts: str) -> list[dict[str, Any]]:
    return [{"eval_time": at, "alertname": alert, "exp_alerts": []} for alert in alerts]


def test_every_alert_has_its_story() -> None:
    assert [story.alert for story in STORIES] == [alert.name for alert in ALERTS]


def test_the_rules_are_valid() -> None:
    done = promtool("check", "rules", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_configuration_that_compose_mounts_is_valid(tmp_path: Path) -> None:
    shutil.copy(ROOT / "deploy/prometheus.yml", tmp_path)
    (tmp_path / "rules").mkdir()
    shutil.copy(RULES, tmp_path / "rules")
    done = promtool("check", "config", tmp_path / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS)} rules found" in done.stdout


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.alert)
def test_an_alert_fires_says_what_is_wrong_and_clears(story: Story, tmp_path: Path) -> None:
    expected = [
        *silent("45s", story.alert),
        {"eval_time": story.fires_at, "alertname": story.alert, "exp_alerts": [firing(story)]},
        *silent(story.clear_at, story.alert),
    ]
    done = promtool("test", "rules", rules_test(tmp_path / "test.yml", replaced(story.series), expected))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_alert_fires_on_a_healthy_engine(tmp_path: Path) -> None:
    expected = [one for at in ("0s", "1m", "10m", "19m") for one in silent(at, *(alert.name for alert in ALERTS))]
    done = promtool("test", "rules", rules_test(tmp_path / "test.yml", HEALTHY, expected))
    assert done.returncode == 0, done.stdout + done.stderr


def quiet_story(tmp_path: Path, changes: list[dict[str, str]], *alerts: str) -> None:
    expected = [one for at in ("2m", "5m", "10m") for one in silent(at, *alerts)]
    done = promtool("test", "rules", rules_test(tmp_path / "test.yml", replaced(changes), expected))
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_engine_that_was_stopped_in_good_order_wakes_nobody(tmp_path: Path) -> None:
    stopped = [
        series("kvlens_engine_up", "1x10 0x230"),
        series("kvlens_engine_last_frame_timestamp_seconds", "0+5x10 50x230"),
    ]
    quiet_story(tmp_path, stopped, *(alert.name for alert in ALERTS))


def test_counters_that_start_again_with_the_observer_are_no_failure(tmp_path: Path) -> None:
    restarted = [
        series("kvlens_assertions_total", "7x20 _x6 0x200", check="free-slots-unique"),
        series("kvlens_observer_frames_lost_total", "3x20 _x6 0x200"),
    ]
    quiet_story(tmp_path, restarted, "KvlensAssertionFired", "KvlensFramesLost")


def test_a_residual_that_is_gone_at_the_next_scrape_pages_nobody(tmp_path: Path) -> None:
    blip = [series("kvlens_leaked_slots", "0x23 40 0x200", pool="full")]
    quiet_story(tmp_path, blip, "KvlensSlotLeak")


def test_a_leak_stays_known_over_a_gap_in_the_scrapes(tmp_path: Path) -> None:
    story = STORIES[0]
    gap = [series("kvlens_leaked_rows", "0x10 2x10 _x6 2x100", pool="rows")]
    expected = [{"eval_time": "2m10s", "alertname": story.alert, "exp_alerts": [firing(story)]}]
    done = promtool("test", "rules", rules_test(tmp_path / "test.yml", replaced(gap), expected))
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_observer_at_all_is_an_alert_too(tmp_path: Path) -> None:
    alert = next(alert for alert in ALERTS if alert.name == "KvlensObserverGone")
    labels = {"job": JOB, "severity": alert.severity}
    fires = {"exp_labels": labels, "exp_annotations": alert.rule(RUNBOOKS)["annotations"]}
    expected = [{"eval_time": "3m", "alertname": alert.name, "exp_alerts": [fires]}]
    done = promtool("test", "rules", rules_test(tmp_path / "test.yml", [], expected))
    assert done.returncode == 0, done.stdout + done.stderr
