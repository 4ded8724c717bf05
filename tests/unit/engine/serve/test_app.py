"""The application over HTTP, with an engine whose model is a gate."""

from __future__ import annotations

import asyncio
import io
import json

import pytest

from kvlens.engine.serve import openai
from kvlens.engine.serve.app import MOST_BODY_BYTES, SHUTTING_DOWN

ASK = {"model": "builtin", "prompt": "a", "max_tokens": 4, "ignore_eos": True}


async def events(response) -> list:
    """The events of a stream; `[DONE]` as it is."""
    lines = [line.decode().strip() async for line in response.content]
    data = [line.removeprefix("data: ") for line in lines if line]
    return [line if line == "[DONE]" else json.loads(line) for line in data]


async def test_an_answer_whole_and_streamed(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    async with client.post("/v1/completions", ASK) as whole:
        body = await whole.json()
    assert body["choices"] == [{"index": 0, "logprobs": None, "finish_reason": "length", "text": "aaaa"}]
    async with client.post("/v1/completions", {**ASK, "stream": True}) as stream:
        assert stream.content_type == "text/event-stream"
        *chunks, done = await events(stream)
    assert done == "[DONE]" and "usage" not in chunks[-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "aaaa"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "length"]


async def test_usage_comes_in_a_last_chunk_of_its_own_when_asked_for(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    body = {**ASK, "prompt": ["a", "a"], "stream": True, "stream_options": {"include_usage": True}}
    async with client.post("/v1/completions", body) as stream:
        *chunks, last, done = await events(stream)
    assert done == "[DONE]" and last["choices"] == [] and all(chunk["choices"] for chunk in chunks)
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (2, 8)


async def test_an_engine_that_breaks_in_a_stream_says_so_in_it(a_client, a_gate, until) -> None:
    client = await a_client(a_gate)
    a_gate.close(after=2)
    async with client.post("/v1/completions", {**ASK, "prompt": ["a", "a"], "stream": True}) as stream:
        assert stream.status == 200
        await until(a_gate.entered.is_set)
        a_gate.error = OSError("the chip has melted")
        a_gate.open()
        *chunks, last = await events(stream)
    assert chunks and all("choices" in chunk for chunk in chunks)
    assert "the chip has melted" in last["error"]["message"] and last["error"]["type"] == "server_error"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_breaks_before_the_first_token_is_a_500_and_then_a_503(a_client, a_gate, stream) -> None:
    client = await a_client(a_gate)
    a_gate.error = OSError("the chip has melted")
    async with client.post("/v1/completions", {**ASK, "prompt": ["a", "a"], "stream": stream}) as answer:
        assert answer.status == 500 and "the chip has melted" in (await answer.json())["error"]["message"]
    async with client.post("/v1/completions", ASK) as answer:
        assert answer.status == 503 and "restart it" in (await answer.json())["error"]["message"]
        assert "Retry-After" not in answer.headers
    async with client.get("/health") as answer:
        assert answer.status == 503 and (await answer.json())["status"] == "failed"


async def test_a_full_queue_says_when_to_come_back(a_client, a_gate, until) -> None:
    client = await a_client(a_gate, max_running=1, max_queued=1)
    a_gate.close()
    waiting = [asyncio.ensure_future(client.post("/v1/completions", ASK).__aenter__()) for _ in range(2)]
    await until(a_gate.entered.is_set)
    await until(lambda: len(client.engine._ids) == 2)
    async with client.post("/v1/completions", ASK) as answer:
        assert answer.status == 503 and answer.headers["Retry-After"] == "1"
        assert "try again later, or start with a higher --max-queued" in (await answer.json())["error"]["message"]
    a_gate.open()
    assert [answer.status for answer in await asyncio.gather(*waiting)] == [200, 200]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_shutdown_ends_who_runs_with_a_reason(a_client, a_gate, stream, until) -> None:
    client = await a_client(a_gate)
    a_gate.close(after=2)
    asked = asyncio.ensure_future(client.post("/v1/completions", {**ASK, "stream": stream}).__aenter__())
    await until(a_gate.entered.is_set)
    if stream:
        await asked
    closing = asyncio.ensure_future(client.server.close())
    await until(lambda: client.engine._inbox.qsize())  # the abort has come
    a_gate.open()
    answer = await asked
    if stream:
        *chunks, last = await events(answer)
        assert chunks and last["error"]["message"] == SHUTTING_DOWN
    else:
        assert answer.status == 503 and (await answer.json())["error"]["message"] == SHUTTING_DOWN
    await closing
    assert client.engine.is_idle
    assert client.engine.memory.rows.available_size() == client.engine.memory.rows.size


async def test_a_connection_that_is_open_gets_nothing_more_while_the_server_shuts_down(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    await client.server.app.shutdown()
    async with client.get("/health") as answer:
        assert answer.status == 503 and (await answer.json())["status"] == "stopping"
    async with client.post("/v1/completions", ASK) as answer:
        assert answer.status == 503 and (await answer.json())["error"]["message"] == SHUTTING_DOWN


async def test_an_error_nobody_thought_of_is_a_500_in_openais_shape(a_client, a_gate, monkeypatch, capsys) -> None:
    client = await a_client(a_gate)
    monkeypatch.setattr(client.engine.tokenizer, "encode", lambda text: 1 / 0)
    async with client.post("/v1/completions", ASK) as answer:
        assert answer.status == 500
        assert (await answer.json())["error"] == {
            "message": openai.INTERNAL_ERROR, "type": "server_error", "param": None, "code": "internal_error"
        }  # fmt: skip
    assert "ZeroDivisionError" in capsys.readouterr().err


async def test_a_body_that_is_too_long_says_how_long_it_may_be(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    body = io.BytesIO(b" " * (MOST_BODY_BYTES + 1))
    async with client.session.post(client.server.make_url("/v1/completions"), data=body) as answer:
        assert answer.status == 413 and "longer than 16,777,216 bytes" in (await answer.json())["error"]["message"]


async def test_the_model_is_asked_for_by_name(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    for model, said in (("other", "model other is"), ("x" * 5000, f"model {'x' * 100}... is")):
        async with client.post("/v1/completions", {**ASK, "model": model}) as answer:
            error = (await answer.json())["error"]
        assert answer.status == 404 and error["message"] == f"{said} not served here: use builtin"
        assert (error["param"], error["code"]) == ("model", "model_not_found")
    async with client.get("/v1/models") as answer:
        (entry,) = (await answer.json())["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == ("builtin", "model", 65)


async def test_ids_and_traces_reach_the_engine(a_client, a_gate, until) -> None:
    client = await a_client(a_gate)
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    a_gate.close()
    url = client.server.make_url("/v1/completions")
    headers = {"X-Request-Id": "theirs", "traceparent": trace}
    asked = asyncio.ensure_future(client.session.post(url, json={**ASK, "prompt": ["a", "b"]}, headers=headers))
    await until(a_gate.entered.is_set)
    assert {(req.rid, req.trace) for req in client.engine.scheduler.live.values()} == {
        ("theirs", trace), ("theirs-1", trace)
    }  # fmt: skip
    a_gate.open()
    assert (await (await asked).json())["id"] == "theirs"


async def test_an_abort_names_somebody(a_client, a_gate) -> None:
    client = await a_client(a_gate)
    for body in ({}, {"rid": ""}, {"rid": None}):
        async with client.post("/abort_request", body) as answer:
            assert answer.status == 400 and "name the request" in (await answer.json())["error"]["message"]
    async with client.post("/abort_request", {"rid": "nobody"}) as answer:
        assert answer.status == 404
    async with client.post("/abort_request", {"rid": 3}) as answer:
        assert answer.status == 400 and (await answer.json())["error"]["param"] == "rid"


async def test_one_abort_ends_every_prompt_of_an_answer(a_client, a_gate, until) -> None:
    client = await a_client(a_gate)
    a_gate.close(after=1)
    body = {**ASK, "prompt": ["a", "b"], "rid": "mine", "max_tokens": 40}
    asked = asyncio.ensure_future(client.post("/v1/completions", body).__aenter__())
    await until(a_gate.entered.is_set)
    abort = asyncio.ensure_future(client.post("/abort_request", {"rid": "mine"}).__aenter__())
    await until(lambda: client.engine._inbox.qsize() == 2)
    a_gate.open()
    assert await (await abort).json() == {"aborted": 2}
    choices = (await (await asked).json())["choices"]
    assert [choice["finish_reason"] for choice in choices] == ["abort", "abort"]


async def test_the_server_says_what_it_was_started_with(a_client, a_gate) -> None:
    client = await a_client(a_gate, page_size=16)
    async with client.get("/get_server_info") as answer:
        info = await answer.json()
    assert (info["model"], info["max_total_tokens"], info["settings"]["page_size"]) == ("builtin", 65, 16)


async def test_faults_are_switched_on_and_off(a_client, a_gate) -> None:
    client = await a_client(a_gate, allow_faults=True)
    for enabled in (True, False):
        async with client.post("/faults/double-free", {"enabled": enabled}) as answer:
            assert answer.status == 200
        async with client.get("/faults") as answer:
            assert (await answer.json())["active"] == (["double-free"] if enabled else [])
    async with client.post("/faults/double-free", {"times": 0}) as answer:
        assert answer.status == 400 and (await answer.json())["error"]["param"] == "times"
