from __future__ import annotations

import re
from pathlib import Path

import yaml

from kvlens.dashboards.rules import ALERTS, RETURNED_TWICE, RUNBOOKS, rules_yaml
from kvlens.engine.contracts import CHECKS
from kvlens.exporters import catalog
from kvlens.observer.schema import Kind

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs/runbooks"


def test_every_alert_asks_for_metrics_of_the_catalogue() -> None:
    known = {metric.name for metric in catalog.METRICS}
    for alert in ALERTS:
        assert set(re.findall(r"kvlens_\w+", alert.expr)) <= known, alert.name


def test_the_kinds_that_alerts_name_exist() -> None:
    assert set(RETURNED_TWICE) < {kind.value for kind in Kind}
    for alert in ALERTS:
        for kinds in re.findall(r'kind=~?"([^"]*)"', alert.expr):
            assert set(kinds.split("|")) <= {kind.value for kind in Kind}, alert.name


def test_every_alert_has_a_severity_and_says_what_to_do() -> None:
    for group in yaml.safe_load(rules_yaml())["groups"]:
        for rule in group["rules"]:
            assert rule["labels"] == {"severity": rule["labels"]["severity"]}  # a value would change its identity
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert rule["annotations"]["summary"] and rule["annotations"]["description"]


def test_every_alert_leads_to_a_runbook_that_is_there() -> None:
    for alert in ALERTS:
        url = alert.rule(RUNBOOKS)["annotations"]["runbook_url"]
        assert (PAGES / url.removeprefix(f"{RUNBOOKS}/")).is_file(), alert.name


def test_there_is_a_runbook_for_every_check_kind_and_alert_and_no_other() -> None:
    checks = {check.name for check in CHECKS.all()}
    kinds = {kind.value.replace("_", "-") for kind in Kind}
    alerts = {alert.runbook for alert in ALERTS}
    assert {page.stem for page in PAGES.glob("*.md")} == checks | kinds | alerts


def test_every_runbook_says_what_it_means_how_to_look_and_what_to_do() -> None:
    for page in PAGES.glob("*.md"):
        text = page.read_text(encoding="utf-8")
        lines = text.splitlines()
        assert lines[0] == f"# {page.stem}"
        assert [line for line in lines if line.startswith("## ")] == ["## What it means", "## Look", "## Act"], (
            page.name
        )
        assert 8 <= len(lines) <= 30, page.name


def test_a_checks_runbook_quotes_what_the_check_says() -> None:
    for check in CHECKS.all():
        text = " ".join((PAGES / f"{check.name}.md").read_text(encoding="utf-8").split())
        assert check.description in text, check.name


def test_links_between_runbooks_lead_somewhere() -> None:
    for page in PAGES.glob("*.md"):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), (page.name, link)


def test_commands_in_runbooks_exist() -> None:
    from typer.main import get_command

    from kvlens.cli.main import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for page in PAGES.glob("*.md"):
        for words in re.findall(r"kvlens ([a-z]+)(?: ([a-z]+))?", _code(page)):
            assert words[0] in commands, (page.name, words)
            inner = getattr(commands[words[0]], "commands", None)
            assert inner is None or words[1] in inner, (page.name, words)


def _code(page: Path) -> str:
    """Indented blocks, and what stands between backquotes."""
    found = re.findall(r"^    (.*)$|`(kvlens [^`]*)`", page.read_text(encoding="utf-8"), re.M)
    return "\n".join("".join(parts) for parts in found)
