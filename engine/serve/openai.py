"""The OpenAI wire format: requests read and checked, answers built."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Iterator
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvlens.engine.engine import RequestRejected
from kvlens.engine.model.tokenizer import Tokenizer
from kvlens.engine.record import SamplingParams

T = TypeVar("T")

# JSON's integers have no end; the tensors they end up in do.
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
MOST_STOPS = 64
"""Each costs a search per token on the scheduler's thread."""
LEAST_TOP_P = 1e-9
"""Below one over the vocabulary only the likeliest token stays; a smaller number would become 0 in single precision."""
MOST_ID_BYTES = 128
HEAD_CHARACTERS_PER_TOKEN = 16
"""Of a text longer than this for each token that fits, the head is looked at first: it is nearly always too long."""
INTERNAL_ERROR = "the server made a mistake, its log has the traceback: report it"

_PLACE = re.compile(r"`\$\.(\w+)|required field `(\w+)`")
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class FieldRejected(RequestRejected):
    """One field of a request is wrong; `field` is OpenAI's `param`."""

    def __init__(self, field: str | None, message: str, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message, status, code)
        self.field = field


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class Generation(msgspec.Struct, kw_only=True):
    """What completions and chats have in common. Unknown fields are ignored, as clients send many."""

    model: str
    max_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | Int | None = None
    rid: str | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        """The field that limits the answer, and what it says."""
        return "max_tokens", self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def sampling(self, default_tokens: int) -> SamplingParams:
        """Checked parameters. Raises FieldRejected."""
        if self.n not in (None, 1):
            raise FieldRejected("n", f"n is {self.n}: this engine makes one answer per prompt, send n=1")
        if self.logprobs:
            raise FieldRejected("logprobs", "logprobs are not served: leave the field out")
        field, limit = self.limit
        tokens = default_tokens if limit is None else limit
        if tokens < 1:
            raise FieldRejected(field, f"{field} is {tokens}: ask for at least 1")
        temperature = 1.0 if self.temperature is None else self.temperature
        if not 0 <= temperature <= 2:
            raise FieldRejected("temperature", f"temperature is {temperature}: give 0 to 2")
        top_p = 1.0 if self.top_p is None else self.top_p
        if not 0 < top_p <= 1:
            raise FieldRejected("top_p", f"top_p is {top_p}: give more than 0, at most 1")
        if self.top_k is not None and self.top_k < -1:
            raise FieldRejected("top_k", f"top_k is {self.top_k}: give a number of tokens, or 0 for no limit")
        return SamplingParams(
            max_new_tokens=tokens,
            temperature=temperature,
            top_p=max(top_p, LEAST_TOP_P),
            top_k=max(0, self.top_k or 0),
            seed=self.seed,
            stop=self._stops(),
            stop_token_ids=self._stop_token_ids(),
            ignore_eos=bool(self.ignore_eos),
        )

    def _stops(self) -> tuple[str, ...]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if not all(stop):
            raise FieldRejected("stop", "stop holds an empty string: it would end every answer at once")
        if len(stop) > MOST_STOPS:
            raise FieldRejected("stop", f"stop holds {len(stop):,} strings: give at most {MOST_STOPS}")
        return tuple(stop)

    def _stop_token_ids(self) -> tuple[int, ...]:
        ids = self.stop_token_ids or []
        if len(ids) > MOST_STOPS:
            raise FieldRejected("stop_token_ids", f"stop_token_ids holds {len(ids):,} ids: give at most {MOST_STOPS}")
        return tuple(ids)


class CompletionRequest(Generation, kw_only=True):
    prompt: str | list[str | int | list[int]]
    echo: bool | None = None

    def prompts(self, tokenizer: Tokenizer, limit: int) -> Iterator[list[int]]:
        """Token ids of each prompt, at least one prompt; `limit` tokens fit. Raises FieldRejected."""
        if self.echo:
            raise FieldRejected("echo", "echo is not served: leave the field out")
        prompt = self.prompt
        if not isinstance(prompt, str) and not prompt:
            raise FieldRejected("prompt", "prompt is an empty list: send at least one", code="empty_prompt")
        if isinstance(prompt, str):
            prompt = [prompt]
        ids = [part for part in prompt if isinstance(part, int)]
        if len(ids) == len(prompt):
            prompt = [ids]
        elif ids:
            raise FieldRejected("prompt", "prompt mixes texts and token ids: send one kind")
        for part in prompt:
            if isinstance(part, str):
                check_head(part, tokenizer, limit, "prompt")
                yield tokenizer.encode(part)
            elif isinstance(part, list):
                yield part


class ContentPart(msgspec.Struct):
    type: str
    text: str | None = None


class Message(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None

    def plain(self) -> dict[str, str]:
        """What a chat template takes. Raises FieldRejected for what is no text."""
        parts = [] if self.content is None or isinstance(self.content, str) else self.content
        if any(part.type != "text" for part in parts):
            raise FieldRejected("messages", "a message has content that is no text: this engine reads text only")
        text = self.content if isinstance(self.content, str) else "".join(part.text or "" for part in parts)
        return {"role": self.role, "content": text}


class ChatRequest(Generation, kw_only=True):
    messages: list[Message]
    max_completion_tokens: Int | None = None

    @property
    def limit(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def prompts(self, tokenizer: Tokenizer, limit: int) -> Iterator[list[int]]:
        """Token ids of the conversation, as one prompt; `limit` tokens fit. Raises FieldRejected."""
        if not self.messages:
            raise FieldRejected("messages", "messages is empty: send at least one", code="empty_prompt")
        messages = [message.plain() for message in self.messages]
        check_head("".join(message["content"] for message in messages), tokenizer, limit, "messages")
        try:
            yield tokenizer.chat(messages)
        except ValueError as error:
            raise FieldRejected("messages", str(error)) from None


def check_head(text: str, tokenizer: Tokenizer, limit: int, field: str) -> None:
    """Refuse a text whose head alone is too long, without the seconds that all of it takes. Raises FieldRejected."""
    most = HEAD_CHARACTERS_PER_TOKEN * limit
    if len(text) <= most:
        return
    tokens = len(tokenizer.encode(text[:most]))
    if tokens > limit + 1:  # the cut may have made one token of its own
        raise FieldRejected(
            field,
            f"{field} has {len(text):,} characters, the first {most:,} alone are {tokens:,} tokens; with an answer "
            f"{limit:,} fit: shorten it",
            code="context_length_exceeded",
        )


def read(body: bytes, kind: type[T]) -> T:
    """A request body. Raises FieldRejected naming the place that is wrong."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        field = next(filter(None, found.groups()), None) if found else None
        raise FieldRejected(field, f"the request is not what this endpoint takes: {error}") from None
    except msgspec.DecodeError as error:
        raise FieldRejected(None, f"the body is no JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise FieldRejected(None, "the body is nested too deeply", code="invalid_json") from None


def request_id(rid: str | None, header: str | None) -> str | None:
    """The id the caller chose, from the body before the header. Raises FieldRejected.

    It goes into every frame that names the request, as UTF-8 of limited length.
    """
    for field, value in (("rid", rid), ("X-Request-Id", header)):
        if not value:
            continue
        if not value.isprintable():
            raise FieldRejected(field, f"{field} holds characters that cannot be printed: choose another id")
        if (length := len(value.encode())) > MOST_ID_BYTES:
            raise FieldRejected(field, f"{field} has {length:,} bytes: choose one of at most {MOST_ID_BYTES}")
        return value
    return None


def trace_context(header: str | None) -> str | None:
    """A `traceparent` as W3C defines it; another one is ignored, as W3C asks for."""
    return header if header is not None and _TRACEPARENT.fullmatch(header) else None


def error_body(message: str, status: int, code: str, field: str | None = None) -> bytes:
    """An error as OpenAI's clients expect it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": field, "code": code}})


class Shape:
    """Builds the bodies of one answer: completion or chat, whole or in chunks."""

    def __init__(self, model: str, chat: bool, rid: str | None = None) -> None:
        self.id = rid or f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
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
