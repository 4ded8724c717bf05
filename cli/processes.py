"""Child processes of the demo: started, waited for until they serve, and never left behind."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType

from kvlens import KvlensError

_READY = re.compile(r"ready on (http://\S+)")


class Served:
    """One `kvlens` command that serves HTTP; a context manager that ends it. `url` is where it listens."""

    def __init__(self, name: str, arguments: list[str], log: Path, start_timeout: float = 120.0) -> None:
        self.name = name
        self._arguments = arguments
        self._log = log
        self._timeout = start_timeout
        self._ready = threading.Event()
        self.url = ""
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Served:
        command = [sys.executable, "-m", "kvlens", *self._arguments]
        with self._log.open("w") as log:
            # A session of its own: Ctrl-C reaches only the parent, which then ends its children in order.
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        threading.Thread(target=self._follow, name=f"{self.name}-stdout", daemon=True).start()
        if not self._ready.wait(self._timeout) or not self.url:
            self.__exit__(None, None, None)
            raise KvlensError(f"{self.name} did not start: {self._last_words()}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process is None:
            return
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def check(self) -> None:
        """Raises KvlensError with its last words if the process has ended."""
        if self.process is not None and self.process.poll() is not None:
            raise KvlensError(f"{self.name} ended with code {self.process.returncode}: {self._last_words()}")

    def _follow(self) -> None:
        assert self.process is not None and self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if found := _READY.search(line):
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()  # ended before it was ready

    def _last_words(self) -> str:
        lines = self._log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"
