"""One picture for scripts, pipes and dumb terminals."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from kvlens.observer.schema import RowState, State
from kvlens.tui.model import MISSING, View, age, engine_line, equation, number, sort_rows, verdict
from kvlens.tui.widgets.bars import bar, legend
from kvlens.tui.widgets.status import MARKS

MOST_SHOWN = 40


def render_once(state: State, rows: Sequence[RowState], *, width: int, color: bool) -> str:
    """Verdict, engines, pools, findings and held rows; at most `width` columns, plain unless `color`."""
    console = Console(
        file=io.StringIO(), width=width, no_color=not color, force_terminal=color, highlight=False, legacy_windows=False
    )
    view = View("", state.at).answered(state.at, state, tuple(rows), len(rows))
    for line in _lines(view, width):
        line.no_wrap, line.overflow = True, "ellipsis"
        console.print(line)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())


def _lines(view: View, width: int) -> list[Text]:
    assert view.state is not None
    level, sentence = verdict(view)
    mark, style = MARKS[level]
    lines = [Text(f"{mark} {sentence}", style)]
    lines += [Text(engine_line(engine, view.now)) for engine in view.state.engines]
    for engine in view.state.engines:
        for pool in engine.pools:
            head = Text(f"{engine.engine}/{pool.pool} ")
            lines.append(
                head + bar(pool, max(10, width - len(head) - 16)) + Text(f" {pool.size_slots:>7,} {pool.unit}s")
            )
            lines.append(Text(f"  {equation(pool, width - 2)}", "bold red" if pool.unaccounted else "dim"))
    lines.append(legend())
    for finding in view.findings:
        lines.append(
            Text(f"▲ {finding.kind.value}: {finding.summary}, {age(view.now - finding.opened_at)} ago", "bold red")
        )
        lines.append(Text(f"  {finding.runbook}", "cyan"))
    lines.append(
        Text(f"{'row.gen':>9}  {'request':<34} {'phase':<9} {'prot':>6} {'commit':>6} {'alloc':>6} {'age':>8}", "dim")
    )
    ordered = sort_rows(view.rows, "allocated")
    lines += [_row(row, view.now) for row in ordered[:MOST_SHOWN]]
    if len(ordered) > MOST_SHOWN:
        lines.append(Text(f"... and {len(ordered) - MOST_SHOWN:,} more", "dim"))
    return lines


def _row(row: RowState, now: float) -> Text:
    tenancy, request = f"{row.row}.{row.generation}", (row.request_id or MISSING)[:34]
    return Text(
        f"{tenancy:>9}  {request:<34} {row.phase:<9} {number(row.protected_tokens):>6} "
        f"{number(row.committed_tokens):>6} {number(row.allocated_tokens):>6} {age(now - row.taken_at):>8}",
        "bold red" if row.phase == "orphan" else "",
    )
