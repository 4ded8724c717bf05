"""Starting to listen, and stopping on a signal."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket

import aiohttp
import pytest

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.probe import NullProbe
from kvlens.engine.serve.launch import ServeConfig, ServeError, serve


class Closed(NullProbe):
    """Counts how often it was closed."""

    times = 0

    def close(self) -> None:
        self.times += 1


@pytest.fixture
def probe() -> Closed:
    return Closed()


@pytest.fixture
def engine(probe, a_gate) -> Engine:
    return Engine(EngineConfig(pool_slots=64, max_running=4, device="cpu"), probe=probe, runner=a_gate)


@pytest.fixture(autouse=True)
def signals():
    """What the process did on these signals before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def listening(engine, capsys, until):
    """`serving, url = await listening()`"""

    async def start() -> tuple[asyncio.Future[None], str]:
        serving = asyncio.ensure_future(serve(engine, ServeConfig(port=0)))
        said: list[str] = []
        await until(lambda: serving.done() or said.append(capsys.readouterr().out) or "\n" in "".join(said))
        return serving, re.fullmatch(r"kvlens engine ready on (http://127\.0\.0\.1:\d+)\n", "".join(said))[1]

    return start


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_says_where_it_listens_and_leaves_on_a_signal(engine, probe, listening, number) -> None:
    serving, url = await listening()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200
        os.kill(os.getpid(), number)
        await serving
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(f"{url}/health")
    assert probe.times == 1 and engine._thread is not None and not engine._thread.is_alive()


async def test_who_hangs_up_while_waiting_for_a_whole_answer_is_aborted(engine, a_gate, listening, until) -> None:
    serving, url = await listening()
    a_gate.close(after=1)
    body = {"model": "builtin", "prompt": "a", "max_tokens": 40, "ignore_eos": True, "rid": "mine"}
    async with aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(session.post(f"{url}/v1/completions", json=body))
        await until(a_gate.entered.is_set)
        req = engine.scheduler.live["mine"]
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(engine._inbox.qsize)  # the abort has come
    a_gate.open()
    os.kill(os.getpid(), signal.SIGTERM)
    await serving
    assert req.finish.message == "the client went away" and len(req.output_ids) == 2


async def test_a_port_in_use_is_named_with_the_option_and_nothing_is_left_running(engine, probe) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ServeError, match=f"cannot listen on 127.0.0.1:{port} .*: choose another with --port"):
            await serve(engine, ServeConfig(port=port))
    assert probe.times == 1 and engine._thread is not None and not engine._thread.is_alive()


async def test_an_address_of_another_machine_is_named_with_its_option(engine) -> None:
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1:0 .*: choose another with --host"):
        await serve(engine, ServeConfig(host="192.0.2.1", port=0))
