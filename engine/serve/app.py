"""The engine's HTTP server: OpenAI's endpoints, and those for whoever operates it."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import Any

import msgspec
from aiohttp import web

from kvlens import __version__
from kvlens.engine.engine import Engine, RequestRejected
from kvlens.engine.faults.catalog import FAULTS
from kvlens.engine.faults.faults import Faults
from kvlens.engine.record import SamplingParams
from kvlens.engine.serve import openai
from kvlens.engine.serve.answers import Answer, send_events, send_whole
from kvlens.engine.serve.streams import Streams

MOST_BODY_BYTES = 16 << 20
DEFAULT_COMPLETION_TOKENS = 16
RETRY_SECONDS = "1"
SHUTTING_DOWN = "the server is shutting down: try again when it is back"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class FaultBody(msgspec.Struct):
    enabled: bool = True
    times: openai.Int | None = 1


def build_app(engine: Engine, *, allow_faults: bool = False) -> web.Application:
    """The application; it starts the engine's thread, and stops it when it is shut down."""
    server = Server(engine)
    app = web.Application(client_max_size=MOST_BODY_BYTES, middlewares=[_errors])
    app.router.add_post("/v1/completions", server.completions)
    app.router.add_post("/v1/chat/completions", server.chat)
    app.router.add_get("/v1/models", server.models)
    app.router.add_post("/abort_request", server.abort)
    app.router.add_post("/flush_cache", server.flush)
    app.router.add_get("/health", server.health)
    app.router.add_get("/get_server_info", server.info)
    if allow_faults:
        app.router.add_get("/faults", server.faults)
        app.router.add_post("/faults/{name}", server.fault)
    app.cleanup_ctx.append(server.running)
    app.on_shutdown.append(server.closing)
    return app


class Server:
    """One handler per path."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._streams = Streams(engine)
        self._faults = Faults(engine)
        self._model = engine.config.model if engine.config.model == "builtin" else engine.plan.directory.name

    async def running(self, app: web.Application) -> AsyncIterator[None]:
        """The engine's thread lives as long as the application."""
        self._streams.start()
        yield
        await asyncio.get_running_loop().run_in_executor(None, self._engine.stop)

    async def closing(self, app: web.Application) -> None:
        """Nobody new comes in by a connection that is still open, and whoever waits is told why it ends."""
        self._streams.close(SHUTTING_DOWN)

    # -- generation -------------------------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = openai.read(await request.read(), openai.CompletionRequest)
        sampling = asked.sampling(DEFAULT_COMPLETION_TOKENS)
        return await self._generate(request, asked, sampling, await self._prompts(asked), chat=False)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = openai.read(await request.read(), openai.ChatRequest)
        sampling = asked.sampling(self._engine.max_total_tokens)
        return await self._generate(request, asked, sampling, await self._prompts(asked), chat=True)

    async def _prompts(self, asked: openai.CompletionRequest | openai.ChatRequest) -> list[list[int]]:
        if asked.model != self._model:
            said = asked.model if len(asked.model) <= 100 else f"{asked.model[:100]}..."
            raise openai.FieldRejected(
                "model", f"model {said} is not served here: use {self._model}", 404, "model_not_found"
            )
        prompts = []
        for prompt in asked.prompts(self._engine.tokenizer, self._engine.max_total_tokens - 1):
            prompts.append(prompt)
            await asyncio.sleep(0)  # others' text goes out between two of a thousand prompts
        return prompts

    async def _generate(
        self, request: web.Request, asked: openai.Generation, sampling: SamplingParams, prompts: list[list[int]],
        *, chat: bool,
    ) -> web.StreamResponse:  # fmt: skip
        shape = openai.Shape(self._model, chat, openai.request_id(asked.rid, request.headers.get("X-Request-Id")))
        rids = [shape.id if index == 0 else f"{shape.id}-{index}" for index in range(len(prompts))]
        trace = openai.trace_context(request.headers.get("traceparent"))
        async with self._streams.open(dict(zip(rids, prompts, strict=True)), sampling, trace) as streams:
            answers = [Answer(outputs, self._engine.tokenizer, sampling) for outputs in streams]
            if asked.stream:
                return await send_events(request, shape, answers, asked.includes_usage)
            return await send_whole(shape, answers)

    async def models(self, request: web.Request) -> web.Response:
        entry = {
            "id": self._model, "object": "model", "created": 0, "owned_by": "kvlens",
            "max_model_len": self._engine.max_total_tokens,
        }  # fmt: skip
        return _json({"object": "list", "data": [entry]})

    # -- operation --------------------------------------------------------------------------------------------------

    async def abort(self, request: web.Request) -> web.Response:
        asked = openai.read(await request.read(), AbortBody)
        if not asked.rid and not asked.abort_all:
            raise RequestRejected('name the request: {"rid": "..."}, or send {"abort_all": true}')
        found = await self._streams.abort(None if asked.abort_all else asked.rid)
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
        if self._streams.is_closing:
            return _json({"status": "stopping", "reason": SHUTTING_DOWN}, status=503)
        return _json({"status": "ok", "version": __version__, "model": self._model})

    async def info(self, request: web.Request) -> web.Response:
        """What it was started with; what it holds is the observer's to tell."""
        return _json({
            "version": __version__, "model": self._model, "max_total_tokens": self._engine.max_total_tokens,
            "settings": asdict(self._engine.config),
        })  # fmt: skip

    async def faults(self, request: web.Request) -> web.Response:
        return _json({"faults": list(FAULTS), "active": self._faults.active()})

    async def fault(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in FAULTS:
            raise RequestRejected(f"there is no fault {name}: choose {', '.join(FAULTS)}", 404, "not_found")
        asked = openai.read(await request.read() or b"{}", FaultBody)
        if asked.times is not None and asked.times < 1:
            raise openai.FieldRejected("times", f"times is {asked.times}: give at least 1, or null for every time")
        switch = (
            (lambda: self._faults.enable(name, asked.times)) if asked.enabled else lambda: self._faults.disable(name)
        )
        await asyncio.wrap_future(self._engine.post(switch))
        return _json({"fault": name, "enabled": asked.enabled, "times": asked.times if asked.enabled else None})


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json", status=status)


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error has OpenAI's shape; a mistake of the client costs no slot, and no traceback."""
    try:
        return await handler(request)
    except RequestRejected as error:
        return _error(str(error), error.status, error.code, getattr(error, "field", None))
    except web.HTTPRequestEntityTooLarge:
        return _error(f"the body is longer than {MOST_BODY_BYTES:,} bytes: send a shorter prompt", 413, "body_too_long")
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _error(f"{request.method} {request.path}: {error.reason}", error.status, "http_error")
    except Exception as error:
        traceback.print_exception(error)
        return _error(openai.INTERNAL_ERROR, 500, "internal_error")


def _error(message: str, status: int, code: str, field: str | None = None) -> web.Response:
    """A 503 that passes by itself says when to come back; an engine that stopped does not."""
    headers = {"Retry-After": RETRY_SECONDS} if status == 503 and code != "engine_stopped" else {}
    body = openai.error_body(message, status, code, field)
    return web.Response(body=body, content_type="application/json", status=status, headers=headers)
