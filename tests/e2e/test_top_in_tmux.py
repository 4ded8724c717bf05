"""`kvlens top` in a real terminal: small and large, with and without colour, with its observer gone and back."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

ENGINE = ("--pool-slots", "2048", "--page-size", "16", "--allow-faults")


class Terminal:
    """One tmux server of its own."""

    def __init__(self) -> None:
        self._socket = f"kvlens-{uuid.uuid4().hex[:8]}"

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-L", self._socket, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout

    def run(self, columns: int, lines: int, command: str, **environment: str) -> None:
        settings = [f"{name}={value}" for name, value in environment.items()]
        shell = " ".join(["env", *settings, command])
        self.tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), "-s", "s", shell)

    def screen(self) -> str:
        return self.tmux("capture-pane", "-p", "-t", "s")

    def press(self, *keys: str) -> None:
        self.tmux("send-keys", "-t", "s", *keys)

    def close(self) -> None:
        subprocess.run(["tmux", "-L", self._socket, "kill-server"], capture_output=True)


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture
def shows(staging, terminal) -> Callable[[str], str]:
    """Waits until the screen has a text; the screen."""
    return lambda text: staging.wait_for(lambda: (seen := terminal.screen()) and text in seen and seen, 40)


def top(url: str) -> str:
    return f"{sys.executable} -m kvlens top {url}"


@pytest.mark.parametrize(
    ("columns", "lines", "environment"),
    [(80, 24, {}), (200, 60, {}), (80, 24, {"NO_COLOR": "1", "TERM": "vt100"})],
    ids=["small", "large", "no colour"],
)
def test_it_shows_who_holds_what_and_nothing_is_wider_than_the_screen(
    stage, staging, terminal, shows, columns, lines, environment
) -> None:
    engine, observer = stage.engine(*ENGINE), stage.observer()
    terminal.run(columns, lines, top(observer.url), **environment)
    shows("every slot is accounted for")
    body = {"model": "builtin", "prompt": "They walked", "max_tokens": 900, "rid": "watched", "ignore_eos": True}
    asking = subprocess.Popen(
        [sys.executable, "-c", ASK, f"{engine.url}/v1/completions", str(body)], stdout=subprocess.DEVNULL
    )
    screen = shows("watched")
    assert ("running" in screen and "size 2,048 =" in screen) or "2,048 = free" in screen
    assert all(len(line) <= columns for line in screen.splitlines())
    terminal.press("Enter")
    assert "first_token" in shows("scheduled")
    terminal.press("Escape")
    shows("held rows")
    asking.wait(60)
    terminal.press("q")


ASK = """
import ast, json, sys, urllib.request
body = json.dumps(ast.literal_eval(sys.argv[2])).encode()
urllib.request.urlopen(urllib.request.Request(sys.argv[1], body, {"Content-Type": "application/json"})).read()
"""


def test_it_says_that_the_observer_is_gone_and_that_it_is_back(stage, staging, terminal, shows) -> None:
    stage.engine(*ENGINE)
    observer = stage.observer()
    port = observer.url.rsplit(":", 1)[1]
    terminal.run(80, 24, top(observer.url))
    shows("every slot is accounted for")
    staging.kill(observer)
    assert "nobody answers" in shows("the observer has not answered for")
    stage.observer("--port", port)
    shows("the observer is back")
    shows("every slot is accounted for")


def test_without_a_terminal_it_says_what_to_do() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvlens", "top", "http://127.0.0.1:1"],
        capture_output=True, text=True, timeout=30, env={**os.environ, "TERM": "dumb"},
    )  # fmt: skip
    assert done.returncode == 2 and "use `kvlens top --once`, or --json" in done.stderr
