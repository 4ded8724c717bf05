"""The bridge between the scheduler's thread and the event loop, with an engine that only remembers."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future

import pytest

from kvlens.engine.engine import EngineConfig, RequestRejected
from kvlens.engine.record import FinishReason, SamplingParams
from kvlens.engine.schedule.scheduler import Output
from kvlens.engine.serve.streams import Streams

SAMPLING = SamplingParams(max_new_tokens=4)
LENGTH = FinishReason("length")


class Remembering:
    """The engine's outside. Nothing runs; a test says what comes of it through `tell`."""

    def __init__(self) -> None:
        self.config = EngineConfig(max_running=2, max_queued=2)
        self.submitted: list[tuple[str, str | None]] = []
        self.aborted: list[tuple[str | None, str]] = []

    def start(self, on_outputs) -> None:
        self.tell = on_outputs

    def submit(self, rid, prompt, sampling, trace) -> None:
        self._check_request(rid, prompt, sampling)
        if prompt == [666]:
            raise RequestRejected("it stopped just now", 503, "engine_stopped")
        self.submitted.append((rid, trace))

    def _check_request(self, rid, prompt, sampling) -> None:
        if not prompt:
            raise RequestRejected("the prompt has no tokens")

    def abort(self, rid=None, message="aborted on request") -> Future[int]:
        self.aborted.append((rid, message))
        future: Future[int] = Future()
        future.set_result(1)
        return future


def an_output(rid: str, *tokens: int, finish: FinishReason | None = None) -> Output:
    return Output(rid, tokens, finish, 1, 0)


@pytest.fixture
async def engine() -> Remembering:
    return Remembering()


@pytest.fixture
async def streams(engine) -> Streams:
    streams = Streams(engine)
    streams.start()
    return streams


async def turn() -> None:
    """Let the loop run what was put into it from outside."""
    for _ in range(3):
        await asyncio.sleep(0)


async def tokens(outputs) -> list[int]:
    return [token async for output in outputs for token in output.token_ids]


async def end(outputs) -> FinishReason | None:
    return [output.finish async for output in outputs][-1]


async def test_outputs_go_to_whom_they_belong_until_the_end(engine, streams) -> None:
    async with streams.open({"a": [1]}, SAMPLING, "trace") as (a,), streams.open({"b": [1]}, SAMPLING, None) as (b,):
        engine.tell([an_output("a", 1), an_output("b", 7), an_output("nobody", 9)])
        engine.tell([an_output("b", 8, finish=LENGTH), an_output("a", 2, finish=LENGTH)])
        assert [await tokens(a), await tokens(b)] == [[1, 2], [7, 8]]
    assert engine.submitted == [("a", "trace"), ("b", None)] and not engine.aborted


async def test_a_step_is_one_call_into_the_loop_however_many_it_serves(engine, streams, monkeypatch) -> None:
    calls = []
    loop = asyncio.get_running_loop()
    threadsafe = loop.call_soon_threadsafe
    monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *args: (calls.append(args), threadsafe(*args)))
    async with streams.open({"a": [1], "a-1": [2], "a-2": [3]}, SAMPLING, None):
        engine.tell([an_output(rid, 1) for rid in ("a", "a-1", "a-2")])
    assert len(calls) == 1


async def test_who_leaves_early_is_aborted_and_who_is_done_is_not(engine, streams) -> None:
    async with streams.open({"a": [1], "a-1": [2]}, SAMPLING, None):
        engine.tell([an_output("a-1", finish=LENGTH)])
        await turn()  # told, and never looked at
    assert engine.aborted == [("a", "the client went away")]


async def test_leaving_by_an_error_aborts_too(engine, streams) -> None:
    with pytest.raises(ZeroDivisionError):
        async with streams.open({"a": [1]}, SAMPLING, None):
            raise ZeroDivisionError
    assert engine.aborted == [("a", "the client went away")]


async def test_an_id_is_free_again_only_when_its_end_was_told(engine, streams) -> None:
    """Otherwise the end of the one who hung up would end the next one of that id, a retry with the same header."""
    async with streams.open({"a": [1]}, SAMPLING, None):
        pass
    with pytest.raises(RequestRejected, match="a request with id a is running: choose another id"):
        async with streams.open({"a": [1]}, SAMPLING, None):
            pass
    engine.tell([an_output("a", 1), an_output("a", finish=FinishReason("abort", status=499))])
    await turn()
    async with streams.open({"a": [1]}, SAMPLING, None) as (again,):
        engine.tell([an_output("a", 5, finish=LENGTH)])
        assert await tokens(again) == [5]


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ({"b": [1], "b-1": []}, "the prompt has no tokens"),
        ({"b": [1], "a": [1]}, "a request with id a is running"),
        ({"b": [1], "b-1": [1], "b-2": [1], "b-3": [1]}, "1 requests are here, 4 came, 2 may wait: try again later"),
        ({rid: [1] for rid in "bcdef"}, "5 prompts are more than the 4 requests .* send fewer, or .* --max-queued 3"),
    ],
)
async def test_several_prompts_are_taken_all_or_none(engine, streams, prompts, says) -> None:
    async with streams.open({"a": [1]}, SAMPLING, None):
        engine.submitted.clear()
        with pytest.raises(RequestRejected, match=says):
            async with streams.open(prompts, SAMPLING, None):
                pass
        assert not engine.submitted and not engine.aborted


async def test_an_engine_that_stops_between_two_prompts_gets_the_first_back(engine, streams) -> None:
    with pytest.raises(RequestRejected, match="it stopped just now"):
        async with streams.open({"a": [1], "a-1": [666]}, SAMPLING, None):
            pass
    assert engine.submitted == [("a", None)] and [rid for rid, _ in engine.aborted] == ["a"]


async def test_an_answer_is_aborted_with_all_its_prompts(engine, streams) -> None:
    async with streams.open({"a": [1], "a-1": [2]}, SAMPLING, None):
        assert await streams.abort("a") == 2
        assert await streams.abort("a-1") == 1
        assert await streams.abort(None) == 1
        assert [rid for rid, _ in engine.aborted] == ["a", "a-1", "a-1", None]
        engine.aborted.clear()
        engine.tell([an_output("a", finish=LENGTH), an_output("a-1", finish=LENGTH)])
        await turn()
    assert await streams.abort("a") == 1 and engine.aborted == [("a", "aborted on request")]


async def test_closing_lets_nobody_in_and_tells_everybody_why(engine, streams) -> None:
    async with streams.open({"a": [1]}, SAMPLING, None) as (a,), streams.open({"b": [1]}, SAMPLING, None) as (b,):
        streams.close("closing time")
        assert engine.aborted == [(None, "closing time")] and streams.is_closing
        with pytest.raises(RequestRejected, match="closing time") as refused:
            async with streams.open({"c": [1]}, SAMPLING, None):
                pass
        assert refused.value.status == 503
        engine.tell([an_output("a", 1, finish=FinishReason("abort", status=499)), an_output("b", 1, finish=LENGTH)])
        ends = [await end(a), await end(b)]
    assert [(end.kind, end.status, end.message) for end in ends] == [
        ("abort", 503, "closing time"),
        ("length", 200, ""),
    ]


async def test_an_output_after_the_loop_has_gone_harms_nobody() -> None:
    engine = Remembering()

    def elsewhere() -> None:
        async def start() -> None:
            Streams(engine).start()

        asyncio.run(start())

    await asyncio.get_running_loop().run_in_executor(None, elsewhere)
    engine.tell([an_output("a", 1)])
