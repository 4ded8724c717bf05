"""The official `openai` client against the server."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

import aiohttp
import openai
import pytest
import torch
from openai import AsyncOpenAI
from transformers import LlamaConfig, LlamaForCausalLM

from kvlens.engine.model.config import resolve_model

PROMPT = "It is a truth universally acknowledged, that"
GREEDY = " it is not a sad change of mind which I have been used to think of. I have been too much in"


@pytest.fixture
async def server(a_server):
    return await a_server()


@pytest.fixture
async def client(server):
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_models_are_listed(client) -> None:
    assert [model.id async for model in client.models.list()] == ["builtin"]


async def test_a_completion(client, server) -> None:
    answer = await client.completions.create(model="builtin", prompt=PROMPT, max_tokens=24, temperature=0)
    assert answer.choices[0].text == GREEDY
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (13, 24)
    assert await server.settled()


async def test_a_streamed_completion_is_the_same_text(client, server) -> None:
    stream = await client.completions.create(
        model="builtin",
        prompt=PROMPT,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == GREEDY
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "length"
    assert chunks[-1].usage.completion_tokens == 24
    assert await server.settled()


async def test_several_prompts_have_their_own_answers(client) -> None:
    both = await client.completions.create(
        model="builtin", prompt=[PROMPT, "Emma"], max_tokens=24, temperature=0, stop=["xyz"]
    )
    alone = await client.completions.create(model="builtin", prompt="Emma", max_tokens=24, temperature=0)
    assert [choice.text for choice in both.choices] == [GREEDY, alone.choices[0].text]
    assert [choice.index for choice in both.choices] == [0, 1]
    chunks = [
        chunk
        async for chunk in await client.completions.create(
            model="builtin", prompt=[PROMPT, "Emma"], max_tokens=24, temperature=0, stream=True
        )
    ]
    texts = ["".join(c.choices[0].text for c in chunks if c.choices[0].index == index) for index in (0, 1)]
    assert texts == [GREEDY, alone.choices[0].text]


async def test_token_ids_are_a_prompt_too(client, server) -> None:
    ids = server.engine.tokenizer.encode(PROMPT)
    answer = await client.completions.create(model="builtin", prompt=ids, max_tokens=24, temperature=0)
    assert answer.choices[0].text == GREEDY


async def test_a_stop_string_ends_the_text_before_it(client) -> None:
    for stream in (False, True):
        answer = await client.completions.create(
            model="builtin", prompt=PROMPT, max_tokens=60, temperature=0, stop=["used to"], stream=stream
        )
        if stream:
            chunks = [chunk async for chunk in answer]
            text, reason = "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason
        else:
            text, reason = answer.choices[0].text, answer.choices[0].finish_reason
        assert (text, reason) == (GREEDY[: GREEDY.index("used to")], "stop")


async def test_a_chat_streamed_and_not(client, server) -> None:
    messages = [{"role": "system", "content": "You are Mr. Darcy."}, {"role": "user", "content": "Good morning."}]
    answer = await client.chat.completions.create(model="builtin", messages=messages, max_tokens=20, temperature=0)
    assert answer.choices[0].message.role == "assistant" and answer.choices[0].message.content
    stream = await client.chat.completions.create(
        model="builtin", messages=messages, max_completion_tokens=20, temperature=0, stream=True
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == answer.choices[0].message.content
    assert await server.settled()


async def test_a_chat_without_a_limit_ends_within_the_context(client) -> None:
    answer = await client.chat.completions.create(
        model="builtin", messages=[{"role": "user", "content": "Hm. " * 290}], temperature=0
    )
    assert answer.usage.total_tokens <= 1024


async def test_a_seed_makes_sampling_repeatable_whoever_shares_the_batch(client) -> None:
    async def ask(prompt: str, seed: int) -> str:
        answer = await client.completions.create(
            model="builtin",
            prompt=prompt,
            max_tokens=20,
            temperature=0.9,
            top_p=0.9,
            seed=seed,
            extra_body={"top_k": 40},
        )
        return answer.choices[0].text

    alone = await ask(PROMPT, 5)
    crowd = await asyncio.gather(ask("Emma", 1), ask(PROMPT, 5), ask("Sir Walter", 2), ask(PROMPT, 6))
    assert crowd[1] == alone != crowd[3]


async def test_the_second_turn_hits_the_prefix_cache(client) -> None:
    prompt = "She walked to the window. " * 12
    await client.completions.create(model="builtin", prompt=prompt, max_tokens=4, temperature=0)
    again = await client.completions.create(model="builtin", prompt=prompt + "She", max_tokens=4, temperature=0)
    assert again.usage.prompt_tokens_details.cached_tokens >= 48


# -- hanging up, aborting, flushing -----------------------------------------------------------------------------------


async def the_running_request(server):
    """The one request that has begun to answer; fails when there is none for 30 s."""
    deadline = time.monotonic() + 30
    while not server.engine.scheduler.running.reqs:
        assert time.monotonic() < deadline, "nothing runs"
        await asyncio.sleep(0.005)
    (req,) = server.engine.scheduler.running.reqs
    return req


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_disconnects_aborts_its_request(server, stream) -> None:
    body = {"model": "builtin", "prompt": "They " * 20, "max_tokens": 900, "stream": stream, "ignore_eos": True}
    async with aiohttp.ClientSession() as session:
        asked = asyncio.ensure_future(session.post(f"{server.url}/v1/completions", json=body))
        req = await the_running_request(server)
        if stream:
            response = await asked
            await response.content.readline()
            response.close()
        else:
            asked.cancel()
            await asyncio.gather(asked, return_exceptions=True)
    assert await server.settled()
    assert (req.finish.kind, req.finish.message) == ("abort", "the client went away")
    assert len(req.output_ids) < 900


async def test_a_stream_that_the_client_closes_aborts_its_request(client, server) -> None:
    stream = await client.chat.completions.create(
        model="builtin", messages=[{"role": "user", "content": "They"}], stream=True, extra_body={"ignore_eos": True}
    )
    await anext(aiter(stream))
    req = await the_running_request(server)
    await stream.close()
    assert await server.settled() and req.finish.message == "the client went away"


async def test_a_request_is_aborted_by_its_id(client, server) -> None:
    async with aiohttp.ClientSession() as session:
        stream = await client.completions.create(
            model="builtin", prompt="They", max_tokens=900, stream=True, extra_body={"rid": "mine", "ignore_eos": True}
        )
        first = await anext(aiter(stream))
        assert first.id == "mine"
        async with session.post(f"{server.url}/abort_request", json={"rid": "mine"}) as answer:
            assert await answer.json() == {"aborted": 1}
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].choices[0].finish_reason == "abort"
        async with session.post(f"{server.url}/abort_request", json={"rid": "mine"}) as answer:
            assert answer.status == 404 and "has ended, or never came" in (await answer.json())["error"]["message"]
        async with session.post(f"{server.url}/abort_request", json={"abort_all": True}) as answer:
            assert await answer.json() == {"aborted": 0}
    assert await server.settled()


async def test_a_flush_empties_the_cache_and_waits_for_nobody(client, server) -> None:
    await client.completions.create(model="builtin", prompt=PROMPT * 4, max_tokens=2, temperature=0)
    assert await server.settled() and server.engine.memory.cache.total_size() > 0
    async with aiohttp.ClientSession() as session:
        async with session.post(f"{server.url}/flush_cache") as answer:
            assert await answer.json() == {"flushed": True}
        assert server.engine.memory.cache.total_size() == 0
        stream = await client.completions.create(
            model="builtin", prompt="They", max_tokens=900, stream=True, extra_body={"ignore_eos": True}
        )
        await anext(aiter(stream))
        async with session.post(f"{server.url}/flush_cache") as answer:
            assert answer.status == 409 and "flush when they have ended" in (await answer.json())["error"]["message"]
        await stream.close()
        async with session.get(f"{server.url}/health") as answer:
            assert (await answer.json())["status"] == "ok"
    assert await server.settled()


# -- mistakes ---------------------------------------------------------------------------------------------------------


async def test_mistakes_are_the_clients_own_exceptions_and_cost_no_slot(client, server) -> None:
    with pytest.raises(openai.NotFoundError, match="model gpt-5 is not served here: use builtin"):
        await client.completions.create(model="gpt-5", prompt="x")
    for match, arguments in {
        "the prompt has no tokens": {"prompt": ""},
        "prompt is an empty list": {"prompt": []},
        "the context is 1,024": {"prompt": [5] * 1024},
        "n is 3: this engine makes one answer": {"prompt": "x", "n": 3},
        "max_tokens is 0: ask for at least 1": {"prompt": "x", "max_tokens": 0},
        "temperature is 7": {"prompt": "x", "temperature": 7},
        "top_p is 0": {"prompt": "x", "top_p": 0},
        "stop holds an empty string": {"prompt": "x", "stop": [""]},
        "logprobs are not served": {"prompt": "x", "logprobs": 3},
        "echo is not served": {"prompt": "x", "echo": True},
        "ids outside 0..2,047": {"prompt": [1, 99999]},
        "mixes texts and token ids": {"prompt": ["x", 3]},
    }.items():
        with pytest.raises(openai.BadRequestError, match=match):
            await client.completions.create(model="builtin", **arguments)
    with pytest.raises(openai.BadRequestError, match="messages is empty"):
        await client.chat.completions.create(model="builtin", messages=[])
    assert server.engine.is_idle and await server.settled()
    assert server.engine.memory.rows.req_generation.sum() == 0


async def test_an_error_tells_the_client_which_field_and_a_code(client) -> None:
    for arguments, param, code in (
        ({"model": "gpt-5", "prompt": "x"}, "model", "model_not_found"),
        ({"model": "builtin", "prompt": "x", "n": 2}, "n", "invalid_request"),
        ({"model": "builtin", "prompt": []}, "prompt", "empty_prompt"),
        ({"model": "builtin", "prompt": "x", "extra_body": {"max_tokens": "many"}}, "max_tokens", "invalid_request"),
        ({"model": "builtin", "prompt": "It is a truth. " * 9000}, "prompt", "context_length_exceeded"),
    ):
        with pytest.raises(openai.APIStatusError) as refused:
            await client.completions.create(**arguments)
        assert (refused.value.param, refused.value.code) == (param, code)
        assert refused.value.type == "invalid_request_error"


# -- another model ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A random Llama of `transformers`, with the bundled tokenizer."""
    torch.manual_seed(3)
    shape = LlamaConfig(
        vocab_size=2048, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    directory = tmp_path_factory.mktemp("models") / "tiny-random"
    LlamaForCausalLM(shape).save_pretrained(directory)
    shutil.copy(resolve_model("builtin") / "tokenizer.json", directory)
    return directory


async def test_a_checkpoint_of_transformers_answers_under_its_own_name(a_server, checkpoint) -> None:
    server = await a_server(model=str(checkpoint))
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["tiny-random"]
        ids = server.engine.tokenizer.encode(PROMPT)
        answer = await client.completions.create(
            model="tiny-random", prompt=PROMPT, max_tokens=20, temperature=0, extra_body={"ignore_eos": True}
        )
        model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
        with torch.no_grad():
            told = model.generate(
                torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), do_sample=False,
                max_new_tokens=20, min_new_tokens=20, pad_token_id=0, eos_token_id=2047,
            )  # fmt: skip
        assert answer.choices[0].text == server.engine.tokenizer.decode(told[0, len(ids) :].tolist())
        assert answer.usage.completion_tokens == 20
        with pytest.raises(openai.NotFoundError, match="model builtin is not served here: use tiny-random"):
            await client.completions.create(model="builtin", prompt="x")
    assert await server.settled()
