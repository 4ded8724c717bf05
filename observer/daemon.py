"""`kvlens observe`: reads recorders, judges, keeps findings, and serves what it knows."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aiohttp import web

from kvlens import KvlensError
from kvlens.observer.api import build_api
from kvlens.observer.recorder import RingError, RingReader, discover
from kvlens.observer.schema import LedgerEvent, State
from kvlens.observer.sink import Sink
from kvlens.observer.snapshot import take_snapshot
from kvlens.observer.sources.ring import RingSource
from kvlens.observer.store import Store
from kvlens.observer.watch import News, Watch

TICK_SECONDS: Final = 0.02
SNAPSHOT_SECONDS: Final = 0.05
DISCOVER_SECONDS: Final = 1.0

RenderMetrics = Callable[[State, str], tuple[bytes, str]]


class ObserveError(KvlensError):
    """The daemon cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ObserveConfig:
    """Settings of one observer."""

    store: Path
    """Findings database."""
    rings: tuple[Path, ...] = ()
    """Recorders to follow; none: every one of this machine."""
    host: str = "127.0.0.1"
    port: int = 9400
    """0: any free one."""
    token: str | None = None
    """Bearer token that the HTTP side wants."""


@dataclass(slots=True)
class _Page:
    """Metrics of one snapshot, by what was asked for."""

    state: State
    rendered: dict[str, tuple[bytes, str]] = field(default_factory=dict)


class Daemon:
    """Everything of one observer, on one event loop."""

    def __init__(self, config: ObserveConfig, *, render_metrics: RenderMetrics, sinks: Sequence[Sink] = ()) -> None:
        """Raises RingError for a recorder that cannot be read, StoreError when findings cannot be kept."""
        self.config = config
        self.listeners: list[Callable[[LedgerEvent], None]] = [sink.on_event for sink in sinks]
        self._render = render_metrics
        self._sinks = tuple(sinks)
        sources = [RingSource(path) for path in config.rings]
        self.store = Store(config.store)
        self.watches = [Watch(source, self.store) for source in sources]
        self._page: _Page | None = None
        self._next_discovery = self._next_state = 0.0
        self._problems: dict[Path, str | None] = {}

    async def run(self, ready: Callable[[str], None] = print) -> None:
        """Serve until SIGTERM or SIGINT. Raises ObserveError when the port is taken."""
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        runner = web.AppRunner(build_api(self, self.config.token), access_log=None, shutdown_timeout=2)
        await runner.setup()
        try:
            port = await self._listen(runner)
            self.tick()
            ready(f"kvlens observer ready on http://{self.config.host}:{port}")
            await self._follow(stop)
        finally:
            await runner.cleanup()
            for sink in self._sinks:
                sink.close()
            for watch in self.watches:
                watch.source.close()
            self.store.close()

    async def _listen(self, runner: web.AppRunner) -> int:
        site = web.TCPSite(runner, self.config.host, self.config.port)
        try:
            await site.start()
        except OSError as error:
            raise ObserveError(
                f"cannot listen on {self.config.host}:{self.config.port} ({error.strerror}): choose another with "
                "--port or --host"
            ) from None
        return int(runner.addresses[0][1])

    async def _follow(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            busy = self.tick()
            try:
                await asyncio.wait_for(stop.wait(), 0 if busy else TICK_SECONDS)
            except asyncio.TimeoutError:
                await asyncio.sleep(0)

    def tick(self) -> bool:
        """One look at every source; True when one has more to read at once. Raises StoreError."""
        now = time.monotonic()
        if not self.config.rings and now >= self._next_discovery:
            self._next_discovery = now + DISCOVER_SECONDS
            self._discover()
        busy = False
        for watch in self.watches:
            news = watch.poll()
            self._complain(watch)
            busy |= news.more
            self._spread(news)
        if self._sinks and now >= self._next_state:
            self._next_state = now + 1.0
            for sink in self._sinks:
                sink.on_state(self.snapshot())
        return busy

    def _spread(self, news: News) -> None:
        for timeline in news.ended:
            for sink in self._sinks:
                sink.on_request_ended(timeline)
        for event in news.events:
            for listener in self.listeners:
                listener(event)

    def _complain(self, watch: Watch) -> None:
        """Say once what is wrong with a recorder."""
        path, problem = watch.source.path, watch.source.problem
        if self._problems.get(path) != problem:
            self._problems[path] = problem
            if problem is not None:
                print(f"kvlens: {problem}", file=sys.stderr, flush=True)

    def _discover(self) -> None:
        # A dead engine whose file is gone has nothing more to say.
        for watch in [watch for watch in self.watches if watch.status == "down" and not watch.source.path.exists()]:
            watch.source.close()
            self.watches.remove(watch)
        known = {watch.source.path for watch in self.watches}
        found: list[RingSource] = []
        for path in discover():
            if path in known:
                continue
            try:
                with RingReader(path) as reader:
                    if reader.is_closed:
                        continue  # it ended cleanly before anyone looked: no news
                found.append(RingSource(path))
            except RingError:
                continue  # another version's, or being made: `kvlens doctor` tells
        # Dead ones first: a live engine of the same name, found beside one, is its successor.
        found.sort(key=lambda source: source.status != "down")
        self.watches += [Watch(source, self.store) for source in found]

    # -- what the HTTP side asks ------------------------------------------------------------------------------------

    def snapshot(self) -> State:
        """The state of now; one for everybody who asks within 50 ms."""
        if self._page is None or time.time() - self._page.state.at >= SNAPSHOT_SECONDS:
            self._page = _Page(take_snapshot(self.watches))
        return self._page.state

    def changed(self) -> None:
        """The next snapshot is a new one."""
        self._page = None

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The page of the current snapshot in the format `accept` asks for, rendered once; body and content type."""
        state = self.snapshot()
        assert self._page is not None
        if accept not in self._page.rendered:
            self._page.rendered[accept] = self._render(state, accept)
        return self._page.rendered[accept]
