"""The engine's HTTP server: OpenAI's endpoints, and those for whoever operates it."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from kvlens import __version__
from kvlens.engine.engine import Engine, RequestRejected
from kvlens.engine.faults.catalog import FAULTS
from kvlens.engine.faults.faults import Faults
from kvlens.engine.model.text import TextStream
from kvlens.engine.record import FinishReason, SamplingParams
from kvlens.engine.serve import openai
from kvlens.engine.serve.streams import Streams

MOST_BODY = 16 << 20
DEFAULT_COMPLETION_TOKENS = 16
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class FaultBody(msgspec.Struct):
    enabled: bool = True
    times: int | None = 1


def build_app(engine: Engine, *, allow_faults: bool = False) -> web.Application:
    """The application; it starts the engine's thread, and stops it when it is shut down."""
    server = Server(engine)
    app = web.Application(client_max_size=MOST_BODY, middlewares=[_errors])
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_post("/flush_cache", server.flush)
    app.router.add_get("/health", server.health)
    if allow_faults:
        app.router.add_get("/faults", server.faults)
        app.router.add_post("/faults/{name}", server.fault)
    app.cleanup_ctx.append(server.running)
    return app


class Answer:
    """One choice as it grows."""

    def __init__(self, engine: Engine, sampling: SamplingParams) -> None:
        self._stream = TextStream(engine.tokenizer, sampling.stop)
        self.parts: list[str] = []
        self.finish: FinishReason | None = None
        self.prompt_tokens = self.completion_tokens = self.cached_tokens = 0

    def take(self, output: Any) -> str:
        """The text that one output adds."""
        text = self._stream.push(output.token_ids)
        if output.finish is not None:
            text += self._stream.finish()
            self.finish = output.finish
        self.prompt_tokens, self.cached_tokens = output.prompt_tokens, output.cached_tokens
        self.completion_tokens += len(output.token_ids)
        self.parts.append(text)
        return text

    @property
    def reason(self) -> str | None:
        return self.finish.kind if self.finish is not None else None

    def raise_for_failure(self) -> None:
        """An abort that is the engine's doing is an error of the whole answer."""
        if self.finish is not None and self.finish.is_abort and self.finish.status >= 500:
            raise RequestRejected(self.finish.message, self.finish.status, "aborted")


class Server:
    """One handler per path."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams = Streams(engine)
        self._faults = Faults(engine)
        self._model = engine.config.model if engine.config.model == "builtin" else engine.plan.directory.name

    async def running(self, app: web.Application) -> Any:
        """The engine's thread lives as long as the application."""
        self._streams.start()
        yield
        await asyncio.get_running_loop().run_in_executor(None, self._engine.stop)

    # -- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = openai.read(await request.read(), openai.CompletionRequest)
        prompts = asked.prompts(self._engine.tokenizer)
        return await self._generate(request, asked, prompts, asked.sampling(DEFAULT_COMPLETION_TOKENS), chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = openai.read(await request.read(), openai.ChatRequest)
        if asked.max_tokens is None:
            asked.max_tokens = asked.max_completion_tokens
        prompts = asked.prompts(self._engine.tokenizer)
        return await self._generate(request, asked, prompts, asked.sampling(self._engine.max_total_tokens), chat=True)

    async def _generate(
        self, request: web.Request, asked: openai.Generation, prompts: list[list[int]], sampling: SamplingParams,
        *, chat: bool,
    ) -> web.StreamResponse:  # fmt: skip
        if asked.model != self._model:
            raise RequestRejected(f"model {asked.model} is not served here: use {self._model}", 404, "model_not_found")
        if not prompts:
            raise RequestRejected("prompt is an empty list: send at least one", code="empty_prompt")
        shape = openai.Shape(self._model, chat)
        shape.id = asked.rid or request.headers.get("X-Request-Id") or shape.id
        trace = request.headers.get("traceparent")
        async with contextlib.AsyncExitStack() as stack:
            streams = []
            for index, prompt in enumerate(prompts):
                rid = shape.id if index == 0 else f"{shape.id}-{index}"
                streams.append(await stack.enter_async_context(self._streams.open(rid, prompt, sampling, trace)))
            answers = [Answer(self._engine, sampling) for _ in prompts]
            if asked.stream:
                include_usage = asked.stream_options is not None and asked.stream_options.include_usage
                return await _send_stream(request, shape, streams, answers, include_usage)
            await asyncio.gather(*(_collect(stream, answer) for stream, answer in zip(streams, answers, strict=True)))
        for answer in answers:
            answer.raise_for_failure()
        body = shape.whole([("".join(answer.parts), answer.reason or "stop") for answer in answers], _usage(answers))
        return web.Response(body=body, content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self._model, "object": "model", "created": 0, "owned_by": "kvlens",
            "max_model_len": self._engine.max_total_tokens,
        }  # fmt: skip
        return _json({"object": "list", "data": [entry]})

    # -- operation --------------------------------------------------------------------------------------------------

    async def abort(self, request: web.Request) -> web.Response:
        asked = _read(await request.read(), AbortBody)
        if asked.rid is None and not asked.abort_all:
            raise RequestRejected('name the request: {"rid": "..."}, or send {"abort_all": true}')
        found = await asyncio.wrap_future(self._engine.abort(None if asked.abort_all else asked.rid))
        if not found and not asked.abort_all:
            raise RequestRejected(f"no request {asked.rid} is here: it has ended, or never came", 404, "not_found")
        return _json({"aborted": found})

    async def flush(self, request: web.Request) -> web.Response:
        if not await asyncio.wrap_future(self._engine.flush()):
            raise RequestRejected("requests are running: flush when they have ended, or abort them", 409, "busy")
        return _json({"flushed": True})

    async def health(self, request: web.Request) -> web.Response:
        if self._engine.failure is not None:
            return _json({"status": "failed", "reason": self._engine.failure}, status=503)
        return _json({"status": "ok", "version": __version__, "model": self._model})

    async def faults(self, request: web.Request) -> web.Response:
        return _json({"faults": list(FAULTS), "active": self._faults.active()})

    async def fault(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in FAULTS:
            raise RequestRejected(f"there is no fault {name}: choose {', '.join(FAULTS)}", 404, "not_found")
        asked = _read(await request.read() or b"{}", FaultBody)
        if asked.times is not None and asked.times < 1:
            raise RequestRejected(f"times is {asked.times}: give at least 1, or null for every time")
        switch = (
            (lambda: self._faults.enable(name, asked.times)) if asked.enabled else lambda: self._faults.disable(name)
        )
        await asyncio.wrap_future(self._engine.post(switch))
        return _json({"fault": name, "enabled": asked.enabled, "times": asked.times if asked.enabled else None})


async def _collect(stream: Any, answer: Answer) -> None:
    async for output in stream:
        answer.take(output)


async def _send_stream(
    request: web.Request, shape: openai.Shape, streams: list[Any], answers: list[Answer], include_usage: bool
) -> web.StreamResponse:
    """Server-sent events. The status line waits for the first output, so that a refused request gets its error."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    started = asyncio.Lock()

    async def follow(index: int) -> None:
        first = True
        async for output in streams[index]:
            answer = answers[index]
            text = answer.take(output)
            async with started:
                if not response.prepared:
                    answer.raise_for_failure()
                    await response.prepare(request)
            if text or first or answer.finish is not None:
                await response.write(b"data: %b\n\n" % shape.chunk(index, text, answer.reason, first))
                first = False

    tasks = [asyncio.ensure_future(follow(index)) for index in range(len(streams))]
    try:
        await asyncio.gather(*tasks)
        if include_usage:
            await response.write(b"data: %b\n\n" % shape.usage_chunk(_usage(answers)))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    except ConnectionError:
        pass  # the client went away; leaving the streams aborts what still runs
    finally:
        for task in tasks:
            task.cancel()
    return response


def _usage(answers: list[Answer]) -> dict[str, Any]:
    return openai.usage(
        sum(answer.prompt_tokens for answer in answers),
        sum(answer.completion_tokens for answer in answers),
        sum(answer.cached_tokens for answer in answers),
    )


def _read(body: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the body is not what this endpoint takes: {error}") from None


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error has OpenAI's shape; a mistake of the client costs no slot, and no traceback."""
    try:
        return await handler(request)
    except RequestRejected as error:
        return _error(str(error), error.status, error.code)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(f"{request.method} {request.path}: {error.reason}", error.status, "http_error")


def _error(message: str, status: int, code: str) -> web.Response:
    headers = {"Retry-After": str(math.ceil(1))} if status == 503 else {}
    body = openai.error_body(message, status, code)
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)
