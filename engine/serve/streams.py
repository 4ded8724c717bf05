"""The bridge from the scheduler's thread to the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvlens.engine.engine import Engine
from kvlens.engine.record import SamplingParams
from kvlens.engine.schedule.scheduler import Output


class Streams:
    """Hands each step's outputs to whoever waits for them: one call into the loop per step, however many requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        self._queues: dict[str, asyncio.Queue[Output]] = {}

    def start(self) -> None:
        """Start the engine's thread; its outputs come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._on_outputs)

    def _on_outputs(self, outputs: list[Output]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.rid)
            if queue is not None:
                queue.put_nowait(output)

    @contextlib.asynccontextmanager
    async def open(
        self, rid: str, prompt: list[int], sampling: SamplingParams, trace: str | None
    ) -> AsyncIterator[AsyncIterator[Output]]:
        """Submit a request and iterate over its outputs. Left early, for whatever reason, it is aborted.

        Raises RequestRejected before anything was changed.
        """
        self._engine.submit(rid, prompt, sampling, trace)
        queue = self._queues[rid] = asyncio.Queue()
        ended = False

        async def outputs() -> AsyncIterator[Output]:
            nonlocal ended
            while not ended:
                output = await queue.get()
                ended = output.finish is not None
                yield output

        try:
            yield outputs()
        finally:
            del self._queues[rid]
            if not ended:
                self._engine.abort(rid, "the client went away")
