"""Findings on disk, with the place in each recorder up to which they are complete."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvlens import KvlensError
from kvlens.observer.findings import resolved
from kvlens.observer.schema import Finding, Identity

VERSION: Final = 1
_SCHEMA = """
CREATE TABLE IF NOT EXISTS findings (
    id TEXT PRIMARY KEY, instance TEXT NOT NULL, rank TEXT NOT NULL, subject TEXT NOT NULL,
    state TEXT NOT NULL, opened_at REAL NOT NULL, body BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS cursors (
    instance TEXT NOT NULL, rank TEXT NOT NULL, sequence INTEGER NOT NULL, PRIMARY KEY (instance, rank)
);
"""


class StoreError(KvlensError):
    """The findings cannot be kept there; the message says what to do."""


def default_store() -> Path:
    """`$XDG_STATE_HOME/kvlens/findings.db`."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kvlens" / "findings.db"


class Store:
    """One SQLite file, written by one observer. Findings and cursor change in one transaction: exactly once."""

    def __init__(self, path: Path) -> None:
        """Creates it. Raises StoreError when it is not writable, of another version, or another observer's."""
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"findings cannot be kept in {path} ({error.strerror}): give --store FILE") from None
        self._take_lock()
        try:
            self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._open()
        except (sqlite3.Error, StoreError) as error:
            os.close(self._lock)
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"findings cannot be kept in {path} ({error}): give another --store FILE") from None

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._lock, 20, 0).decode(errors="replace").strip() or "another process"
            os.close(self._lock)
            raise StoreError(
                f"{self.path} is in use by the observer with pid {holder}: stop it, or give --store FILE"
            ) from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(os.getpid()).encode(), 0)

    def _open(self) -> None:
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        version = self._db.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, VERSION):
            raise StoreError(
                f"{self.path} has format {version}, this kvlens reads {VERSION}: give another --store FILE"
            )
        self._db.executescript(_SCHEMA)
        self._db.execute(f"PRAGMA user_version={VERSION}")

    def close(self) -> None:
        self._db.close()
        os.close(self._lock)

    # -- writing ----------------------------------------------------------------------------------------------------

    def commit(self, identity: Identity, sequence: int, changed: Iterable[tuple[str, Finding]]) -> None:
        """Findings (subject, finding) that changed, and the last frame they came from. Raises StoreError."""
        try:
            with self._transaction():
                self._db.executemany(
                    "INSERT OR REPLACE INTO findings VALUES (?, ?, ?, ?, ?, ?, ?)",
                    [
                        (
                            finding.id, identity.instance, identity.rank, subject, finding.state.value,
                            finding.opened_at, msgspec.json.encode(finding),
                        )
                        for subject, finding in changed
                    ],
                )  # fmt: skip
                self._db.execute(
                    "INSERT OR REPLACE INTO cursors VALUES (?, ?, ?)", (identity.instance, identity.rank, sequence)
                )
        except sqlite3.Error as error:
            raise StoreError(f"findings cannot be written to {self.path}: {error}") from None

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- reading ----------------------------------------------------------------------------------------------------

    def cursor(self, identity: Identity) -> int:
        """Sequence of the last frame whose findings are here; 0 for an instance never seen."""
        row = self._db.execute(
            "SELECT sequence FROM cursors WHERE instance = ? AND rank = ?", (identity.instance, identity.rank)
        ).fetchone()
        return int(row[0]) if row else 0

    def unresolved(self, identity: Identity) -> list[tuple[str, Finding]]:
        """Subject and finding of what an instance left open."""
        return [
            (subject, msgspec.json.decode(body, type=Finding))
            for subject, body in self._db.execute(
                "SELECT subject, body FROM findings WHERE instance = ? AND rank = ? AND state != 'resolved'",
                (identity.instance, identity.rank),
            )
        ]

    def resolve_predecessors(self, identity: Identity, now: float, before: float = math.inf) -> None:
        """Findings that earlier instances of the same engine left open: what they held is gone with them.

        before: Unix seconds; what was opened later stays. For an instance that has ended itself: a later one may live.
        """
        rows = self._db.execute(
            "SELECT instance, subject, body FROM findings WHERE state != 'resolved' AND instance != ?",
            (identity.instance,),
        ).fetchall()
        for instance, subject, body in rows:
            finding = msgspec.json.decode(body, type=Finding)
            if (finding.engine, finding.rank) == (identity.name, identity.rank) and finding.opened_at < before:
                earlier = msgspec.structs.replace(identity, instance=instance)
                self.commit(earlier, self.cursor(earlier), [(subject, resolved(finding, now))])

    def all(self, limit: int = 1000) -> list[Finding]:
        """What is not resolved first, then the newest; at most `limit`."""
        query = "SELECT body FROM findings ORDER BY state = 'resolved', opened_at DESC LIMIT ?"
        return [msgspec.json.decode(body, type=Finding) for (body,) in self._db.execute(query, (limit,))]
