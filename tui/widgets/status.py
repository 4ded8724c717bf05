"""The first line: is it healthy, and how fresh is that?"""

from __future__ import annotations

from rich.text import Text
from textual.reactive import reactive
from textual.widget import Widget

from kvlens.tui.model import View, age, engine_line, verdict

MARKS = {"ok": ("●", "bold green"), "bad": ("▲", "bold red"), "gone": ("✗", "bold red"), "waiting": ("○", "yellow")}
BACK_SECONDS = 10


class StatusLine(Widget):
    """Verdict, and the age of what is shown."""

    view: reactive[View | None] = reactive(None, layout=True)

    def render(self) -> Text:
        view = self.view
        if view is None:
            return Text("○ starting", "yellow")
        level, sentence = verdict(view)
        mark, style = MARKS[level]
        text = Text(f"{mark} ", style, no_wrap=True)
        text.append(sentence, style)
        if view.back_at is not None and view.is_connected and view.now - view.back_at < BACK_SECONDS:
            text.append("  the observer is back", "bold green")
        if view.fetched_at is not None:
            text.append(f"   data {age(view.now - view.fetched_at)} old", "dim" if view.is_connected else "bold yellow")
        return text


class EngineLines(Widget):
    """One line per engine."""

    view: reactive[View | None] = reactive(None, layout=True)

    def render(self) -> Text:
        view = self.view
        if view is None or view.state is None or not view.state.engines:
            return Text("no engine: start one with `kvlens serve`", "dim")
        lines = []
        for engine in view.state.engines:
            style = "" if engine.status == "up" else "bold red"
            lines.append(Text(engine_line(engine, view.now), style, no_wrap=True))
        return Text("\n").join(lines)
