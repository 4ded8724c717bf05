"""Engine and observer as real processes, for scenarios and end-to-end tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvlens.cli.processes import Served

T = TypeVar("T")


class Stage:
    """Starts what a test asks for, in a directory of its own, and ends it all afterwards."""

    def __init__(self, home: Path, stack: contextlib.ExitStack) -> None:
        self.home = home
        self.ring = home / "engine.ring"
        self.store = home / "findings.db"
        self._stack = stack
        self._started = 0

    def engine(self, *options: str, ring: Path | None = None, name: str = "stage") -> Served:
        arguments = ["serve", "--port", "0", "--engine-name", name, "--ring", str(ring or self.ring), *options]
        return self._start("the engine", arguments)

    def observer(self, *options: str, rings: tuple[Path, ...] | None = None) -> Served:
        followed = [part for ring in rings or (self.ring,) for part in ("--ring", str(ring))]
        return self._start("the observer", ["observe", "--port", "0", "--store", str(self.store), *followed, *options])

    def _start(self, name: str, arguments: list[str]) -> Served:
        self._started += 1
        return self._stack.enter_context(Served(name, arguments, self.home / f"{self._started}.log"))

    def said(self, number: int) -> str:
        """What the process that was started as `number` wrote to stderr."""
        return (self.home / f"{number}.log").read_text()


def kill(served: Served) -> None:
    """SIGKILL, and wait for its end."""
    assert served.process is not None
    os.kill(served.process.pid, signal.SIGKILL)
    served.process.wait()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as response:
        return json.load(response)


def post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_for(what: Callable[[], T], seconds: float = 30) -> T:
    """The first true answer of `what`; an AssertionError with the last one after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (answer := what()):
        assert time.monotonic() < deadline, f"still {answer!r} after {seconds} s"
        time.sleep(0.05)
    return answer


@contextlib.contextmanager
def stage_in(home: Path) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        yield Stage(home, stack)
