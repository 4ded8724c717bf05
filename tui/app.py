"""The terminal dashboard: a client of one observer."""

from __future__ import annotations

from typing import Protocol

from textual.app import App
from textual.binding import Binding

from kvlens.observer.schema import Timeline
from kvlens.tui.model import View
from kvlens.tui.screens.help import HelpScreen
from kvlens.tui.screens.overview import OverviewScreen


class Client(Protocol):
    """Where views come from."""

    view: View

    async def refresh(self) -> View: ...
    async def timeline(self, rid: str) -> Timeline | str: ...
    async def close(self) -> None: ...


class KvlensApp(App[None]):
    """Fetches a view twice a second and hands it to the screen in front; a slow answer delays no key."""

    TITLE = "kvlens"
    CSS_PATH = "kvlens.tcss"
    ENABLE_COMMAND_PALETTE = False
    BINDINGS = [Binding("q", "quit", "Quit"), Binding("question_mark", "help", "Help")]

    def __init__(self, client: Client, refresh_seconds: float = 0.5) -> None:
        super().__init__()
        self.client = client
        self._refresh_seconds = refresh_seconds
        self._fetching = False

    @property
    def view(self) -> View:
        """The newest view."""
        return self.client.view

    async def on_mount(self) -> None:
        await self.push_screen(OverviewScreen())
        self.set_interval(self._refresh_seconds, self._tick)
        self._tick()

    def _tick(self) -> None:
        if not self._fetching:  # the last answer is still on its way: there is nothing to add
            self._fetching = True
            self.run_worker(self._fetch())

    async def _fetch(self) -> None:
        try:
            view = await self.client.refresh()
        finally:
            self._fetching = False
        if isinstance(self.screen, OverviewScreen):
            self.screen.show_view(view)

    def action_help(self) -> None:
        self.push_screen(HelpScreen())

    async def on_unmount(self) -> None:
        await self.client.close()
