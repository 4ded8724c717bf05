"""An engine without a model behind the real application, on a real loopback port."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import numpy as np
import pytest
from aiohttp.test_utils import TestServer

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.serve.app import build_app

SECONDS = 30


class Gate:
    """A runner without a model: every token is the same. `close` lets `after` more forwards pass, then holds them."""

    def __init__(self) -> None:
        self.token = 0
        self._opened = threading.Event()
        self._opened.set()
        self._after = 0
        self.entered = threading.Event()
        self.error: Exception | None = None

    def close(self, after: int = 0) -> None:
        self._after = after
        self.entered.clear()
        self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def forward(self, batch) -> np.ndarray:
        if not self._opened.is_set() and self._after:
            self._after -= 1
        elif not self._opened.is_set():
            self.entered.set()
            assert self._opened.wait(SECONDS)
        if self.error is not None:
            raise self.error
        return np.full(len(batch.numbers), self.token)


class Client:
    """The application, spoken to over HTTP."""

    def __init__(self, engine: Engine, server: TestServer, session: aiohttp.ClientSession) -> None:
        self.engine, self.server, self.session = engine, server, session

    def post(self, path: str, body: object) -> aiohttp.client._RequestContextManager:
        return self.session.post(self.server.make_url(path), json=body)

    def get(self, path: str) -> aiohttp.client._RequestContextManager:
        return self.session.get(self.server.make_url(path))


@pytest.fixture
def until() -> Callable[[Callable[[], object]], Awaitable[None]]:
    """`await until(lambda: ...)`: let the loop run until it is true; fails when it never is."""

    async def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"not true after {SECONDS} s"
            await asyncio.sleep(0.001)

    return wait


@pytest.fixture
async def a_client() -> AsyncIterator[Callable[..., Awaitable[Client]]]:
    """`client = await a_client(Gate(), pool_slots=...)`"""
    async with AsyncExitStack() as stack:

        async def build(runner: Gate, *, allow_faults: bool = False, **config) -> Client:
            config = {"pool_slots": 64, "max_running": 4, "device": "cpu", "contracts": "strict", **config}
            engine = Engine(EngineConfig(**config), runner=runner)
            (runner.token,) = engine.tokenizer.encode("a")
            server = TestServer(build_app(engine, allow_faults=allow_faults))
            await server.start_server()
            stack.push_async_callback(server.close)
            stack.callback(runner.open)
            session = await stack.enter_async_context(aiohttp.ClientSession())
            return Client(engine, server, session)

        yield build


@pytest.fixture
def a_gate() -> Gate:
    return Gate()
