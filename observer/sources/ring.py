"""A ring file as a source of frames: followed through restarts of its engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kvlens.observer.frames import FrameError, decode
from kvlens.observer.recorder import RingError, RingReader
from kvlens.observer.schema import Frame, Identity

MOST_PER_POLL: Final = 2000
"""Frames decoded in one go, so that catching up does not starve the HTTP server."""


@dataclass(slots=True)
class Poll:
    """What one look at the ring brought. `identity` is set when another instance begins with these frames."""

    identity: Identity | None = None
    frames: list[tuple[int, Frame]] = field(default_factory=list)
    lost: int = 0
    more: bool = False


class RingSource:
    """The ring at `path`, and whatever takes its name later. Waits for a file that is not there yet."""

    def __init__(self, path: Path) -> None:
        """Raises RingError when the file is there and is no ring of this version."""
        self.path = path
        self.problem: str | None = None
        self._reader: RingReader | None = RingReader(path) if path.exists() else None
        self._announced = False
        self._lost = 0
        self._pid = 0
        self._closed = False

    @property
    def status(self) -> str:
        """up, stalled or down; down also while there is nothing to read."""
        if self._reader is None:
            return "down"
        try:
            return self._reader.status()
        except RingError as error:
            self.problem = str(error)
            return "down"

    @property
    def is_closed(self) -> bool:
        """The engine ended cleanly."""
        try:
            return self._reader.is_closed if self._reader is not None else self._closed
        except RingError:
            return False

    @property
    def pid(self) -> int:
        return self._reader.pid if self._reader is not None else self._pid

    def poll(self) -> Poll:
        """Frames since the last call. A successor is only begun when its predecessor has been read to the end."""
        result = Poll()
        if self._reader is None and not self._open():
            return result
        assert self._reader is not None
        if not self._announced:
            self._announced = True
            result.identity = self._reader.identity
        try:
            records = self._reader.read(MOST_PER_POLL)
        except RingError as error:
            self.problem = str(error)
            records = []
        result.more = len(records) == MOST_PER_POLL
        result.lost, self._lost = self._reader.lost - self._lost, self._reader.lost
        for record in records:
            try:
                result.frames.append((record.sequence, decode(record.payload)))
            except FrameError as error:
                self.problem = str(error)
        if not records and self._reader.is_replaced:
            self.close()
        return result

    def _open(self) -> bool:
        if not self.path.exists():
            return False
        try:
            self._reader = RingReader(self.path)
        except RingError as error:
            self.problem = str(error)
            return False
        self.problem = None
        self._announced = False
        self._lost = 0
        return True

    def close(self) -> None:
        """Let go of the file. How its engine ended is remembered until a successor is there."""
        if self._reader is not None:
            self._closed, self._pid = self.is_closed, self._reader.pid
            self._reader.close()
            self._reader = None
