"""The first screen: is it healthy; if not which pool, how much, whose, since when."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.screen import Screen
from textual.widgets import Footer, Input, Static

from kvlens.tui.model import SORTS, View
from kvlens.tui.screens.timeline import TimelineScreen
from kvlens.tui.widgets.bars import PoolBars
from kvlens.tui.widgets.findings import FindingList
from kvlens.tui.widgets.rows import MOST_SHOWN, RowTable
from kvlens.tui.widgets.status import EngineLines, StatusLine


class OverviewScreen(Screen[None]):
    """Shows the last view it was given."""

    BINDINGS = [
        Binding("slash", "filter", "Filter"),
        Binding("s", "sort", "Sort"),
        Binding("tab", "app.focus_next", "Next pane"),
        Binding("enter", "noop", "Timeline", show=True),
        Binding("escape", "clear_filter", "Clear", show=False),
    ]

    def compose(self) -> ComposeResult:
        yield StatusLine(id="status")
        yield EngineLines(id="engines")
        yield PoolBars(id="pools")
        yield FindingList(id="findings")
        with Vertical(id="held"):
            yield Static(id="caption", markup=False)
            yield RowTable(id="rows")
        yield Input(placeholder="words to look for in engine, row, request, phase, trace", id="filter")
        yield Footer()

    def on_mount(self) -> None:
        self.query_one("#findings").display = False
        self.query_one("#filter").display = False
        self.query_one(RowTable).focus()
        self.show_view(self._last_view())

    def on_screen_resume(self) -> None:
        self.show_view(self._last_view())

    def _last_view(self) -> View:
        return self.app.view  # type: ignore[attr-defined,no-any-return]

    def show_view(self, view: View) -> None:
        """Hand a view to every widget."""
        for widget in (self.query_one(StatusLine), self.query_one(EngineLines), self.query_one(PoolBars)):
            widget.view = view
        self.query_one(FindingList).show_view(view)
        table = self.query_one(RowTable)
        table.show_view(view)
        self.set_class(not view.is_connected and view.state is not None, "stale")
        self.query_one("#caption", Static).update(self._caption(view, table))

    def _caption(self, view: View, table: RowTable) -> str:
        shown = (
            f"{table.row_count:,} of {view.total_rows:,}"
            if table.row_count < view.total_rows
            else f"{view.total_rows:,}"
        )
        most = f", {MOST_SHOWN} at most" if table.row_count == MOST_SHOWN else ""
        wanted = f"  filter: {table.wanted}" if table.wanted else ""
        return f"held rows: {shown}{most}  by {table.sort_by}{wanted}"

    # -- keys -------------------------------------------------------------------------------------------------------

    def action_noop(self) -> None:
        """Enter belongs to the list that has the focus; the binding is there to be seen."""

    def action_sort(self) -> None:
        table = self.query_one(RowTable)
        table.sort_by = SORTS[(SORTS.index(table.sort_by) + 1) % len(SORTS)]
        self.show_view(self._last_view())

    def action_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def action_clear_filter(self) -> None:
        field = self.query_one("#filter", Input)
        field.value = ""
        field.display = False
        self.query_one(RowTable).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self.query_one(RowTable).wanted = event.value
        self.show_view(self._last_view())

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.input.display = False
        self.query_one(RowTable).focus()

    def on_row_table_opened(self, event: RowTable.Opened) -> None:
        row = event.row
        if row.request_id is None:
            self.notify(f"row {row.row} was taken before this observer looked: its request is not known", markup=False)
        else:
            self.app.push_screen(TimelineScreen(row.request_id))

    def on_finding_list_opened(self, event: FindingList.Opened) -> None:
        self.app.push_screen(TimelineScreen(event.finding.request_id, finding=event.finding))
