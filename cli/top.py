"""`kvlens top`: the terminal dashboard, or one picture of it."""

from __future__ import annotations

import os
import shutil
import sys

import msgspec
import typer

from kvlens import KvlensError
from kvlens.cli.http import ask_observer
from kvlens.observer.schema import RowState, State


class _Rows(msgspec.Struct):
    rows: list[RowState]
    total: int
    at: float


def run_top(url: str, *, once: bool, as_json: bool, token: str | None) -> int:
    """The exit code. Raises KvlensError when there is no observer (`once`) or no terminal."""
    if once:
        return _print_once(url, as_json=as_json, token=token)
    if not sys.stdout.isatty():
        raise KvlensError("standard output is no terminal: use `kvlens top --once`, or --json")
    from kvlens.tui.app import KvlensApp
    from kvlens.tui.client import ObserverClient

    KvlensApp(ObserverClient(url, token)).run()
    return 0


def _print_once(url: str, *, as_json: bool, token: str | None) -> int:
    state = ask_observer(url, "/api/v1/state", State, token)
    rows = ask_observer(url, "/api/v1/rows", _Rows, token).rows
    if as_json:
        typer.echo(msgspec.json.encode({"state": state, "rows": rows}))
    else:
        from kvlens.tui.once import render_once

        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        typer.echo(render_once(state, rows, width=shutil.get_terminal_size((100, 24)).columns, color=color))
    return int(bool(state.findings_open))
