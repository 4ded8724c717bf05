"""Where the observer's results go. Exporters implement it; the daemon is given them."""

from __future__ import annotations

from typing import Protocol

from kvlens.observer.schema import LedgerEvent, State, Timeline


class Sink(Protocol):
    """Called on the daemon's loop: must not block, must not raise."""

    def on_state(self, state: State) -> None:
        """About once a second: the newest snapshot."""
        ...

    def on_request_ended(self, timeline: Timeline) -> None:
        """Once per request that was followed from its beginning."""
        ...

    def on_event(self, event: LedgerEvent) -> None:
        """A finding or a check, as it happens."""
        ...

    def close(self) -> None:
        """The daemon stops: send what is left."""
        ...
