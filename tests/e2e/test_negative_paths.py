"""What can go wrong ends in a clear message that says what to do, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest


async def post(url: str, body: bytes | dict, path: str = "/v1/completions") -> tuple[int, dict]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=data, headers={"Content-Type": "application/json"}) as answer,
    ):
        return answer.status, json.loads(await answer.read())


def kvlens(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvlens", *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def one_line(done: subprocess.CompletedProcess[str]) -> str:
    """The message of a mistake: exit code 2, one line, no traceback."""
    assert done.returncode == 2, done
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("kvlens: ")]
    assert len(lines) == 1, done.stderr
    return lines[0]


# -- requests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "the body is no JSON"),
        (b"[1, 2]", "Expected `object`"),
        (b'{"model": "builtin"}', "missing required field `prompt`"),
        (b'{"model": "builtin", "prompt": "x", "max_tokens": "many"}', "`$.max_tokens`"),
        (b'{"model": "builtin", "prompt": {"a": 1}}', "`$.prompt`"),
        (b'{"model": "builtin", "prompt": "x", "stream": "yes"}', "`$.stream`"),
        (b"\xff\xfe", "is no JSON"),
    ],
)
async def test_a_body_that_cannot_be_read_names_the_place(a_server, body, says) -> None:
    server = await a_server()
    status, answer = await post(server.url, body)
    assert status == 400 and says in answer["error"]["message"], answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert server.engine.memory.rows.req_generation.sum() == 0


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({"top_p": 1e-300}, {}, 200),
        ({"top_k": 2**63 - 1}, {}, 200),
        ({"temperature": 1e-300}, {}, 200),
        ({"seed": -(2**63)}, {}, 200),
        ({"stop_token_ids": [-1, 2**62]}, {}, 200),
        ({"max_tokens": 2**62, "ignore_eos": True}, {}, 200),
        ({}, {"traceparent": b"\xff"}, 200),
        ({"top_k": 2**64}, {}, 400),
        ({"seed": 2**70}, {}, 400),
        ({"prompt": [2**70]}, {}, 400),
        ({}, {"X-Request-Id": b"\xff\xfe"}, 400),
        ({"rid": "x" * 200}, {}, 400),
    ],
)
async def test_no_value_stops_the_engine_for_those_who_come_next(stage_engine, fields, headers, expected) -> None:
    """Observed, because ids and traces also go into frames. With nothing else to do a stopped engine is soon found."""
    url = stage_engine.url
    body = json.dumps({"model": "builtin", "prompt": "x", "max_tokens": 2, "temperature": 1.0, **fields}).encode()
    assert await status_of(url, body, headers) == expected
    status, answer = await post(url, {"model": "builtin", "prompt": "x", "max_tokens": 2})
    assert status == 200, answer


@pytest.fixture(scope="module")
def stage_engine(staging, tmp_path_factory) -> Iterator[Any]:
    """A real process with its flight recorder, as small as it answers fast."""
    with staging.stage_in(tmp_path_factory.mktemp("negative")) as stage:
        yield stage.engine("--context-length", "64", "--pool-slots", "256")


async def status_of(url: str, body: bytes, headers: dict[str, bytes]) -> int:
    """By hand: HTTP clients refuse to send bytes that are no text."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = [b"%b: %b" % (name.encode(), value) for name, value in headers.items()]
    head = [b"POST /v1/completions HTTP/1.1", b"Host: x", b"Connection: close", b"Content-Length: %d" % len(body)]
    writer.write(b"\r\n".join([*head, *lines, b"", body]))
    status = (await reader.readline()).split()[1]
    await reader.read()
    writer.close()
    await writer.wait_closed()
    return int(status)


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        (["They", ""], "the prompt has no tokens"),
        ([[5], [5] * 2000], "prompt has 2,000 tokens"),
        ([[5], [99999]], "ids outside"),
        ([[5]] * 20, "20 prompts are more than the 14 requests"),
    ],
)
async def test_an_answer_of_which_one_prompt_cannot_be_costs_no_slot_at_all(a_server, prompts, says) -> None:
    server = await a_server(max_running=4, max_queued=10)
    status, answer = await post(server.url, {"model": "builtin", "prompt": prompts, "max_tokens": 50})
    assert status == 400 and says in answer["error"]["message"], answer
    assert await server.settled()
    assert server.engine.memory.rows.req_generation.sum() == 0
    assert next(server.engine._numbers) == 1  # not one was submitted and taken back


async def test_a_prompt_longer_than_the_pool_says_how_big_the_pool_must_be(a_server) -> None:
    server = await a_server(pool_slots=64)
    status, answer = await post(server.url, {"model": "builtin", "prompt": [5] * 100})
    assert status == 400
    assert "prompt has 100 tokens, the pool holds 64" in answer["error"]["message"]
    assert answer["error"]["code"] == "context_length_exceeded"
    remedy = int(answer["error"]["message"].rsplit("--pool-slots ", 1)[1])
    bigger = await a_server(pool_slots=remedy)
    status, answer = await post(bigger.url, {"model": "builtin", "prompt": [5] * 100, "max_tokens": 1})
    assert status == 200, answer


async def test_an_unknown_path_and_method_have_the_same_shape(a_server) -> None:
    server = await a_server()
    status, answer = await post(server.url, {}, "/v1/embeddings")
    assert status == 404 and answer["error"]["message"]
    status, answer = await post(server.url, {}, "/v1/models")
    assert status == 405 and answer["error"]["message"]


async def test_faults_are_there_only_when_allowed(a_server) -> None:
    closed, opened = await a_server(), await a_server(allow_faults=True)
    assert (await post(closed.url, {}, "/faults/double-free"))[0] == 404
    assert (await post(opened.url, {"enabled": True}, "/faults/double-free"))[0] == 200
    status, answer = await post(opened.url, {}, "/faults/no-such-fault")
    assert status == 404 and "choose abort-skips-release" in answer["error"]["message"]
    status, answer = await post(opened.url, {"times": 0}, "/faults/double-free")
    assert status == 400


async def test_an_id_that_is_in_use_is_refused_and_the_first_one_goes_on(a_server) -> None:
    server = await a_server()
    body = {"model": "builtin", "prompt": "They", "max_tokens": 300, "rid": "mine", "ignore_eos": True}
    first = asyncio.ensure_future(post(server.url, body))
    deadline = time.monotonic() + 30
    while "mine" not in server.engine.scheduler.live:
        assert time.monotonic() < deadline, "the first request never came"
        await asyncio.sleep(0.01)
    status, answer = await post(server.url, body)
    assert status == 400 and answer["error"]["code"] == "duplicate_id"
    assert (await first)[0] == 200 and await server.settled()


async def test_a_thousand_requests_at_once_with_a_pool_for_ten(a_server) -> None:
    server = await a_server(pool_slots=320, max_running=10, max_queued=300, contracts="report")
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=200)) as session:

        async def ask(number: int) -> tuple[int, str]:
            body = {"model": "builtin", "prompt": f"Number {number} said", "max_tokens": 8, "temperature": 0}
            async with session.post(f"{server.url}/v1/completions", json=body) as answer:
                content = await answer.json()
                return answer.status, content.get("error", {}).get("message", "")

        answers = await asyncio.gather(*(ask(number) for number in range(1000)))
    statuses = Counter(status for status, _ in answers)
    assert set(statuses) == {200, 503} and statuses[200] >= 300, statuses
    assert all("try again later, or start with a higher --max-queued" in said for code, said in answers if code == 503)
    assert await server.settled()
    assert server.engine.failure is None


# -- commands ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def taken_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield str(taken.getsockname()[1])


def test_a_port_in_use(taken_port, tmp_path: Path) -> None:
    serve = one_line(kvlens("serve", "--port", taken_port, "--ring", str(tmp_path / "a.ring")))
    assert f"cannot listen on 127.0.0.1:{taken_port}" in serve and "choose another with --port" in serve
    observe = one_line(kvlens("observe", "--port", taken_port, "--store", str(tmp_path / "f.db")))
    assert f"cannot listen on 127.0.0.1:{taken_port}" in observe


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "/nowhere"), "there is no model /nowhere"),
        (("--context-length", "9999"), "--context-length 9,999 is more than the 1,024 tokens"),
        (("--page-size", "64", "--pool-slots", "32"), "holds no page"),
        (("--dtype", "int3"), "choose float32"),
        (("--device", "toaster"), "choose cpu, cuda or auto"),
        (("--ring", "/proc/nowhere/a.ring"), "choose another with --ring"),
    ],
)
def test_a_setting_that_cannot_be_is_named(arguments, says, tmp_path: Path) -> None:
    assert says in one_line(kvlens("serve", "--port", "0", *arguments, XDG_RUNTIME_DIR=str(tmp_path)))


def test_a_checkpoint_that_is_not_whole(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "config.json cannot be read" in one_line(kvlens("serve", "--model", str(tmp_path)))
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    assert "has architecture BertModel; kvlens serves LlamaForCausalLM" in one_line(
        kvlens("serve", "--model", str(tmp_path))
    )


def test_a_ring_that_is_truncated_or_of_another_version_or_no_ring(tmp_path: Path) -> None:
    ring = tmp_path / "engine.ring"
    observe = ("observe", "--port", "0", "--store", str(tmp_path / "f.db"), "--ring", str(ring))
    ring.write_bytes(b"not a ring at all" * 1000)
    assert "is no flight recorder of kvlens" in one_line(kvlens(*observe))
    header = int.from_bytes(b"KVLENSFR", "little").to_bytes(8, "little")
    ring.write_bytes(header + (7).to_bytes(8, "little") + bytes(9000))
    assert "has format 7, this kvlens reads 1: use the version that wrote it" in one_line(kvlens(*observe))
    ring.write_bytes(header + (1).to_bytes(8, "little") + (1 << 20).to_bytes(8, "little") + bytes(5000))
    assert "is truncated to" in one_line(kvlens(*observe))
    assert "is no flight recorder" in one_line(kvlens("serve", "--port", "0", "--ring", str(Path(__file__))))


def test_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    said = one_line(kvlens("observe", "--port", "0", "--store", str(tmp_path / "file" / "f.db")))
    assert "findings cannot be kept in" in said and "give --store FILE" in said


def test_commands_that_find_nobody_say_how_to_start_it() -> None:
    nobody = "http://127.0.0.1:1"
    for arguments in (("top", nobody, "--once"), ("findings", "list", "--url", nobody)):
        assert "start `kvlens observe`" in one_line(kvlens(*arguments))
    said = one_line(kvlens("faults", "enable", "double-free", "--url", nobody))
    assert "start `kvlens serve --allow-faults`" in said
    assert "there is no fault nonsense: choose" in one_line(kvlens("faults", "enable", "nonsense", "--url", nobody))
    assert "there is no fault nonsense" in one_line(kvlens("demo", "--headless", "--fault", "nonsense"))
    assert "use `kvlens top --once`" in one_line(kvlens("top", nobody))
