"""When a request has said enough."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from kvlens.engine.model.text import Decoder, TextStream
from kvlens.engine.record import FinishReason

if TYPE_CHECKING:
    from kvlens.engine.record import Req


class FinishRules:
    """End token, stop token, stop string, length; asked after every token, in this order."""

    def __init__(self, tokenizer: Decoder | None, eos_ids: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._texts: dict[int, TextStream] = {}

    def reason(self, req: Req) -> FinishReason | None:
        """Why the request ends with its last token, or None."""
        token, sampling = req.output_ids[-1], req.sampling
        if (token in self._eos_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return FinishReason("stop", matched=token)
        if sampling.stop and self._tokenizer is not None:
            text = self._texts.get(req.number)
            if text is None:
                text = self._texts[req.number] = TextStream(self._tokenizer, sampling.stop)
            text.push((token,))
            if text.matched is not None:
                return FinishReason("stop", matched=text.matched)
        if len(req.output_ids) >= sampling.max_new_tokens:
            return FinishReason("length")
        return None

    def forget(self, req: Req) -> None:
        """The request is gone."""
        self._texts.pop(req.number, None)
