"""Alert rules for Prometheus, made of catalogue entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from kvlens.exporters import catalog as m

RUNBOOKS = "docs/runbooks"
"""Where runbooks are: a path in the repository. `kvlens dashboards build --runbooks URL` puts an address there."""

JOB = "kvlens"
"""What Prometheus calls the scrape of an observer."""
RETURNED_TWICE = ("over_release", "held_and_free", "slots_held_twice")
"""Kinds of findings where slots are not missing but have too many owners."""


@dataclass(frozen=True, slots=True)
class Alert:
    """One rule. `hold`: how long the condition must stand."""

    name: str
    expr: str
    hold: str
    severity: str
    summary: str
    description: str
    runbook: str

    def rule(self, runbooks: str) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{runbooks}/{self.runbook}.md",
            },
        }


ALERTS = (
    Alert(
        "KvlensRowLeak", f"{m.LEAKED_ROWS.name} > 0", "15s", "critical",
        "{{ $value }} rows of {{ $labels.engine }} are held by nobody",
        "A request left without the release path: its row, its slots and its prefix lock never come back. "
        "`kvlens findings list` names the request.",
        "orphan-row",
    ),
    Alert(
        "KvlensSlotLeak", f"{m.LEAKED_SLOTS.name} > 0", "15s", "critical",
        "{{ $value }} slots of pool {{ $labels.pool }} of {{ $labels.engine }} are held by nobody",
        "The pool has shrunk for good. `kvlens findings list` names who held the slots; a flush or a restart returns "
        "them.",
        "unowned-slots",
    ),
    Alert(
        "KvlensOverRelease",
        f'sum by (engine, rank, kind) ({m.FINDINGS_OPEN.name}{{kind=~"{"|".join(RETURNED_TWICE)}"}}) > 0', "15s",
        "critical",
        "slots of {{ $labels.engine }} have two owners, or were returned twice ({{ $labels.kind }})",
        "Two requests may write the same KV: answers can be wrong. Take the engine out of rotation, then look at "
        "`kvlens findings list`.",
        "over-release",
    ),
    Alert(
        "KvlensAssertionFired", f"increase({m.ASSERTIONS.name}[5m]) > 0", "0s", "critical",
        "check {{ $labels.check }} failed on {{ $labels.engine }}",
        "The engine went on along a safe path; the code path that broke the invariant is still there.",
        "check-failed",
    ),
    Alert(
        # The finding and not kvlens_engine_up: that an engine was stopped in good order wakes nobody.
        "KvlensEngineDown", f'{m.FINDINGS_OPEN.name}{{kind="engine_down"}} > 0', "30s", "critical",
        "engine {{ $labels.engine }} has died",
        "Its flight recorder still holds what it did last: `kvlens findings list`, `kvlens top`.",
        "engine-down",
    ),
    Alert(
        "KvlensEngineStalled", f"time() - {m.LAST_FRAME.name} > 60 and on (engine, rank) {m.UP.name} == 1", "30s",
        "warning",
        "engine {{ $labels.engine }} is alive and has published nothing for {{ $value | humanizeDuration }}",
        "A step hangs, or the scheduler's thread is gone. Even an idle engine publishes once a second.",
        "engine-down",
    ),
    Alert(
        "KvlensFramesLost", f"increase({m.FRAMES_LOST.name}[5m]) > 0", "0s", "warning",
        "the observer lost about {{ $value | printf \"%.0f\" }} frames of {{ $labels.engine }} in five minutes",
        "Counters and timelines have a gap. Give the observer more CPU, or the engine a larger --ring-mib.",
        "frames-lost",
    ),
    Alert(
        "KvlensObserverGone", f'up{{job="{JOB}"}} == 0 or absent(up{{job="{JOB}"}})', "1m", "critical",
        "no observer answers: a leak would not be seen",
        "An alert that cannot fire is worse than none. Start `kvlens observe`, or mend the scrape.",
        "observer-gone",
    ),
)  # fmt: skip


def rules_yaml(runbooks: str = RUNBOOKS) -> str:
    """The rule file; `runbooks` stands before the name of each page."""
    runbooks = runbooks.rstrip("/")
    groups = {"groups": [{"name": "kvlens", "interval": "5s", "rules": [alert.rule(runbooks) for alert in ALERTS]}]}
    return "# Made from dashboards/rules.py by `kvlens dashboards build`.\n" + yaml.safe_dump(
        groups, sort_keys=False, width=100
    )
