"""Runs the HTTP server until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import signal
from dataclasses import dataclass

from aiohttp import web

from kvlens import KvlensError
from kvlens.engine.engine import Engine
from kvlens.engine.serve.app import build_app

# What another port cures: it is taken, or only the administrator may use it. The rest is wrong with the address.
PORT_ERRORS = (errno.EADDRINUSE, errno.EACCES)


class ServeError(KvlensError):
    """The server cannot start; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Where the server listens."""

    host: str = "127.0.0.1"
    port: int = 30000
    """0: any free one."""
    allow_faults: bool = False
    """Take `POST /faults/NAME`."""


async def serve(engine: Engine, config: ServeConfig) -> None:
    """Serve until SIGTERM or SIGINT; then requests are aborted, and nothing is held. Raises ServeError."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    app = build_app(engine, allow_faults=config.allow_faults)
    # With handler_cancellation a client that hangs up ends its handler, and that aborts its request.
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, config.host, config.port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            option = "--port" if error.errno in PORT_ERRORS else "--host"
            raise ServeError(
                f"cannot listen on {config.host}:{config.port} ({error.strerror}): choose another with {option}"
            ) from None
        host = f"[{config.host}]" if ":" in config.host else config.host
        print(f"kvlens engine ready on http://{host}:{runner.addresses[0][1]}", flush=True)
        await stop.wait()
    finally:
        await runner.cleanup()
