"""An engine behind its HTTP server in this process, so that a test can look into its pools."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
from aiohttp import web

from kvlens.engine.contracts import Mode
from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.serve.app import build_app


class Server:
    """A listening engine. `settled` waits until nothing runs, and says whether every slot is back."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.engine, self.url = engine, url

    async def settled(self) -> bool:
        for _ in range(2000):
            if self.engine.is_idle:
                break
            await asyncio.sleep(0.01)
        memory = self.engine.memory
        slots = memory.slots.available_size() + memory.cache.evictable_size() == memory.slots.size
        return slots and memory.rows.available_size() == memory.rows.size and memory.cache.protected_size() == 0


@asynccontextmanager
async def _serving(config: EngineConfig, allow_faults: bool) -> AsyncIterator[Server]:
    torch.set_num_threads(1)
    engine = Engine(config)
    runner = web.AppRunner(build_app(engine, allow_faults=allow_faults), handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=2048)
    await site.start()
    try:
        yield Server(engine, f"http://127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()


@pytest.fixture
async def a_server() -> AsyncIterator[Callable[..., Awaitable[Server]]]:
    """`await a_server(pool_slots=..., allow_faults=...)`; checks are strict unless told otherwise."""
    async with AsyncExitStack() as stack:

        async def build(*, allow_faults: bool = False, **settings: object) -> Server:
            chosen = {"pool_slots": 2048, "page_size": 16, "contracts": Mode.STRICT.value, **settings}
            return await stack.enter_async_context(_serving(EngineConfig(**chosen), allow_faults))

        yield build
