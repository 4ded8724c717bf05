"""Writes the dashboard and the rules, and asks a Prometheus whether every panel has data."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvlens import KvlensError
from kvlens.dashboards.leaks import dashboard
from kvlens.dashboards.rules import RUNBOOKS, rules_yaml


def files(runbooks: str = RUNBOOKS) -> dict[str, str]:
    """Name to content of everything that is built; `runbooks`: where alerts say that their pages are."""
    board = JSONEncoder(sort_keys=True, indent=2).encode(dashboard().build())
    return {"kvlens-leaks.json": board + "\n", "kvlens-rules.yml": rules_yaml(runbooks)}


def build(out: Path, runbooks: str = RUNBOOKS) -> list[Path]:
    """Write all of it into `out`; the same input gives the same bytes."""
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, content in files(runbooks).items():
        path = out / name
        path.write_text(content, encoding="utf-8")
        written.append(path)
    return written


@dataclass(frozen=True, slots=True)
class PanelCheck:
    """One query of one panel, and how many series it gave."""

    panel: str
    expr: str
    series: int


def queries(interval: str = "1m") -> Iterator[tuple[str, str]]:
    """(panel title, expression) of every query, with Grafana's variables filled in for all engines."""
    board: dict[str, Any] = json.loads(files()["kvlens-leaks.json"])
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            expr = target["expr"].replace("$__rate_interval", interval).replace("$engine", ".*")
            yield panel["title"], expr


def check(prometheus: str) -> list[PanelCheck]:
    """Ask every query. Raises KvlensError when there is no Prometheus at that address."""
    return [PanelCheck(title, expr, len(_ask(prometheus, expr))) for title, expr in queries()]


def _ask(prometheus: str, expr: str) -> list[Any]:
    url = f"{prometheus.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            result: list[Any] = json.load(response)["data"]["result"]
            return result
    except urllib.error.HTTPError as error:
        with error:
            raise KvlensError(f"Prometheus at {prometheus} refuses {expr}: HTTP {error.code}") from None
    except (OSError, ValueError, KeyError) as error:
        raise KvlensError(f"no Prometheus at {prometheus} ({error}): give --prometheus URL") from None
