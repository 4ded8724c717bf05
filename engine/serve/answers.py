"""Answers as they grow, sent whole or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

from aiohttp import web

from kvlens.engine.engine import RequestRejected
from kvlens.engine.model.text import Decoder, TextStream
from kvlens.engine.record import FinishReason, SamplingParams
from kvlens.engine.schedule.scheduler import Output
from kvlens.engine.serve import openai


class Answer:
    """One choice: its text, and why it ended."""

    def __init__(self, outputs: AsyncIterator[Output], tokenizer: Decoder, sampling: SamplingParams) -> None:
        self._outputs = outputs
        self._stream = TextStream(tokenizer, sampling.stop)
        self._parts: list[str] = []
        self.finish: FinishReason | None = None
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    async def texts(self) -> AsyncIterator[str]:
        """The text that each output adds, which may be empty.

        Raises RequestRejected when the engine gave the request up; an abort that was asked for is an end like others.
        """
        async for output in self._outputs:
            text = self._stream.push(output.token_ids)
            if output.finish is not None:
                text += self._stream.finish()
                self.finish = output.finish
            self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens
            self.completion_tokens += len(output.token_ids)
            self._parts.append(text)
            if output.finish is not None and output.finish.is_abort and output.finish.status >= 500:
                raise RequestRejected(output.finish.message, output.finish.status, "aborted")
            yield text

    async def whole(self) -> str:
        """The text to its end. Raises RequestRejected, as `texts` does."""
        async for _ in self.texts():
            pass
        return "".join(self._parts)

    @property
    def reason(self) -> str | None:
        return self.finish.kind if self.finish is not None else None


async def send_whole(shape: openai.Shape, answers: Sequence[Answer]) -> web.Response:
    """One body with every choice. Raises RequestRejected."""
    # One after the other: all must end anyway, and what comes meanwhile waits in its queue.
    choices = [(await answer.whole(), answer.reason or "stop") for answer in answers]
    return web.Response(body=shape.whole(choices, usage(answers)), content_type="application/json")


async def send_events(
    request: web.Request, shape: openai.Shape, answers: Sequence[Answer], include_usage: bool
) -> web.StreamResponse:
    """Server-sent events. The status line waits for the first output, so that a refused request gets its error.

    Raises RequestRejected until then; later an error is an event, and the last one.
    """
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    preparing = asyncio.Lock()

    async def follow(index: int, answer: Answer) -> None:
        first = True
        async for text in answer.texts():
            async with preparing:
                if not response.prepared:
                    await response.prepare(request)
            if text or first or answer.finish is not None:
                await _event(response, shape.chunk(index, text, answer.reason, first))
                first = False

    tasks = [asyncio.ensure_future(follow(index, answer)) for index, answer in enumerate(answers)]
    with contextlib.suppress(ConnectionError):  # the client went away; leaving the streams aborts what still runs
        try:
            await _all(tasks)
        except RequestRejected as error:
            if not response.prepared:
                raise
            await _event(response, openai.error_body(str(error), error.status, error.code))
        else:
            if include_usage:
                await _event(response, shape.usage_chunk(usage(answers)))
            await _event(response, b"[DONE]")
        await response.write_eof()
    return response


async def _all(tasks: Sequence[asyncio.Future[None]]) -> None:
    """Wait for all, or until one fails; then none of them writes any more."""
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def _event(response: web.StreamResponse, data: bytes) -> None:
    await response.write(b"data: %b\n\n" % data)


def usage(answers: Sequence[Answer]) -> dict[str, object]:
    """Tokens of all choices together."""
    return openai.usage(
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.completion_tokens for answer in answers),
        sum(answer.cached_tokens for answer in answers),
    )
