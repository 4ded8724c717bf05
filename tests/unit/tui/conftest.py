"""Views made by hand, a client that hands them out, and the screen as text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvlens.observer.ledger import Ledger
from kvlens.observer.rules.catalog import standing
from kvlens.observer.schema import (
    EngineState,
    Finding,
    FindingState,
    Identity,
    Kind,
    PoolState,
    RowState,
    Severity,
    State,
    Timeline,
    TimelineEntry,
)
from kvlens.tui.app import KvlensApp
from kvlens.tui.model import View

NOW = 1_700_000_000.0
SCREENS = Path(__file__).parent / "screens"


def an_engine(**changes: Any) -> EngineState:
    identity = Identity("demo", "d" * 32)
    engine = EngineState(
        engine="demo", rank="dp0-tp0-pp0", instance="d" * 32, source="kvlens", role="full", model="builtin",
        software="kvlens", version="0.1.0", pid=1, status="up", step=12_345, mode="decode", updated_at=NOW - 0.2,
        lag_seconds=0.01, started_at=NOW - 600, running=3, waiting=2,
        live={"waiting": 2, "chunked": 0, "prefill": 0, "running": 3},
        rows={"free": 13, "running": 3, "chunked": 0, "waiting": 0, "session": 0, "transfer": 0, "orphan": 0},
        active_rows=3, allocated_tokens={"request": 700}, committed_tokens={"request": 700}, allocated_tokens_max=900,
        committed_tokens_max=900, leaked_slots={"full": 0}, leaked_rows={"rows": 0},
        pools=[
            PoolState("rows", "row", 1, 16, 64, 13, 0, 0, 3, 0, 0),
            PoolState("full", "slot", 16, 8192, 1 << 24, 6010, 1900, 128, 154, 0, 0),
        ],
        tallies=Ledger(identity).tallies.state(), rules=standing(identity), tokens_per_second=412.3,
    )  # fmt: skip
    return msgspec.structs.replace(engine, **changes)


def rows(count: int = 3) -> tuple[RowState, ...]:
    return tuple(
        RowState(
            "demo", "dp0-tp0-pp0", 16 - number, 1 + number, f"cmpl-{number:024x}", None,
            "chunked" if number == 2 else "running", 16 * number, 100 + number * 50, 100 + number * 50,
            NOW - 1 - number * 40, "alloc_for_extend",
        )
        for number in range(count)
    )  # fmt: skip


def a_finding() -> Finding:
    return Finding(
        id="f1", kind=Kind.ORPHAN_ROW, severity=Severity.CRITICAL, state=FindingState.OPEN, engine="demo",
        rank="dp0-tp0-pp0", pool="full", leaked_slots=48, leaked_rows=1, row=9, generation=4, request_id="cmpl-lost",
        trace_id="ab" * 16, opened_at=NOW - 75, resolved_at=None, opened_step=11_000,
        summary="request cmpl-lost is gone and left row 9 (generation 4) and 48 slots behind",
        evidence={"residual_slots": 48, "locked_slots": 32}, runbook="docs/runbooks/orphan-row.md",
    )  # fmt: skip


def healthy() -> View:
    state = State(NOW, "0.1.0", [an_engine()], [])
    return View("http://observer", NOW).answered(NOW, state, rows(), 3)


def leaking() -> View:
    pools = [
        PoolState("rows", "row", 1, 16, 64, 12, 0, 0, 3, 0, 1),
        PoolState("full", "slot", 16, 8192, 1 << 24, 5930, 1900, 160, 154, 0, 48),
    ]
    orphan = RowState("demo", "dp0-tp0-pp0", 9, 4, "cmpl-lost", "ab" * 16, "orphan", 32, 71, 71, NOW - 80, None)
    state = State(NOW, "0.1.0", [an_engine(pools=pools)], [a_finding()])
    return View("http://observer", NOW).answered(NOW, state, (*rows(), orphan), 4)


def gone() -> View:
    return (
        healthy()
        .failed(NOW + 7, "nobody answers at observer:80 (connection refused)")
        .failed(NOW + 19, "nobody answers at observer:80 (connection refused)")
    )


def nothing_yet() -> View:
    return View("http://observer", NOW)


VIEWS = {"healthy": healthy, "leaking": leaking, "gone": gone, "nothing": nothing_yet}


class FakeClient:
    """Hands out the view it was given."""

    def __init__(self, view: View) -> None:
        self.view = view
        self.timelines: dict[str, Timeline] = {
            "cmpl-lost": Timeline(
                "demo", "dp0-tp0-pp0", "cmpl-lost", None, 60, 96, 12, 32, "abort", NOW - 81, NOW - 75,
                [
                    TimelineEntry(NOW - 81, "queued", 10_900),
                    TimelineEntry(NOW - 80.5, "scheduled", 10_901, 9, 4, detail={"cached_tokens": 32}),
                    TimelineEntry(NOW - 80, "chunk", 10_901, 9, 4, 32, 60, 60, detail={"start": 32, "end": 60}),
                    TimelineEntry(NOW - 76, "abort_requested", 10_990, 9, 4, 32, 71, 71, detail={"phase": "running"}),
                    TimelineEntry(NOW - 75, "finished", 11_000, detail={"outcome": "abort", "message": ""}),
                ],
            )
        }  # fmt: skip
        self.closed = False

    async def refresh(self) -> View:
        return self.view

    async def timeline(self, rid: str) -> Timeline | str:
        return self.timelines.get(rid, f"HTTP 404: no request {rid} is known")

    async def close(self) -> None:
        self.closed = True


def screen_text(app: KvlensApp) -> str:
    """What stands on the screen, line by line."""
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in line).rstrip() for line in lines) + "\n"


@pytest.fixture
def views() -> dict[str, Callable[[], View]]:
    return VIEWS


@pytest.fixture
def an_app(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KvlensApp]:
    """`an_app(view)`: time stands still, and the client hands out that view."""
    monkeypatch.setattr("kvlens.tui.screens.timeline.time.time", lambda: NOW)
    return lambda view: KvlensApp(FakeClient(view), refresh_seconds=3600)


@pytest.fixture
def compare_screen() -> Callable[[KvlensApp, str], None]:
    """Compares a screen with the picture in `screens/`; KVLENS_UPDATE_SCREENS=1 draws it anew."""

    def compare(app: KvlensApp, name: str) -> None:
        picture, shown = SCREENS / f"{name}.txt", screen_text(app)
        if os.environ.get("KVLENS_UPDATE_SCREENS") == "1":
            SCREENS.mkdir(exist_ok=True)
            picture.write_text(shown, encoding="utf-8")
        assert shown == picture.read_text(encoding="utf-8"), f"{picture} differs; if it should, KVLENS_UPDATE_SCREENS=1"

    return compare
