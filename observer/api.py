"""The observer's HTTP side: what it knows, as JSON, as metrics, and as a page."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

import msgspec
from aiohttp import web

from kvlens.observer.schema import LedgerEvent
from kvlens.observer.snapshot import row_states
from kvlens.observer.watch import best_of

if TYPE_CHECKING:
    from kvlens.observer.daemon import Daemon

MOST_QUEUED: Final = 1000
"""Events held for one slow reader of the stream; then it is sent away, and can come back."""
_OPEN_PATHS = frozenset({"/healthz", "/readyz"})
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def build_api(daemon: Daemon, token: str | None) -> web.Application:
    """The application. With `token`, everything but the health checks wants it as a bearer token."""
    api = Api(daemon)
    app = web.Application(middlewares=[_bearer(token)] if token else [])
    app.router.add_get("/", api.page)
    app.router.add_get("/metrics", api.metrics)
    app.router.add_get("/healthz", api.healthz)
    app.router.add_get("/readyz", api.readyz)
    app.router.add_get("/api/v1/state", api.state)
    app.router.add_get("/api/v1/rows", api.rows)
    app.router.add_get("/api/v1/requests/{rid}", api.request)
    app.router.add_get("/api/v1/findings", api.findings)
    app.router.add_post("/api/v1/findings/{id}/ack", api.acknowledge)
    app.router.add_get("/api/v1/pool-map", api.pool_map)
    app.router.add_get("/api/v1/events", api.events)
    app.on_shutdown.append(api.end_streams)
    return app


class Api:
    """One handler per path."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._page = files("kvlens.observer").joinpath("page.html").read_bytes()
        self._streams: set[asyncio.Queue[LedgerEvent | None]] = set()
        daemon.listeners.append(self._spread)

    async def page(self, request: web.Request) -> web.Response:
        return web.Response(body=self._page, content_type="text/html", charset="utf-8")

    async def metrics(self, request: web.Request) -> web.Response:
        body, content_type = self._daemon.metrics(request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def healthz(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def readyz(self, request: web.Request) -> web.Response:
        ready = any(engine.status == "up" for engine in self._daemon.snapshot().engines)
        return web.Response(text="ok\n") if ready else web.Response(status=503, text="no engine is up\n")

    async def state(self, request: web.Request) -> web.Response:
        return _json(self._daemon.snapshot())

    async def rows(self, request: web.Request) -> web.Response:
        given = request.query.get("limit", "1000")
        limit = int(given) if given.isascii() and given.isdigit() else -1
        if limit < 0:
            return _error(400, f"limit is {given!r}: give a number of rows")
        rows = row_states(self._daemon.watches)
        return _json({"rows": rows[:limit], "total": len(rows), "at": self._daemon.snapshot().at})

    async def request(self, request: web.Request) -> web.Response:
        rid = request.match_info["rid"]
        for watch in best_of(self._daemon.watches):
            timeline = watch.ledger.timeline(rid) if watch.ledger is not None else None
            if timeline is not None:
                return _json(timeline)
        return _error(404, f"no request {rid} is known: it ended long ago, or another observer saw it")

    async def findings(self, request: web.Request) -> web.Response:
        return _json({"findings": self._daemon.store.all()})

    async def acknowledge(self, request: web.Request) -> web.Response:
        for watch in self._daemon.watches:
            finding = watch.acknowledge(request.match_info["id"])
            if finding is not None:
                self._daemon.changed()
                return _json(finding)
        return _error(404, f"no open finding has the id {request.match_info['id']}")

    async def pool_map(self, request: web.Request) -> web.Response:
        wanted, pool = request.query.get("engine"), request.query.get("pool", "full")
        for watch in best_of(self._daemon.watches):
            if watch.ledger is None or wanted not in (None, watch.ledger.identity.name):
                continue
            census = watch.ledger.censuses.get(pool)
            if census is not None:
                size = watch.ledger.accounts[pool].size if pool in watch.ledger.accounts else 0
                return _json(
                    {
                        "engine": watch.ledger.identity.name, "pool": pool, "size_slots": size, "step": census.step,
                        "owners": census.owners, "truncated": census.truncated,
                    }
                )  # fmt: skip
        return _error(404, f"no census of pool {pool} yet: one is taken every 5 s under load, and when idle")

    # -- the stream -------------------------------------------------------------------------------------------------

    def _spread(self, event: LedgerEvent) -> None:
        for queue in [*self._streams]:
            if queue.full():
                self._streams.discard(queue)
                queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(event)

    async def events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        queue: asyncio.Queue[LedgerEvent | None] = asyncio.Queue(MOST_QUEUED)
        self._streams.add(queue)
        try:
            await response.write(b": connected\n\n")
            while True:
                try:
                    event = await asyncio.wait_for(queue.get(), 15)
                except asyncio.TimeoutError:
                    await response.write(b": still here\n\n")
                    continue
                if event is None:
                    break
                await response.write(b"event: %b\ndata: %b\n\n" % (event.kind.encode(), msgspec.json.encode(event)))
        except ConnectionError:
            pass  # the reader went away
        finally:
            self._streams.discard(queue)
        return response

    async def end_streams(self, app: web.Application) -> None:
        for queue in self._streams:
            if not queue.full():
                queue.put_nowait(None)


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode({"error": message}), content_type="application/json")


def _bearer(token: str) -> Any:
    expected = f"Bearer {token}".encode()

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").encode(errors="surrogateescape")
        if request.path not in _OPEN_PATHS and not hmac.compare_digest(given, expected):
            return _error(401, "this observer wants a bearer token: send the one it was started with (--token)")
        return await handler(request)

    return check
