"""Text that grows with its tokens, and ends at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

_UNFINISHED = "\ufffd"


class Decoder(Protocol):
    def decode(self, ids: Sequence[int]) -> str: ...


class TextStream:
    """Detokenises step by step. Holds back bytes that are no character yet, and text that may begin a stop string."""

    def __init__(self, tokenizer: Decoder, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._context = 0  # tokens from here on are decoded together: a token's text can depend on the one before
        self._decoded = 0  # tokens up to here have become text
        self._sent = 0  # characters of the window from `_context` on that were handed out
        self._held = ""
        self.matched: str | None = None
        """The stop string that was reached; text ends before it."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that is now certain. Nothing more once a stop string matched."""
        if self.matched is not None:
            return ""
        self._ids.extend(ids)
        return self._release(self._new_text(final=False))

    def finish(self) -> str:
        """What was held back, now that no more tokens come."""
        if self.matched is not None:
            return ""
        text = self._release(self._new_text(final=True))
        if self.matched is None:
            text, self._held = text + self._held, ""
        return text

    def _new_text(self, final: bool) -> str:
        text = self._tokenizer.decode(self._ids[self._context :])
        certain = len(text) if final else len(text.rstrip(_UNFINISHED))
        new = text[self._sent : certain]
        self._sent = max(self._sent, certain)
        if certain == len(text):
            self._context, self._decoded = self._decoded, len(self._ids)
            self._sent = len(self._tokenizer.decode(self._ids[self._context :]))
        return new

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if found:
            at, self.matched = min(found, key=lambda match: match[0])
            self._held = ""
            return text[:at]
        keep = max((self._overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0
