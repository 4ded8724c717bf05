"""Figures as people read them: what is missing looks missing, and nothing that is there disappears."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlens.observer.schema import PoolState
from kvlens.tui.model import MISSING, age, engine_line, equation, matches, number, shares, sort_rows, verdict
from kvlens.tui.once import render_once


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0.0 s"), (0.44, "0.4 s"), (12, "12 s"), (185, "3 m 05 s"), (7620, "2 h 07 m")],
)
def test_ages(seconds, text) -> None:
    assert age(seconds) == text


def test_a_missing_figure_is_no_zero() -> None:
    assert (number(None), number(0), number(12345.4)) == (MISSING, "0", "12,345")


def test_the_account_has_its_numbers_in_it_and_leaves_out_zeros_where_it_must() -> None:
    pool = PoolState("full", "slot", 1, 8192, 0, 6010, 1900, 128, 90, 0, 64)
    full = "size 8,192 = free 6,010 + evictable 1,900 + protected 128 + private 90 + session 0 + unaccounted 64"
    assert equation(pool) == full
    assert equation(pool, 78) == "8,192 = free 6,010+evictable 1,900+protected 128+private 90+unaccounted 64"


@given(st.lists(st.integers(0, 10_000), min_size=6, max_size=6).filter(any), st.integers(10, 150))
def test_a_bar_is_as_wide_as_it_should_be_and_shows_every_state_that_is_there(values, width) -> None:
    pool = PoolState("full", "slot", 1, sum(values), 0, *values)
    cells = dict(shares(pool, width))
    assert sum(cells.values()) == width
    assert all((cells[state] > 0) == (getattr(pool, state) > 0) for state in cells)


def test_a_negative_remainder_is_in_the_account_and_not_in_the_bar() -> None:
    pool = PoolState("full", "slot", 1, 10, 0, 12, 0, 0, 0, 0, -2)
    assert dict(shares(pool, 20))["unaccounted"] == 0 and "unaccounted -2" in equation(pool)


def test_verdicts(views) -> None:
    assert verdict(views["healthy"]()) == ("ok", "every slot is accounted for")
    assert verdict(views["leaking"]()) == ("bad", "1 finding open")
    assert verdict(views["gone"]())[0] == "gone"
    assert verdict(views["nothing"]()) == ("waiting", "connecting")
    view = views["healthy"]()
    dead = msgspec.structs.replace(view.state.engines[0], status="down", updated_at=view.now - 90)
    state = msgspec.structs.replace(view.state, engines=[dead])
    assert verdict(view.answered(view.now, state, (), 0)) == ("bad", "demo not up")
    assert "silent 1 m 30 s" in engine_line(dead, view.now) and "tok/s" not in engine_line(dead, view.now)


def test_rows_are_found_by_words(views) -> None:
    lost = views["leaking"]().rows[-1]
    assert matches(lost, "") and matches(lost, "ORPHAN demo") and matches(lost, "abab") and not matches(lost, "running")


@pytest.mark.parametrize("by", ["allocated", "age", "row", "phase"])
def test_every_order_puts_orphans_first_and_loses_nobody(views, by) -> None:
    rows = views["leaking"]().rows
    ordered = sort_rows(rows, by)
    assert ordered[0].phase == "orphan" and sorted(map(id, ordered)) == sorted(map(id, rows))


@pytest.mark.parametrize("width", [80, 120])
def test_one_picture_fits_its_width_and_has_no_escapes_without_colour(views, width) -> None:
    view = views["leaking"]()
    text = render_once(view.state, view.rows, width=width, color=False)
    assert "\x1b" not in text
    assert all(len(line) <= width for line in text.splitlines())
    assert "▲ 1 finding open" in text and "cmpl-lost" in text and "docs/runbooks/orphan-row.md" in text
    assert "\x1b[" in render_once(view.state, view.rows, width=width, color=True)
