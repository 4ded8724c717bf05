"""`kvlens findings`: what an observer has found."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec

from kvlens import KvlensError
from kvlens.cli.http import ask_observer
from kvlens.observer.schema import Finding, FindingState


class _Findings(msgspec.Struct):
    findings: list[Finding]


def fetch_findings(url: str, token: str | None) -> list[Finding]:
    """Newest first. Raises KvlensError."""
    found = ask_observer(url, "/api/v1/findings", _Findings, token).findings
    return sorted(found, key=lambda finding: finding.opened_at, reverse=True)


def fetch_finding(url: str, token: str | None, finding_id: str) -> Finding:
    """Raises KvlensError, also when there is none of that id."""
    for finding in fetch_findings(url, token):
        if finding.id == finding_id:
            return finding
    raise KvlensError(f"there is no finding {finding_id}: `kvlens findings list` shows them all")


def acknowledge(url: str, token: str | None, finding_id: str) -> None:
    """Raises KvlensError, also when there is none of that id."""
    fetch_finding(url, token, finding_id)
    ask_observer(url, f"/api/v1/findings/{finding_id}/ack", dict[str, Any], token, body={})


def is_open(finding: Finding) -> bool:
    """Not resolved: an acknowledged leak still leaks."""
    return finding.state is not FindingState.RESOLVED


def finding_line(finding: Finding) -> str:
    opened = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(finding.opened_at))
    return f"{finding.id}  {opened}  {finding.state.value:<12} {finding.severity.value:<8} {finding.summary}"


def finding_details(finding: Finding) -> Iterator[str]:
    yield finding_line(finding)
    yield f"kind      {finding.kind.value} in pool {finding.pool} of {finding.engine} ({finding.rank})"
    yield f"amount    {finding.leaked_slots:,} slots, {finding.leaked_rows:,} rows, since step {finding.opened_step:,}"
    if finding.row is not None:
        yield f"row       {finding.row}, generation {finding.generation}, taken by {finding.site or 'an unknown path'}"
    if finding.request_id is not None:
        yield f"request   {finding.request_id}, last event {finding.last_event or 'unknown'}"
    if finding.trace_id is not None:
        yield f"trace     {finding.trace_id}"
    yield from (f"account   {part.pool}: {part.residual:+,} {part.unit}" for part in finding.accounts)
    yield from (f"evidence  {name} {value:,}" for name, value in finding.evidence.items())
    yield f"runbook   {finding.runbook}"
