"""The dashboard, driven by keys, and compared with pictures at the sizes it promises."""

from __future__ import annotations

import msgspec
import pytest

from kvlens.observer.schema import State
from kvlens.tui.screens.timeline import TimelineScreen
from kvlens.tui.widgets.findings import FindingList
from kvlens.tui.widgets.rows import RowTable

SIZES = {"80x24": (80, 24), "200x60": (200, 60)}


async def settle(pilot) -> None:
    for _ in range(3):
        await pilot.pause()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("view", ["healthy", "leaking", "gone", "nothing"])
async def test_the_overview_looks_like_its_picture(an_app, views, compare_screen, view, size) -> None:
    app = an_app(views[view]())
    async with app.run_test(size=SIZES[size]) as pilot:
        await settle(pilot)
        compare_screen(app, f"overview-{view}-{size}")


@pytest.mark.parametrize("size", SIZES)
async def test_the_timeline_of_a_leak_looks_like_its_picture(an_app, views, compare_screen, size) -> None:
    app = an_app(views["leaking"]())
    async with app.run_test(size=SIZES[size]) as pilot:
        await settle(pilot)
        app.screen.query_one(FindingList).focus()
        await pilot.press("enter")
        await settle(pilot)
        assert isinstance(app.screen, TimelineScreen)
        compare_screen(app, f"timeline-{size}")
        await pilot.press("escape")
        assert not isinstance(app.screen, TimelineScreen)


async def test_the_help_looks_like_its_picture(an_app, views, compare_screen) -> None:
    app = an_app(views["healthy"]())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("question_mark")
        await settle(pilot)
        compare_screen(app, "help-80x24")


async def test_it_is_the_same_picture_without_colour(an_app, views, compare_screen, monkeypatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    app = an_app(views["leaking"]())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        compare_screen(app, "overview-leaking-80x24")


# -- keys -------------------------------------------------------------------------------------------------------------


def shown_rows(app) -> list[str]:
    table = app.screen.query_one(RowTable)
    return [str(row.key.value).rsplit("/", 1)[1] for row in table.ordered_rows]


async def test_orphans_come_first_and_s_changes_the_order_of_the_others(an_app, views) -> None:
    app = an_app(views["leaking"]())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        assert shown_rows(app) == ["9.4", "14.3", "15.2", "16.1"]
        await pilot.press("s")
        assert app.screen.query_one(RowTable).sort_by == "age" and shown_rows(app) == ["9.4", "14.3", "15.2", "16.1"]
        await pilot.press("s", "s")
        assert app.screen.query_one(RowTable).sort_by == "phase"
        await pilot.press("s")
        assert shown_rows(app) == ["9.4", "14.3", "15.2", "16.1"]


async def test_the_cursor_follows_its_row_when_others_come_go_and_grow(an_app, views) -> None:
    view = views["healthy"]()
    app = an_app(view)
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await pilot.press("down")
        table = app.screen.query_one(RowTable)
        assert table.chosen_key().endswith("15.2")
        first, second, third = view.rows
        grown = msgspec.structs.replace(first, allocated_tokens=900, committed_tokens=900)
        new = msgspec.structs.replace(third, row=3, generation=9, allocated_tokens=500)
        app.client.view = view.answered(view.now, view.state, (grown, second, new), 3)
        app._tick()
        await settle(pilot)
        assert shown_rows(app) == ["16.1", "3.9", "15.2"]
        assert table.chosen_key().endswith("15.2")


async def test_only_cells_that_changed_are_written(an_app, views, monkeypatch) -> None:
    view = views["healthy"]()
    app = an_app(view)
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        written = []
        update = RowTable.update_cell

        def noted(table: RowTable, row: str, column: str, value: object) -> None:
            written.append(column)
            update(table, row, column, value)

        monkeypatch.setattr(RowTable, "update_cell", noted)
        grown = msgspec.structs.replace(view.rows[0], allocated_tokens=101, committed_tokens=101)
        app.client.view = view.answered(view.now, view.state, (grown, *view.rows[1:]), 3)
        app._tick()
        await settle(pilot)
        assert sorted(written) == ["allocated", "committed"]


async def test_a_filter_survives_a_refresh_and_escape_clears_it(an_app, views) -> None:
    app = an_app(views["leaking"]())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await pilot.press("slash", *"orphan", "enter")
        assert shown_rows(app) == ["9.4"]
        app._tick()
        await settle(pilot)
        assert shown_rows(app) == ["9.4"]
        await pilot.press("escape")
        assert len(shown_rows(app)) == 4


async def test_enter_opens_the_timeline_of_the_row_under_the_cursor(an_app, views) -> None:
    app = an_app(views["leaking"]())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        await pilot.press("enter")
        await settle(pilot)
        assert app.screen._rid == "cmpl-lost"
        await pilot.press("escape", "down", "enter")
        await settle(pilot)
        assert "no request cmpl-000000000000000000000002 is known" in str(app.screen.query_one("#request").render())


async def test_it_says_when_the_observer_is_gone_and_when_it_is_back(an_app, views) -> None:
    app = an_app(views["gone"]())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        status = app.screen.query_one("#status")
        assert "the observer has not answered for 12 s: nobody answers at observer:80" in status.render().plain
        assert app.screen.has_class("stale")
        view = app.client.view
        app.client.view = view.answered(view.now + 1, view.state, view.rows, 3)
        app._tick()
        await settle(pilot)
        assert "the observer is back" in status.render().plain and not app.screen.has_class("stale")


async def test_findings_come_and_go(an_app, views) -> None:
    app = an_app(views["leaking"]())
    async with app.run_test(size=(120, 30)) as pilot:
        await settle(pilot)
        findings = app.screen.query_one(FindingList)
        assert findings.display and findings.option_count == 1
        view = views["healthy"]()
        app.client.view = view
        app._tick()
        await settle(pilot)
        assert not findings.display and findings.option_count == 0


async def test_four_thousand_rows_cost_what_is_shown(an_app, views) -> None:
    view = views["healthy"]()
    many = tuple(msgspec.structs.replace(view.rows[0], row=number, generation=1) for number in range(1, 4097))
    app = an_app(view.answered(view.now, view.state, many, 4096))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.screen.query_one(RowTable).row_count == 200
        assert "200 of 4,096, 200 at most" in str(app.screen.query_one("#caption").render())


async def test_q_leaves_and_closes_the_client(an_app, views) -> None:
    app = an_app(views["healthy"]())
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("q")
    assert app.client.closed


async def test_no_engine_is_no_mistake(an_app, views) -> None:
    view = views["nothing"]()
    app = an_app(view.answered(view.now, State(view.now, "0.1.0", [], []), (), 0))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "no engine yet" in app.screen.query_one("#status").render().plain


async def test_text_that_looks_like_markup_is_shown_as_it_is(an_app, views) -> None:
    view = views["healthy"]()
    odd = msgspec.structs.replace(view.rows[0], request_id="a[/b]", row=5)
    app = an_app(view.answered(view.now, view.state, (odd,), 1))
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("slash", "left_square_bracket", "slash", "enter")
        await settle(pilot)
        assert "filter: [/" in str(app.screen.query_one("#caption").render())
        await pilot.press("enter")
        await settle(pilot)
        assert "a[/b]: HTTP 404" in str(app.screen.query_one("#request").render())
