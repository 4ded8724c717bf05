"""Commands: what docs list is there, and what scripts rely on has its shape."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvlens import __version__
from kvlens.cli.demo import summary, summary_lines
from kvlens.cli.main import app
from kvlens.cli.users import UserTotals
from kvlens.engine.faults.catalog import FAULTS
from kvlens.observer.ledger import Ledger
from kvlens.observer.rules.catalog import standing
from kvlens.observer.schema import EngineState, Identity, Kind, PoolState

ROOT = Path(__file__).parents[3]
run = CliRunner().invoke


def test_the_version() -> None:
    assert run(app, ["--version"]).output == f"kvlens {__version__}\n"


@pytest.mark.parametrize(
    "command", ["demo", "serve", "observe", "top", "findings", "faults", "dashboards", "bench", "doctor"]
)
def test_every_command_explains_itself(command) -> None:
    done = run(app, [command, "--help"])
    assert done.exit_code == 0 and "Usage" in done.output


def test_every_option_of_every_command_has_a_sentence() -> None:
    for command in ("demo", "serve", "observe", "top", "doctor"):
        for line in run(app, [command, "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output.splitlines():
            if re.match(r"\s+--[a-z]", line):
                assert len(line.split()) > 2, line


def test_faults_lead_to_kinds_that_exist() -> None:
    listed = json.loads(run(app, ["faults", "list", "--json"]).output)["faults"]
    assert [fault["name"] for fault in listed] == list(FAULTS)
    assert {fault["kind"] for fault in listed} <= {kind.value for kind in Kind}
    assert all(name in run(app, ["faults", "list"]).output for name in FAULTS)


def an_engine(**changes) -> EngineState:
    identity = Identity("demo", "0" * 32)
    tallies = Ledger(identity).tallies
    tallies.requests.update(stop=2, length=3, abort=1)
    tallies.assertions["locks-balance"] += 2
    tallies.counts.update(frames=90, frames_lost=10, generated_tokens=500, retractions=4)
    return EngineState(
        engine="demo", rank="r", instance="0" * 32, source="kvlens", role="full", model="builtin", software="kvlens",
        version="1", pid=1, status="up", step=77, mode="idle", updated_at=0, lag_seconds=0, started_at=0, running=0,
        waiting=0, live={}, rows={}, active_rows=0, allocated_tokens={}, committed_tokens={}, allocated_tokens_max=60,
        committed_tokens_max=50, leaked_slots={}, leaked_rows={},
        pools=[PoolState("full", "slot", 16, 64, 0, 60, 4, 0, 0, 0, 0)], tallies=tallies.state(),
        rules=standing(identity), tokens_per_second=0.0,
    )  # fmt: skip


def test_the_demos_summary_has_the_keys_that_scripts_rely_on() -> None:
    result = summary(an_engine(), [], UserTotals(sent=6, answered=5, hung_up=1), 10.0)
    assert result["steps"] == 77
    assert result["requests"] == {"finished": 5, "aborted": 1, "retracted": 4}
    assert result["tokens_per_second"] == 50.0
    assert set(result["pools"][0]) >= {
        "pool", "size_slots", "free", "evictable", "protected", "private", "session", "unaccounted",
    }  # fmt: skip
    assert (result["allocated_tokens_max"], result["committed_tokens_max"]) == (60, 50)
    assert result["assertions"] == {"locks-balance": 2}
    assert result["findings"] == [] and result["frames"] == {"published": 100, "lost": 10}
    lines = list(summary_lines(result))
    assert "77 steps" in lines[0] and "no finding: every slot is accounted for" in lines


def test_every_command_that_the_readme_shows_is_there() -> None:
    readme = (ROOT / "README.md").read_text()
    for command, *rest in (words.split() for words in re.findall(r"^\s*(?:\$ )?kvlens ([a-z][^#\n]*)", readme, re.M)):
        options = [word for word in rest if word.startswith("--")]
        text = run(app, [command, "--help"]).output if command != "--help" else ""
        assert text, command
        assert all(option.split("=")[0] in text for option in options if command in ("serve", "observe", "top", "demo"))


def test_every_make_target_that_the_docs_name_is_there() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in ("README.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\bmake ([a-z-]+)", (ROOT / page).read_text()):
            assert re.search(rf"^{target}:", makefile, re.M), target


def test_relative_links_of_the_docs_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            if "://" not in link:
                assert (page.parent / link).exists(), f"{page.name}: {link}"
