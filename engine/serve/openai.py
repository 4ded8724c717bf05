"""The OpenAI wire format: requests read and checked, answers built."""

from __future__ import annotations

import secrets
import time
from typing import Any, Literal, TypeVar

import msgspec

from kvlens.engine.engine import RequestRejected
from kvlens.engine.model.tokenizer import Tokenizer
from kvlens.engine.record import SamplingParams

R = TypeVar("R", bound="Generation")


class StreamOptions(msgspec.Struct):
    include_usage: bool = False


class Generation(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. Unknown fields are ignored, as clients send many."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool | int | None = None
    rid: str | None = None

    def sampling(self, default_tokens: int) -> SamplingParams:
        """Checked parameters. Raises RequestRejected naming the field."""
        if self.n not in (None, 1):
            raise RequestRejected(f"n is {self.n}: this engine makes one answer per prompt, send n=1")
        if self.logprobs:
            raise RequestRejected("logprobs are not served: leave the field out")
        tokens = default_tokens if self.max_tokens is None else self.max_tokens
        if tokens < 1:
            raise RequestRejected(f"max_tokens is {tokens}: ask for at least 1")
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 <= temperature <= 2:
            raise RequestRejected(f"temperature is {temperature}: give 0 to 2")
        top_p = 1.0 if self.top_p is None else self.top_p
        if not 0 < top_p <= 1:
            raise RequestRejected(f"top_p is {top_p}: give more than 0, at most 1")
        if self.top_k is not None and self.top_k < -1:
            raise RequestRejected(f"top_k is {self.top_k}: give a number of tokens, or 0 for no limit")
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise RequestRejected("stop holds an empty string: it would end every answer at once")
        return SamplingParams(
            max_new_tokens=tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=self.ignore_eos,
        )


class CompletionRequest(Generation, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool = False

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of each prompt. Raises RequestRejected."""
        if self.echo:
            raise RequestRejected("echo is not served: leave the field out")
        prompt = self.prompt
        if isinstance(prompt, str):
            return [tokenizer.encode(prompt)]
        if not prompt:
            return []
        if all(isinstance(part, int) for part in prompt):
            return [[part for part in prompt if isinstance(part, int)]]
        if any(isinstance(part, int) for part in prompt):
            raise RequestRejected("prompt mixes texts and token ids: send one kind")
        return [tokenizer.encode(part) if isinstance(part, str) else list(part) for part in prompt]  # type: ignore[arg-type]


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, Any]:
        """What a chat template takes. Raises RequestRejected for what is no text."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        if any(part.type != "text" for part in parts):
            raise RequestRejected("a message has content that is no text: this engine reads text only")
        text = self.content if isinstance(self.content, str) else "".join(part.text or "" for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(Generation, kw_only=True):
    messages: list[Message]
    max_completion_tokens: int | None = None

    def prompts(self, tokenizer: Tokenizer) -> list[list[int]]:
        """Token ids of the conversation. Raises RequestRejected."""
        if not self.messages:
            raise RequestRejected("messages is empty: send at least one", code="empty_prompt")
        try:
            return [tokenizer.chat([message.plain() for message in self.messages])]
        except ValueError as error:
            raise RequestRejected(str(error)) from None


def read(body: bytes, kind: type[R]) -> R:
    """A request body. Raises RequestRejected naming the place that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestRejected(f"the request is not what this endpoint takes: {error}") from None
    except msgspec.DecodeError as error:
        raise RequestRejected(f"the body is no JSON: {error}", code="invalid_json") from None


def error_body(message: str, status: int, code: str) -> bytes:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": code}})


class Shape:
    """Builds the bodies of one answer: completion or chat, whole or in chunks."""

    def __init__(self, model: str, chat: bool) -> None:
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._model = model
        self._chat = chat
        self._created = int(time.time())

    def _body(self, choices: list[dict[str, Any]], chunk: bool, usage: dict[str, Any] | None) -> bytes:
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self._chat else "text_completion"
        body = {"id": self.id, "object": kind, "created": self._created, "model": self._model, "choices": choices}
        return msgspec.json.encode(body if usage is None else {**body, "usage": usage})

    def whole(self, texts: list[tuple[str, str]], usage: dict[str, Any]) -> bytes:
        """texts: (text, finish reason) of each choice."""
        choices = [
            {"index": index, "logprobs": None, "finish_reason": reason, **self._content(text)}
            for index, (text, reason) in enumerate(texts)
        ]
        return self._body(choices, False, usage)

    def chunk(self, index: int, text: str, reason: str | None, first: bool) -> bytes:
        if self._chat:
            content: dict[str, Any] = {"delta": {"role": "assistant", "content": text} if first else {"content": text}}
        else:
            content = {"text": text}
        return self._body([{"index": index, "logprobs": None, "finish_reason": reason, **content}], True, None)

    def usage_chunk(self, usage: dict[str, Any]) -> bytes:
        return self._body([], True, usage)

    def _content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }  # fmt: skip
