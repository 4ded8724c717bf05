"""The bridge from the scheduler's thread to the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from kvlens.engine.engine import Engine, RequestRejected
from kvlens.engine.record import FinishReason, SamplingParams
from kvlens.engine.schedule.scheduler import Output


class Streams:
    """Hands each step's outputs to whoever waits for them: one call into the loop per step, however many requests."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop: asyncio.AbstractEventLoop | None = None
        # None: whoever waited has gone, and the engine has not ended the request yet. Its id stays taken until then, or
        # its last output would end the next request of that id.
        self._queues: dict[str, asyncio.Queue[Output] | None] = {}
        self._siblings: dict[str, Sequence[str]] = {}
        self._closing: str | None = None

    def start(self) -> None:
        """Start the engine's thread; its outputs come to the running loop."""
        self._loop = asyncio.get_running_loop()
        self._engine.start(self._on_outputs)

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    def close(self, message: str) -> None:
        """Take no more requests, and end those that run with `message` and a 503."""
        self._closing = message
        self._engine.abort(message=message)

    def _on_outputs(self, outputs: list[Output]) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
            self._loop.call_soon_threadsafe(self._deliver, outputs)

    def _deliver(self, outputs: list[Output]) -> None:
        for output in outputs:
            queue = self._queues.get(output.rid)
            if output.finish is not None:
                self._queues.pop(output.rid, None)
            if queue is not None:
                queue.put_nowait(output)

    @contextlib.asynccontextmanager
    async def open(
        self, prompts: Mapping[str, list[int]], sampling: SamplingParams, trace: str | None
    ) -> AsyncIterator[list[AsyncIterator[Output]]]:
        """Submit requests by id, all or none, and iterate over the outputs of each. Those left early are aborted.

        Raises RequestRejected before the engine saw any of them.
        """
        self._check(prompts, sampling)
        first = next(iter(prompts))
        mine: dict[str, asyncio.Queue[Output]] = {}
        self._siblings[first] = list(prompts)
        try:
            for rid, prompt in prompts.items():
                self._engine.submit(rid, prompt, sampling, trace)
                mine[rid] = self._queues[rid] = asyncio.Queue()
            yield [self._outputs(queue) for queue in mine.values()]
        finally:
            del self._siblings[first]
            for rid, queue in mine.items():
                if self._queues.get(rid) is queue:
                    self._queues[rid] = None
                    self._engine.abort(rid, "the client went away")

    async def abort(self, rid: str | None) -> int:
        """End an answer with all its prompts, or with None every one; returns how many requests were found."""
        ended = [self._engine.abort(one) for one in (self._siblings.get(rid, [rid]) if rid is not None else [None])]
        # Shielded: whoever asks for an abort and hangs up still wants it.
        return sum(await asyncio.gather(*(asyncio.shield(asyncio.wrap_future(future)) for future in ended)))

    def _check(self, prompts: Mapping[str, list[int]], sampling: SamplingParams) -> None:
        """All that `submit` checks, for all of them before the first: a refused answer must not have cost a slot."""
        if self._closing is not None:
            raise RequestRejected(self._closing, 503, "shutting_down")
        config = self._engine.config
        room = config.max_running + config.max_queued
        if len(prompts) > room:
            raise RequestRejected(
                f"{len(prompts):,} prompts are more than the {room:,} requests this engine takes at once: send fewer, "
                f"or start with --max-queued {len(prompts) - config.max_running}"
            )
        for rid, prompt in prompts.items():
            if rid in self._queues:
                raise RequestRejected(f"a request with id {rid} is running: choose another id", code="duplicate_id")
            self._engine._check_request(rid, prompt, sampling)
        if len(self._queues) + len(prompts) > room:
            raise RequestRejected(
                f"{len(self._queues):,} requests are here, {len(prompts):,} came, {config.max_queued:,} may wait: "
                "try again later, or start with a higher --max-queued",
                503,
                "queue_full",
            )

    async def _outputs(self, queue: asyncio.Queue[Output]) -> AsyncIterator[Output]:
        finish: FinishReason | None = None
        while finish is None:
            output = await queue.get()
            finish = output.finish
            if finish is not None and finish.is_abort and self._closing is not None:
                output = replace(output, finish=FinishReason("abort", message=self._closing, status=503))
            yield output
