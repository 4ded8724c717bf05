"""The table of held rows."""

from __future__ import annotations

from rich.console import JustifyMethod
from rich.text import Text
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable

from kvlens.observer.schema import RowState
from kvlens.tui.model import MISSING, View, age, matches, number, sort_rows

COLUMNS = (
    ("row", "row", 4), ("generation", "gen", 4), ("request", "request", 24), ("phase", "phase", 8),
    ("protected", "prot", 5), ("committed", "commit", 6), ("allocated", "alloc", 5), ("age", "age", 9),
)  # fmt: skip
MOST_SHOWN = 200
REQUEST_LEAST, REQUEST_MOST = 20, 48


class RowTable(DataTable[Text]):
    """Rows by (engine, row, generation): only what changed is written, and the cursor stays with its row."""

    class Opened(Message):
        """Enter was pressed on a row whose request is known."""

        def __init__(self, row: RowState) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", zebra_stripes=False, cell_padding=1)
        self.sort_by = "allocated"
        self.wanted = ""
        self._shown: dict[str, RowState] = {}
        self._cells: dict[str, tuple[str, ...]] = {}
        self._styles: dict[str, str] = {}

    def on_mount(self) -> None:
        for key, label, width in COLUMNS:
            justify: JustifyMethod = "left" if key in ("request", "phase") else "right"
            self.add_column(Text(label, justify=justify), key=key, width=width)

    def on_resize(self) -> None:
        """The request takes what the figures leave."""
        figures = sum(width for key, _, width in COLUMNS if key != "request")
        room = self.size.width - figures - 2 * self.cell_padding * len(COLUMNS) - 1
        for column in self.columns.values():
            if column.key.value == "request":
                column.width = min(max(REQUEST_LEAST, room), REQUEST_MOST)
        self.refresh(layout=True)

    def show_view(self, view: View) -> None:
        """Bring the table to what a view says."""
        rows = sort_rows((row for row in view.rows if matches(row, self.wanted)), self.sort_by)[:MOST_SHOWN]
        shown = {f"{row.engine}/{row.row}.{row.generation}": row for row in rows}
        chosen = self.chosen_key()
        for key in [key for key in self._shown if key not in shown]:
            self.remove_row(key)
            del self._cells[key]
        for key, row in shown.items():
            self._put(key, row, view.fetched_at or view.now)  # of an observer that is gone, no row grows older
        order = {key: place for place, key in enumerate(shown)}
        if list(shown) != [str(row.key.value) for row in self.ordered_rows]:
            self._sort_to(order)
        self._shown = shown
        if chosen in order:
            self.move_cursor(row=order[chosen], animate=False)

    def chosen_key(self) -> str | None:
        """The key under the cursor."""
        if not self.row_count:
            return None
        return self.coordinate_to_cell_key(Coordinate(self.cursor_row, 0)).row_key.value

    def _put(self, key: str, row: RowState, now: float) -> None:
        cells = _cells(row, now)
        known = self._cells.get(key)
        style = "bold red" if row.phase == "orphan" else ""
        if known is None:
            self.add_row(*(_text(cell, place, style) for place, cell in enumerate(cells)), key=key)
        else:
            for place, (cell, before) in enumerate(zip(cells, known, strict=True)):
                if cell != before or style != self._styles[key]:
                    self.update_cell(key, COLUMNS[place][0], _text(cell, place, style))
        self._cells[key], self._styles[key] = cells, style

    def _sort_to(self, order: dict[str, int]) -> None:
        places = {
            self._cells[key][0] + self._cells[key][1] + self._cells[key][2]: place for key, place in order.items()
        }
        self.sort(
            "row", "generation", "request",
            key=lambda cells: places.get("".join(cell.plain.strip() for cell in cells), len(places)),
        )  # fmt: skip

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        event.stop()
        row = self._shown.get(str(event.row_key.value))
        if row is not None:
            self.post_message(self.Opened(row))


def _cells(row: RowState, now: float) -> tuple[str, ...]:
    return (
        str(row.row), str(row.generation), row.request_id or MISSING, row.phase, number(row.protected_tokens),
        number(row.committed_tokens), number(row.allocated_tokens), age(now - row.taken_at),
    )  # fmt: skip


def _text(cell: str, place: int, style: str) -> Text:
    return Text(cell, style, justify="left" if place in (2, 3) else "right", no_wrap=True, overflow="ellipsis")
