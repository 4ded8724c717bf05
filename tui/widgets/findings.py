"""Open findings, the worst thing on the screen first."""

from __future__ import annotations

from rich.text import Text
from textual.message import Message
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from kvlens.observer.schema import Finding
from kvlens.tui.model import View, age


class FindingList(OptionList):
    """What, who, how much, since; one line each. Hidden while there is none."""

    class Opened(Message):
        """Enter was pressed on a finding."""

        def __init__(self, finding: Finding) -> None:
            super().__init__()
            self.finding = finding

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._findings: tuple[Finding, ...] = ()

    def show_view(self, view: View) -> None:
        """Draw the findings of a view, keeping the one under the cursor."""
        chosen = self.highlighted
        ids = tuple(finding.id for finding in view.findings)
        if ids != tuple(finding.id for finding in self._findings):
            self.clear_options()
            self.add_options([Option(_line(finding, view.now), id=finding.id) for finding in view.findings])
            self.highlighted = min(chosen or 0, len(ids) - 1) if ids else None
        else:
            for finding in view.findings:
                self.replace_option_prompt(finding.id, _line(finding, view.now))
        self._findings = view.findings
        self.display = bool(ids)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.Opened(self._findings[event.option_index]))


def _line(finding: Finding, now: float) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"▲ {finding.kind.value}", "bold red" if finding.severity.value == "critical" else "bold yellow")
    text.append(f"  {finding.summary}")
    text.append(f"  {age(now - finding.opened_at)} ago", "dim")
    if finding.state.value == "acknowledged":
        text.append("  acknowledged", "yellow")
    return text
