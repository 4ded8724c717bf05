"""Findings and cursor outlive the observer, together."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import msgspec
import pytest

from kvlens.observer.findings import resolved
from kvlens.observer.schema import Finding, FindingState, Identity, Kind, Severity
from kvlens.observer.store import Store, StoreError, default_store

ONE = Identity("engine", "1" * 32)
TWO = Identity("engine", "2" * 32)


def a_finding(id: str = "f1", engine: str = "engine", **changes) -> Finding:
    finding = Finding(
        id=id, kind=Kind.ORPHAN_ROW, severity=Severity.CRITICAL, state=FindingState.OPEN, engine=engine,
        rank="dp0-tp0-pp0", pool="full", leaked_slots=4, leaked_rows=1, row=3, generation=2, request_id="r",
        trace_id=None,
        opened_at=5.0, resolved_at=None, opened_step=9, summary="lost", evidence={"residual_slots": 4},
        runbook="docs/runbooks/orphan-row.md",
    )  # fmt: skip
    return msgspec.structs.replace(finding, **changes)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "findings.db"


def test_what_was_committed_is_there_after_a_restart(path: Path) -> None:
    store = Store(path)
    store.commit(ONE, 7, [("row 3.2", a_finding())])
    store.close()
    again = Store(path)
    assert again.cursor(ONE) == 7
    assert again.unresolved(ONE) == [("row 3.2", a_finding())]
    assert again.all() == [a_finding()]
    assert again.cursor(TWO) == 0 and again.unresolved(TWO) == []
    again.close()


def test_findings_and_cursor_change_together_or_not_at_all(path: Path) -> None:
    store = Store(path)
    store.commit(ONE, 7, [])
    store._db.execute("CREATE TRIGGER broken BEFORE INSERT ON cursors BEGIN SELECT RAISE(ABORT, 'disk on fire'); END")
    with pytest.raises(StoreError, match="disk on fire"):
        store.commit(ONE, 8, [("row 3.2", a_finding())])
    assert store.cursor(ONE) == 7 and store.all() == []
    store.close()


def test_the_same_finding_is_written_over_and_a_resolved_one_is_not_taken_up(path: Path) -> None:
    store = Store(path)
    store.commit(ONE, 1, [("s", a_finding())])
    store.commit(ONE, 2, [("s", resolved(a_finding(), 8.0))])
    assert store.all() == [resolved(a_finding(), 8.0)] and store.unresolved(ONE) == []
    store.close()


def test_a_successor_resolves_what_its_predecessor_left_open_and_nobody_elses(path: Path) -> None:
    store = Store(path)
    store.commit(ONE, 4, [("s", a_finding("mine"))])
    store.commit(Identity("other", "3" * 32), 4, [("s", a_finding("theirs", engine="other"))])
    store.resolve_predecessors(TWO, 50.0)
    states = {finding.id: (finding.state, finding.resolved_at) for finding in store.all()}
    assert states == {"mine": (FindingState.RESOLVED, 50.0), "theirs": (FindingState.OPEN, None)}
    assert store.cursor(ONE) == 4
    store.close()


def test_an_instance_that_is_over_resolves_only_what_was_opened_before_it_began(path: Path) -> None:
    store = Store(path)
    store.commit(ONE, 4, [("earlier", a_finding("earlier")), ("later", a_finding("later", opened_at=60.0))])
    store.resolve_predecessors(TWO, 90.0, before=50.0)
    assert {finding.id: finding.state for finding in store.all()} == {
        "earlier": FindingState.RESOLVED, "later": FindingState.OPEN,
    }  # fmt: skip
    store.close()


def test_two_observers_cannot_share_a_store(path: Path) -> None:
    store = Store(path)
    with pytest.raises(StoreError, match=f"in use by the observer with pid {os.getpid()}: stop it, or give --store"):
        Store(path)
    store.close()
    Store(path).close()


def test_a_place_that_is_not_writable_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match=r"cannot be kept in .* give --store FILE"):
        Store(tmp_path / "file" / "findings.db")


def test_a_file_that_is_no_store_is_left_alone(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"a letter to my mother" * 100)
    with pytest.raises(StoreError, match="give another --store FILE"):
        Store(path)
    assert path.read_bytes().startswith(b"a letter")


def test_another_version_is_not_touched(path: Path) -> None:
    Store(path).close()
    database = sqlite3.connect(path)
    database.execute("PRAGMA user_version=9")
    database.close()
    for _ in range(2):  # the lock is given back each time
        with pytest.raises(StoreError, match="has format 9, this kvlens reads 1"):
            Store(path)


def test_the_default_is_in_the_state_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_store() == tmp_path / "kvlens" / "findings.db"
    monkeypatch.delenv("XDG_STATE_HOME")
    assert default_store() == Path.home() / ".local" / "state" / "kvlens" / "findings.db"
