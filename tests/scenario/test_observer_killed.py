"""The observer is killed and restarted under load: the engine does not notice, and no finding is lost or doubled."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.parse
import urllib.request

OPTIONS = (
    "--pool-slots",
    "2048",
    "--page-size",
    "16",
    "--chunked-prefill-size",
    "64",
    "--max-running",
    "4",
    "--allow-faults",
)
PROMPTS = [f"{number} of them walked together towards the house, and" for number in ("Two", "Three", "Four", "Five")]


def answers(staging, url: str) -> list[str]:
    """Greedy answers to fixed prompts."""
    body = {"model": "builtin", "temperature": 0, "max_tokens": 80}
    return [
        staging.post(f"{url}/v1/completions", {**body, "prompt": prompt})["choices"][0]["text"] for prompt in PROMPTS
    ]


def hang_up(url: str, rid: str) -> None:
    """Begin a streamed answer, read its first bytes, and go away."""
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=30)
    body = {"model": "builtin", "prompt": "They", "stream": True, "max_tokens": 500, "rid": rid, "ignore_eos": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    connection.getresponse().read(10)
    connection.close()


def test_the_engine_answers_the_same_while_its_observer_is_killed_and_restarted(stage, staging) -> None:
    engine = stage.engine(*OPTIONS)
    expected = answers(staging, engine.url)
    observer = stage.observer()
    got: list[list[str]] = []
    asking = threading.Thread(target=lambda: got.extend(answers(staging, engine.url) for _ in range(6)))
    asking.start()
    for _ in range(3):
        staging.kill(observer)
        observer = stage.observer()
    asking.join()
    assert got == [expected] * 6
    state = staging.get(f"{observer.url}/api/v1/state")
    assert [engine["status"] for engine in state["engines"]] == ["up"]
    assert staging.get(f"{observer.url}/api/v1/findings")["findings"] == []


def test_findings_of_a_killed_observer_are_there_again_once_and_resolve_at_a_flush(stage, staging) -> None:
    engine = stage.engine(*OPTIONS)
    observer = stage.observer()
    staging.post(f"{engine.url}/faults/abort-skips-release", {"enabled": True, "times": 1})
    hang_up(engine.url, "lost-request")
    before = staging.wait_for(lambda: staging.get(f"{observer.url}/api/v1/findings")["findings"])
    staging.kill(observer)
    answers(staging, engine.url)
    observer = stage.observer()
    after = staging.get(f"{observer.url}/api/v1/findings")["findings"]
    assert [(found["id"], found["request_id"], found["state"]) for found in after] == [
        (before[0]["id"], "lost-request", "open")
    ]
    assert after[0]["opened_at"] == before[0]["opened_at"]
    staging.post(f"{engine.url}/flush_cache", {})
    resolved = staging.wait_for(
        lambda: [f for f in staging.get(f"{observer.url}/api/v1/findings")["findings"] if f["state"] == "resolved"]
    )
    assert [found["id"] for found in resolved] == [before[0]["id"]]
    assert staging.get(f"{observer.url}/api/v1/state")["findings_open"] == []


def test_an_engine_that_dies_is_a_finding_until_its_successor_is_up_and_one_that_stops_is_none(stage, staging) -> None:
    engine = stage.engine(*OPTIONS)
    observer = stage.observer()
    staging.kill(engine)
    found = staging.wait_for(lambda: staging.get(f"{observer.url}/api/v1/state")["findings_open"])
    assert [finding["kind"] for finding in found] == ["engine_down"]
    assert staging.get(f"{observer.url}/api/v1/state")["engines"][0]["status"] == "down"
    successor = stage.engine(*OPTIONS)
    staging.wait_for(lambda: staging.get(f"{observer.url}/api/v1/state")["engines"][0]["status"] == "up")
    staging.wait_for(lambda: not staging.get(f"{observer.url}/api/v1/state")["findings_open"])
    successor.__exit__(None, None, None)
    staging.wait_for(lambda: staging.get(f"{observer.url}/api/v1/state")["engines"][0]["status"] == "down")
    assert staging.get(f"{observer.url}/api/v1/state")["findings_open"] == []
    assert len(staging.get(f"{observer.url}/api/v1/findings")["findings"]) == 1
