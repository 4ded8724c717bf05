"""OpenAI's wire format: what is read, what is refused and in whose name, what is written."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvlens.engine.engine import RequestRejected
from kvlens.engine.record import SamplingParams
from kvlens.engine.serve import openai


class Letters:
    """A tokenizer of one token per character; remembers how much it was asked."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode(self, text: str) -> list[int]:
        self.encoded += len(text)
        return [ord(letter) for letter in text]

    def chat(self, messages) -> list[int]:
        if messages[0]["role"] == "tool":
            raise ValueError("the chat template refuses these messages: no tools")
        return self.encode("".join(message["content"] for message in messages))


def a_completion(**fields) -> openai.CompletionRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return openai.read(json.dumps(body).encode(), openai.CompletionRequest)


def a_chat(*messages, **fields) -> openai.ChatRequest:
    body = {"model": "m", "messages": [{"role": role, "content": content} for role, content in messages], **fields}
    return openai.read(json.dumps(body).encode(), openai.ChatRequest)


def prompts(asked, limit: int = 100) -> list[list[int]]:
    return list(asked.prompts(Letters(), limit))


# -- reading ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "field", "says"),
    [
        (b"{", None, "the body is no JSON"),
        (b"", None, "the body is no JSON"),
        (b"[]", None, "Expected `object`, got `array`"),
        (b"[" * 100_000, None, "what this endpoint takes"),
        (b'{"prompt": "x"}', "model", "missing required field `model`"),
        (b'{"model": "m", "prompt": "x", "max_tokens": "many"}', "max_tokens", "got `str`"),
        (b'{"model": "m", "prompt": "x", "max_tokens": 1e999}', "max_tokens", "out of range"),
        (b'{"model": "m", "prompt": [1.5]}', "prompt", "got `float`"),
        (b'{"model": "m", "prompt": "x", "stream_options": {"include_usage": 3}}', "stream_options", "got `int`"),
        (b'{"model": "m", "prompt": "x", "seed": 1%b}' % (b"0" * 5000), "seed", "seed"),
        (b'{"model": "m", "prompt": "x", "top_k": 18446744073709551616}', "top_k", "<= 9223372036854775807"),
    ],
)
def test_what_cannot_be_read_is_refused_in_the_name_of_its_field(body, field, says) -> None:
    with pytest.raises(openai.FieldRejected) as refused:
        openai.read(body, openai.CompletionRequest)
    assert (refused.value.field, refused.value.status) == (field, 400)
    assert says in str(refused.value)


def test_unknown_fields_are_ignored_and_null_is_the_default() -> None:
    names = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "stop_token_ids", "ignore_eos", "n")
    nothing = dict.fromkeys((*names, "stream", "stream_options", "logprobs", "rid", "echo"))
    asked = a_completion(**nothing, best_of=3, nonsense={"a": 1})
    assert asked.sampling(16) == a_completion().sampling(16) == SamplingParams(max_new_tokens=16, temperature=1.0)
    assert not asked.stream and not asked.includes_usage and prompts(asked) == [[104, 105]]


def test_sampling_takes_what_was_asked() -> None:
    asked = a_completion(
        max_tokens=7,
        temperature=0.5,
        top_p=0.25,
        top_k=9,
        seed=-3,
        stop=["x", "yz"],
        stop_token_ids=[4],
        ignore_eos=True,
    )
    assert asked.sampling(16) == SamplingParams(7, 0.5, 0.25, 9, -3, ("x", "yz"), (4,), True)
    assert a_completion(stop="x").sampling(16).stop == ("x",)
    assert a_completion(top_k=-1).sampling(16).top_k == 0
    assert a_chat(("user", "a"), max_tokens=3, max_completion_tokens=5).sampling(16).max_new_tokens == 5
    assert a_chat(("user", "a"), max_tokens=3).sampling(16).max_new_tokens == 3


def test_sampling_stays_within_what_tensors_hold() -> None:
    """A top_p that is 0 in single precision leaves no token to choose."""
    assert np.float32(a_completion(top_p=1e-300).sampling(16).top_p) > 0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("n", 2, "n is 2: this engine makes one answer per prompt, send n=1"),
        ("n", 0, "n is 0"),
        ("logprobs", 1, "logprobs are not served"),
        ("max_tokens", 0, "max_tokens is 0: ask for at least 1"),
        ("max_tokens", -1, "max_tokens is -1: ask for at least 1"),
        ("temperature", -0.1, "temperature is -0.1: give 0 to 2"),
        ("temperature", 2.1, "temperature is 2.1: give 0 to 2"),
        ("top_p", 0, "top_p is 0.0: give more than 0"),
        ("top_p", 1.1, "top_p is 1.1"),
        ("top_k", -2, "top_k is -2"),
        ("stop", "", "stop holds an empty string"),
        ("stop", ["x", ""], "stop holds an empty string"),
        ("stop", ["x"] * 65, "stop holds 65 strings: give at most 64"),
        ("stop_token_ids", [1] * 65, "stop_token_ids holds 65 ids: give at most 64"),
    ],
)
def test_a_parameter_that_cannot_be_is_named(field, value, says) -> None:
    with pytest.raises(openai.FieldRejected) as refused:
        a_completion(**{field: value}).sampling(16)
    assert refused.value.field == field and says in str(refused.value)


def test_the_limit_is_named_as_it_was_given() -> None:
    with pytest.raises(openai.FieldRejected, match="max_completion_tokens is 0") as refused:
        a_chat(("user", "a"), max_completion_tokens=0).sampling(16)
    assert refused.value.field == "max_completion_tokens"


# -- prompts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "ids"),
    [
        ("ab", [[97, 98]]),
        (["a", "bc"], [[97], [98, 99]]),
        ([5, 6], [[5, 6]]),
        ([[5], [6, 7]], [[5], [6, 7]]),
        (["a", [7]], [[97], [7]]),
        ("", [[]]),
    ],
)
def test_every_kind_of_prompt(prompt, ids) -> None:
    assert prompts(a_completion(prompt=prompt)) == ids


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ({"prompt": []}, "prompt", "prompt is an empty list"),
        ({"prompt": ["a", 3]}, "prompt", "mixes texts and token ids"),
        ({"prompt": [[1], 3]}, "prompt", "mixes texts and token ids"),
        ({"echo": True}, "echo", "echo is not served"),
    ],
)
def test_a_prompt_that_cannot_be_is_refused(fields, field, says) -> None:
    with pytest.raises(openai.FieldRejected, match=says) as refused:
        prompts(a_completion(**fields))
    assert refused.value.field == field


def test_a_chat_is_one_prompt_of_texts() -> None:
    parts = [{"type": "text", "text": "c"}, {"type": "text", "text": "d"}]
    assert prompts(a_chat(("system", "ab"), ("user", parts), ("assistant", None))) == [[97, 98, 99, 100]]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ((), "messages is empty"),
        ((("tool", "x"),), "the chat template refuses these messages"),
        ((("user", [{"type": "image_url"}]),), "reads text only"),
    ],
)
def test_a_chat_that_cannot_be_is_refused(messages, says) -> None:
    with pytest.raises(openai.FieldRejected, match=says) as refused:
        prompts(a_chat(*messages))
    assert refused.value.field == "messages"


@pytest.mark.parametrize("make", [lambda text: a_completion(prompt=text), lambda text: a_chat(("user", text))])
def test_a_text_that_is_far_too_long_is_refused_by_its_head(make) -> None:
    tokenizer = Letters()
    with pytest.raises(openai.FieldRejected, match="has 1,000,000 characters, the first 160 alone are 160") as refused:
        list(make("x" * 1_000_000).prompts(tokenizer, 10))
    assert tokenizer.encoded == 160
    assert refused.value.code == "context_length_exceeded"


def test_a_long_text_of_few_tokens_is_let_in() -> None:
    class Words(Letters):
        def encode(self, text: str) -> list[int]:
            return [len(word) for word in text.split()]

    text = "x" * 400 + " y"
    assert list(a_completion(prompt=text).prompts(Words(), 10)) == [[400, 1]]


# -- ids and traces ---------------------------------------------------------------------------------------------------


def test_an_id_comes_from_the_body_before_the_header() -> None:
    assert openai.request_id("mine", "theirs") == "mine"
    assert openai.request_id(None, "theirs") == openai.request_id("", "theirs") == "theirs"
    assert openai.request_id(None, None) is None
    assert openai.request_id("é" * 64, None) == "é" * 64


@pytest.mark.parametrize(
    ("rid", "header", "field", "says"),
    [
        ("x" * 129, None, "rid", "rid has 129 bytes: choose one of at most 128"),
        ("é" * 65, None, "rid", "has 130 bytes"),
        ("a\nb", None, "rid", "cannot be printed"),
        (None, "\udcff", "X-Request-Id", "X-Request-Id holds characters that cannot be printed"),
    ],
)
def test_an_id_that_no_frame_can_carry_is_refused(rid, header, field, says) -> None:
    with pytest.raises(openai.FieldRejected, match=says) as refused:
        openai.request_id(rid, header)
    assert refused.value.field == field


@pytest.mark.parametrize(
    "header", [None, "", "\udcff", "00-1-2-01", "00-" + "g" * 32 + "-" + "1" * 16 + "-01", "9" * 8000]
)
def test_a_traceparent_that_is_none_is_ignored(header) -> None:
    assert openai.trace_context(header) is None


def test_a_traceparent_goes_on_unchanged() -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert openai.trace_context(header) == header


# -- writing ----------------------------------------------------------------------------------------------------------


def test_an_error_has_openais_four_keys() -> None:
    assert json.loads(openai.error_body("no", 400, "bad", "stop")) == {
        "error": {"message": "no", "type": "invalid_request_error", "param": "stop", "code": "bad"}
    }
    assert json.loads(openai.error_body("no", 503, "full"))["error"]["type"] == "server_error"
    assert isinstance(openai.FieldRejected("stop", "no"), RequestRejected)


def test_ids_tell_completions_from_chats_and_never_repeat() -> None:
    ids = {openai.Shape("m", chat).id for chat in (True, False) for _ in range(100)}
    assert len(ids) == 200 and sum(rid.startswith("chatcmpl-") for rid in ids) == 100
    assert sum(rid.startswith("cmpl-") for rid in ids) == 100
    assert openai.Shape("m", True, "mine").id == "mine"


def test_a_chunk_of_a_chat_names_the_role_once() -> None:
    chat, completion = openai.Shape("m", True), openai.Shape("m", False)
    first, later = json.loads(chat.chunk(0, "a", None, True)), json.loads(chat.chunk(0, "b", "stop", False))
    assert first["object"] == later["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "a"}
    assert later["choices"][0]["delta"] == {"content": "b"} and later["choices"][0]["finish_reason"] == "stop"
    assert json.loads(completion.chunk(1, "a", None, True))["choices"][0]["text"] == "a"
    assert json.loads(chat.usage_chunk(openai.usage(3, 4, 2))) | {"id": "", "created": 0} == {
        "id": "", "created": 0, "object": "chat.completion.chunk", "model": "m", "choices": [],
        "usage": {
            "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}
        },
    }  # fmt: skip
