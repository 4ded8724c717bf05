"""Pools as stacked bars."""

from __future__ import annotations

from rich.text import Text
from textual.reactive import reactive
from textual.widget import Widget

from kvlens.observer.schema import PoolState
from kvlens.tui.model import POOL_STATES, View, equation, shares

# A state is told by its character as well as by its colour.
LOOK = {
    "free": ("·", "bright_black"),
    "evictable": ("░", "cyan"),
    "protected": ("▒", "blue"),
    "private": ("█", "green"),
    "session": ("▓", "magenta"),
    "unaccounted": ("!", "bold red"),
}


def bar(pool: PoolState, width: int) -> Text:
    """One pool in `width` cells."""
    text = Text(no_wrap=True)
    for state, cells in shares(pool, width):
        character, style = LOOK[state]
        text.append(character * cells, style)
    return text


def legend() -> Text:
    text = Text(no_wrap=True)
    for state in POOL_STATES:
        character, style = LOOK[state]
        text.append(f"{character} ", style)
        text.append(f"{state}  ", "dim")
    return text


class PoolBars(Widget):
    """One line of bar and one of account per pool. Draws the last view given; never asks for one."""

    view: reactive[View | None] = reactive(None, layout=True)

    def render(self) -> Text:
        lines: list[Text] = []
        state = self.view.state if self.view is not None else None
        several = state is not None and len(state.engines) > 1
        for engine in state.engines if state is not None else ():
            for pool in engine.pools:
                name = f"{engine.engine}/{pool.pool}"[:18] if several else pool.pool
                head = Text(f"{name:<{18 if several else 5}} ", no_wrap=True)
                width = max(10, self.content_size.width - len(head) - 14)
                line = head + bar(pool, width) + Text(f" {pool.size_slots:>7,} {pool.unit}s", "dim")
                room = (self.content_size.width or 200) - 2
                account = Text(f"  {equation(pool, room)}", "bold red" if pool.unaccounted else "dim", no_wrap=True)
                account.truncate(room + 2, overflow="ellipsis")
                lines += [line, account]
        if not lines:
            return Text("no pool known yet", "dim")
        return Text("\n").join([*lines, legend()])
