"""One trace per request, continuing the caller's; spans are counted against the engine's own totals."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from collections import Counter, defaultdict
from typing import Any

import aiohttp
import pytest

# A pool that holds two long requests of the six that are admitted: some will be retracted.
ENGINE = ("--pool-slots", "320", "--page-size", "16", "--chunked-prefill-size", "32", "--max-running", "6")
REQUESTS = 60


@pytest.fixture
def environment(no_otel: pytest.MonkeyPatch, otlp_receiver) -> None:
    no_otel.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", otlp_receiver.endpoint)
    no_otel.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")


async def ask(session: aiohttp.ClientSession, url: str, number: int, dice: random.Random) -> tuple[str, str]:
    """One request; about a fifth hang up in mid-answer, a tenth are aborted by name. (trace id, parent span id)"""
    trace, parent = secrets.token_hex(16), secrets.token_hex(8)
    body = {
        "model": "builtin", "prompt": "They walked on. " * dice.randint(1, 20), "stream": True, "ignore_eos": True,
        "max_tokens": dice.randint(4, 100), "rid": f"request-{number}", "temperature": 0.7,
    }  # fmt: skip
    fate = dice.random()
    async with session.post(
        f"{url}/v1/completions", json=body, headers={"traceparent": f"00-{trace}-{parent}-01"}
    ) as r:
        assert r.status == 200, await r.text()
        async for line in r.content:
            if fate < 0.2 and line.startswith(b"data") and dice.random() < 0.2:
                r.close()
                break
            if 0.2 <= fate < 0.3 and line.startswith(b"data"):
                fate = 1.0
                async with session.post(f"{url}/abort_request", json={"rid": f"request-{number}"}) as aborted:
                    assert aborted.status in (200, 404)
    return trace, parent


async def ask_all(url: str) -> list[tuple[str, str]]:
    dice = random.Random(2)
    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(ask(session, url, number, dice) for number in range(REQUESTS)))


def test_spans_are_counted_against_the_engines_own_totals(environment, stage, staging, otlp, otlp_receiver) -> None:
    assert os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] == otlp_receiver.endpoint
    engine, observer = stage.engine(*ENGINE), stage.observer()
    callers = asyncio.run(ask_all(engine.url))

    def ended() -> Any:
        (state,) = staging.get(f"{observer.url}/api/v1/state")["engines"]
        return state if sum(state["tallies"]["requests"].values()) == REQUESTS else None

    tallies = staging.wait_for(ended)["tallies"]
    assert tallies["retractions"] > 0 and tallies["requests"]["abort"] > 3
    assert sum(tallies["aborts"].values()) == tallies["requests"]["abort"]
    rids = [f"request-{number}" for number in range(REQUESTS)]
    timelines = {rid: staging.get(f"{observer.url}/api/v1/requests/{rid}") for rid in rids}
    observer.__exit__(None, None, None)  # sends what is left

    spans = defaultdict(list)
    for span in otlp_receiver.spans():
        spans[span.trace_id.hex()].append(span)
    assert set(spans) == {trace for trace, _ in callers}
    totals: Counter[str] = Counter()
    for trace, parent in callers:
        totals += check_trace(otlp, spans[trace], parent, timelines)
    assert totals["request"] == REQUESTS
    assert totals["retracted"] == tallies["retractions"]
    assert totals["aborted"] == tallies["requests"]["abort"]
    assert totals["prefilled"] == tallies["prefilled_tokens"]
    assert totals["cached"] == sum(timeline["cached_tokens"] for timeline in timelines.values())
    assert totals["output"] == tallies["generated_tokens"]


def check_trace(otlp, spans: list[Any], parent: str, timelines: dict[str, Any]) -> Counter[str]:
    """One request's spans hang together, lie within it, and add up; what they count."""
    (request,) = [span for span in spans if span.name == "request"]
    assert request.parent_span_id.hex() == parent
    facts = otlp.attributes(request.attributes)
    names = Counter(span.name for span in spans)
    assert set(names) <= {"request", "queue", "prefill", "decode", "retracted", "release"}
    for span in spans:
        if span is not request:
            assert span.parent_span_id == request.span_id
            assert request.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
            assert span.end_time_unix_nano <= request.end_time_unix_nano
    chunks = [otlp.attributes(span.attributes) for span in spans if span.name == "prefill"]
    once = sum(chunk["kvlens.prefill.tokens"] - chunk["kvlens.prefill.recomputed_tokens"] for chunk in chunks)
    prompt, cached = facts["gen_ai.usage.input_tokens"], facts["gen_ai.usage.cache_read.input_tokens"]
    aborted = facts["gen_ai.response.finish_reasons"] == ["abort"]
    if not aborted:
        assert once == prompt - cached
        assert names["release"] == names["retracted"] + 1
        assert names["decode"] == names["release"]
    assert names["queue"] == 1
    timeline = timelines[facts["gen_ai.response.id"]]
    assert [e["event"] for e in timeline["entries"]].count("retracted") == names["retracted"]
    assert timeline["outcome"] == facts["gen_ai.response.finish_reasons"][0]
    return Counter(
        request=1,
        retracted=names["retracted"],
        aborted=int(aborted),
        prefilled=sum(chunk["kvlens.prefill.tokens"] for chunk in chunks),
        cached=cached,
        output=facts["gen_ai.usage.output_tokens"],
    )


def test_nothing_is_sent_without_an_endpoint(no_otel, stage, staging, otlp_receiver) -> None:
    engine, observer = stage.engine(), stage.observer()
    staging.post(f"{engine.url}/v1/completions", {"model": "builtin", "prompt": "Nobody", "max_tokens": 3})
    staging.wait_for(
        lambda: sum(staging.get(f"{observer.url}/api/v1/state")["engines"][0]["tallies"]["requests"].values())
    )
    observer.__exit__(None, None, None)
    assert otlp_receiver.spans() == []
