from __future__ import annotations

import json
from typing import Any

import pytest

from kvlens.dashboards.build import files


@pytest.fixture(scope="session")
def board() -> dict[str, Any]:
    """The dashboard as Grafana gets it."""
    return json.loads(files()["kvlens-leaks.json"])


@pytest.fixture(scope="session")
def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Everything that asks something."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]
