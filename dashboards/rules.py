"""Alert rules for Prometheus, made of catalogue entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import yaml

from kvlens.exporters import catalog as m

RUNBOOKS = "https://github.com/kvlens/kvlens/blob/main/docs/runbooks"


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

    def rule(self) -> dict[str, Any]:
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.hold,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOKS}/{self.runbook}.md",
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
        "KvlensAssertionFired", f"increase({m.ASSERTIONS.name}[5m]) > 0", "0s", "critical",
        "check {{ $labels.check }} failed on {{ $labels.engine }}",
        "The engine went on along a safe path; the code path that broke the invariant is still there.",
        "check-failed",
    ),
    Alert(
        "KvlensEngineDown", f"{m.UP.name} == 0", "30s", "critical",
        "engine {{ $labels.engine }} is down",
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
        "the observer lost {{ $value | humanize }} frames of {{ $labels.engine }} in five minutes",
        "Counters and timelines have a gap. Give the observer more CPU, or the engine a larger --ring-mib.",
        "frames-lost",
    ),
    Alert(
        "KvlensObserverGone", 'up{job="kvlens"} == 0 or absent(up{job="kvlens"})', "1m", "critical",
        "no observer answers: a leak would not be seen",
        "An alert that cannot fire is worse than none. Start `kvlens observe`, or mend the scrape.",
        "observer-gone",
    ),
)  # fmt: skip


def rules_yaml() -> str:
    """The rule file."""
    groups = {"groups": [{"name": "kvlens", "interval": "5s", "rules": [alert.rule() for alert in ALERTS]}]}
    return "# Made from dashboards/rules.py by `kvlens dashboards build`.\n" + yaml.safe_dump(
        groups, sort_keys=False, width=100
    )
