"""What each request went through, as its timeline will tell it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, Final

from kvlens.observer.schema import Timeline, TimelineEntry

MOST_ENTRIES: Final = 512
"""Entries kept per request: the first ones and the last ones."""
MOST_ENDED: Final = 2000
"""Requests remembered after their end."""


@dataclass(slots=True)
class Story:
    """One request. Times are Unix seconds."""

    number: int
    rid: str | None
    trace: str | None
    queued_at: float
    prompt_tokens: int = 0
    max_new_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    outcome: str | None = None
    ended_at: float | None = None
    scheduled: bool = False
    row: int | None = None
    whole: bool = False
    """Followed from its first event on; only then is it exported."""
    entries: list[TimelineEntry] = field(default_factory=list)

    @property
    def last_event(self) -> str | None:
        """The last thing that happened to the request itself; a check that failed did not happen to it."""
        return next((entry.event for entry in reversed(self.entries) if entry.event != "check_failed"), None)

    def tell(self, at: float, event: str, step: int, **facts: Any) -> None:
        if len(self.entries) >= MOST_ENTRIES:
            del self.entries[MOST_ENTRIES // 2]
        self.entries.append(TimelineEntry(at, event, step, **facts))

    def timeline(self, engine: str, rank: str) -> Timeline:
        return Timeline(
            engine, rank, self.rid or f"request {self.number}", self.trace, self.prompt_tokens, self.max_new_tokens,
            self.output_tokens, self.cached_tokens, self.outcome, self.queued_at, self.ended_at, list(self.entries),
        )  # fmt: skip


class Stories:
    """Live requests by number, and the last that ended."""

    def __init__(self) -> None:
        self.live: dict[int, Story] = {}
        self._ended: OrderedDict[int, Story] = OrderedDict()
        self._by_rid: dict[str, Story] = {}

    def begin(self, story: Story) -> Story:
        self.live[story.number] = story
        if story.rid is not None:
            self._by_rid[story.rid] = story
        return story

    def end(self, number: int) -> Story | None:
        story = self.live.pop(number, None)
        if story is not None:
            self._ended[number] = story
            if len(self._ended) > MOST_ENDED:
                _, oldest = self._ended.popitem(last=False)
                if oldest.rid is not None and self._by_rid.get(oldest.rid) is oldest:
                    del self._by_rid[oldest.rid]
        return story

    def get(self, number: int) -> Story | None:
        """Live or ended."""
        return self.live.get(number) or self._ended.get(number)

    def by_rid(self, rid: str) -> Story | None:
        return self._by_rid.get(rid)

    def introduce(self, names: list[tuple[int, str, str | None]], at: float) -> None:
        """What a key frame says of requests this reader has not seen begin."""
        for number, rid, trace in names:
            known = self.get(number)
            if known is None:
                self.begin(Story(number, rid, trace, at))
            elif known.rid is None:
                known.rid, known.trace = rid, trace
                self._by_rid[rid] = known
