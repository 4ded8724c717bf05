"""The life of one request, and what a finding says about it."""

from __future__ import annotations

import time

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from kvlens.observer.schema import Finding, Timeline, TimelineEntry
from kvlens.tui.model import MISSING, age, number

COLUMNS = (("after", 11), ("event", 15), ("step", 9), ("row.gen", 7), ("prot", 6), ("commit", 6), ("alloc", 6))


class TimelineScreen(Screen[None]):
    """Esc leads back."""

    BINDINGS = [Binding("escape", "app.pop_screen", "Back"), Binding("r", "reload", "Reload")]

    def __init__(self, rid: str | None, finding: Finding | None = None) -> None:
        super().__init__()
        self._rid = rid
        self._finding = finding
        self._details: list[str] = []

    def compose(self) -> ComposeResult:
        yield Static(id="request", markup=False)
        yield Static(_finding_text(self._finding) if self._finding is not None else "", id="finding", markup=False)
        yield DataTable(id="entries", cursor_type="row")
        yield Static(id="detail", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        table = self.query_one(DataTable)
        for label, width in COLUMNS:
            table.add_column(Text(label, justify="left" if label == "event" else "right"), width=width)
        self.query_one("#finding").display = self._finding is not None
        table.focus()
        self.action_reload()

    def action_reload(self) -> None:
        self.run_worker(self._load(), exclusive=True)

    async def _load(self) -> None:
        head = self.query_one("#request", Static)
        if self._rid is None:
            head.update("the request behind this finding is not known")
            return
        answer = await self.app.client.timeline(self._rid)  # type: ignore[attr-defined]
        if isinstance(answer, str):
            head.update(f"{self._rid}: {answer}")
            return
        head.update(_head(answer))
        table = self.query_one(DataTable)
        table.clear()
        self._details = [_detail(entry) for entry in answer.entries]
        for entry in answer.entries:
            table.add_row(*_cells(entry, answer.queued_at))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """What more there is to the entry under the cursor."""
        detail = self._details[event.cursor_row] if event.cursor_row < len(self._details) else ""
        self.query_one("#detail", Static).update(Text(detail, "dim"))


def _head(timeline: Timeline) -> Text:
    text = Text(f"request {timeline.request_id}", "bold", no_wrap=True, overflow="ellipsis")
    ended = timeline.outcome or "running"
    text.append(f"  {ended}", "bold red" if ended == "abort" else "green")
    text.append(
        f"\n{timeline.engine}  prompt {timeline.prompt_tokens:,} ({timeline.cached_tokens:,} cached)  "
        f"output {timeline.output_tokens:,} of at most {timeline.max_new_tokens:,}",
        "dim",
    )
    return text


def _finding_text(finding: Finding) -> Text:
    text = Text(f"▲ {finding.kind.value}: {finding.summary}", "bold red")
    text.append(f"\nopen for {age(time.time() - finding.opened_at)}, since step {finding.opened_step:,}", "")
    evidence = "  ".join(f"{name} {value:,}" for name, value in finding.evidence.items())
    text.append(f"\n{evidence}", "dim")
    text.append(f"\ntrace {finding.trace_id or MISSING}   what to do: {finding.runbook}", "cyan")
    return text


def _cells(entry: TimelineEntry, queued_at: float) -> list[Text]:
    tenancy = f"{entry.row}.{entry.generation}" if entry.row is not None else MISSING
    style = "bold red" if entry.event in ("check_failed", "abort_requested") else ""
    figures = (entry.protected_tokens, entry.committed_tokens, entry.allocated_tokens)
    right = [f"+{max(0.0, entry.at - queued_at):.3f} s", entry.event, f"{entry.step:,}", tenancy, *map(number, figures)]
    return [Text(cell, style, justify="left" if place == 1 else "right") for place, cell in enumerate(right)]


def _detail(entry: TimelineEntry) -> str:
    return "  ".join(f"{name} {value}" for name, value in entry.detail.items() if value not in ("", None))
