"""The observer over HTTP."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import pytest
from aiohttp.test_utils import TestClient, TestServer

from kvlens.observer.api import build_api
from kvlens.observer.daemon import Daemon, ObserveConfig, ObserveError
from kvlens.observer.recorder import RingWriter
from kvlens.observer.schema import State, Timeline


class Rig:
    """A daemon over a ring that a run writes, and a client of it."""

    def __init__(self, run, home: Path, token: str | None = None) -> None:
        self.run = run
        self.writer = RingWriter(home / "unit.ring", run.identity, 1 << 20, heartbeat=False)
        run.probe._write = self._write
        self.rendered: list[tuple[float, str]] = []
        self.daemon = Daemon(
            ObserveConfig(home / "findings.db", (home / "unit.ring",), token=token), render_metrics=self._render
        )
        self.client = TestClient(TestServer(build_api(self.daemon, token)))

    def _write(self, payload: bytes) -> None:
        self.run.payloads.append(payload)
        self.writer.append(payload)

    def _render(self, state: State, accept: str) -> tuple[bytes, str]:
        self.rendered.append((state.at, accept))
        return b"kvlens_engine_up 1\n", "text/plain; version=0.0.4"

    def look(self) -> None:
        self.daemon.tick()
        self.daemon.changed()

    async def get(self, path: str):
        answer = await self.client.get(path)
        return answer.status, json.loads(await answer.read())


@pytest.fixture
async def rig(a_run, tmp_path):
    rig = Rig(a_run(page_size=4), tmp_path)
    await rig.client.start_server()
    yield rig
    await rig.client.close()
    rig.writer.close()
    rig.daemon.store.close()


async def test_state_rows_and_requests_have_their_shapes(rig) -> None:
    rig.run.ask(10, answer=90)
    rig.run.ask(6, answer=2)
    rig.run.step(6)
    rig.look()
    _, state = await rig.get("/api/v1/state")
    assert msgspec.convert(state, State).engines[0].step == 6
    assert {pool["pool"] for pool in state["engines"][0]["pools"]} == {"rows", "full"}
    _, rows = await rig.get("/api/v1/rows")
    assert rows["total"] == 1 and rows["rows"][0]["request_id"] == "r1"
    status, timeline = await rig.get("/api/v1/requests/r2")
    assert status == 200 and msgspec.convert(timeline, Timeline).outcome == "length"
    status, pool_map = await rig.get("/api/v1/pool-map")
    assert status == 200 and pool_map["owners"][0][0] == 4
    assert set(pool_map) >= {"engine", "pool", "size_slots", "step", "owners"}


async def test_a_limit_cuts_rows_and_the_total_says_so(rig) -> None:
    for _ in range(4):
        rig.run.ask(6, answer=20)
    rig.run.step(5)
    rig.look()
    _, rows = await rig.get("/api/v1/rows?limit=2")
    assert (len(rows["rows"]), rows["total"]) == (2, 4)
    status, error = await rig.get("/api/v1/rows?limit=many")
    assert status == 400 and "give a number of rows" in error["error"]


async def test_what_is_not_known_is_a_404_that_says_why(rig) -> None:
    for path in ("/api/v1/requests/nobody", "/api/v1/pool-map?pool=full"):
        status, error = await rig.get(path)
        assert status == 404 and error["error"]
    answer = await rig.client.post("/api/v1/findings/none/ack")
    assert answer.status == 404


async def test_a_finding_is_listed_acknowledged_and_resolved(rig) -> None:
    req = rig.run.ask(10, answer=90)
    rig.run.step(3)
    rig.run.lose(req)
    rig.look()
    _, found = await rig.get("/api/v1/findings")
    (finding,) = found["findings"]
    answer = await rig.client.post(f"/api/v1/findings/{finding['id']}/ack")
    assert (await answer.json())["state"] == "acknowledged"
    _, state = await rig.get("/api/v1/state")
    assert [one["state"] for one in state["findings_open"]] == ["acknowledged"]
    rig.run.scheduler.flush()
    rig.look()
    _, found = await rig.get("/api/v1/findings")
    assert [(one["id"], one["state"]) for one in found["findings"]] == [(finding["id"], "resolved")]


async def test_health_and_readiness(rig) -> None:
    assert (await rig.client.get("/healthz")).status == 200
    assert (await rig.client.get("/readyz")).status == 503
    rig.run.ask(5)
    rig.run.step(1)
    rig.look()
    assert (await rig.client.get("/readyz")).status == 200


async def test_metrics_are_rendered_once_per_snapshot_and_format(rig, monkeypatch) -> None:
    monkeypatch.setattr("kvlens.observer.daemon.SNAPSHOT_SECONDS", 3600.0)
    for accept in ("text/plain", "text/plain", "application/openmetrics-text"):
        answer = await rig.client.get("/metrics", headers={"Accept": accept})
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"
    assert [accept for _, accept in rig.rendered] == ["text/plain", "application/openmetrics-text"]
    rig.daemon.changed()
    await rig.client.get("/metrics", headers={"Accept": "text/plain"})
    assert len(rig.rendered) == 3


async def test_the_page_is_self_contained(rig) -> None:
    page = await (await rig.client.get("/")).text()
    assert "<title>kvlens</title>" in page
    assert "http://" not in page and "https://" not in page


async def test_the_stream_tells_what_happens(rig) -> None:
    async with rig.client.get("/api/v1/events") as stream:
        assert await stream.content.readline() == b": connected\n"
        await stream.content.readline()
        req = rig.run.ask(10, answer=90)
        rig.run.step(3)
        rig.run.lose(req)
        rig.look()
        told = []
        while "finding_opened" not in told:
            line = await asyncio.wait_for(stream.content.readline(), 10)
            if line.startswith(b"event: "):
                told.append(line[7:].decode().strip())
            if line.startswith(b"data: "):
                data = json.loads(line[6:])
        assert told[0] == "engine_up" and told.count("check_failed") == 2
        while not line.startswith(b"data: "):
            line = await asyncio.wait_for(stream.content.readline(), 10)
        data = json.loads(line[6:])
        assert data["data"]["request_id"] == "r1"


async def test_a_token_is_wanted_for_everything_but_health(a_run, tmp_path) -> None:
    rig = Rig(a_run(), tmp_path, token="secret")
    await rig.client.start_server()
    try:
        assert (await rig.client.get("/healthz")).status == 200
        for path in ("/", "/metrics", "/api/v1/state"):
            refused = await rig.client.get(path, headers={"Authorization": "Bearer wrong"})
            assert refused.status == 401 and "wants a bearer token" in await refused.text()
            assert (await rig.client.get(path, headers={"Authorization": "Bearer secret"})).status == 200
    finally:
        await rig.client.close()
        rig.writer.close()
        rig.daemon.store.close()


async def test_a_port_in_use_says_which_and_how_to_choose_another(rig, tmp_path) -> None:
    taken = rig.client.port
    daemon = Daemon(ObserveConfig(tmp_path / "other.db", port=taken), render_metrics=rig._render)
    with pytest.raises(ObserveError, match=f"cannot listen on 127.0.0.1:{taken} .*--port"):
        await daemon.run()


async def test_every_local_recorder_is_followed_when_none_is_named(a_run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvlens.observer.recorder.ring_directories", lambda: [tmp_path])
    daemon = Daemon(ObserveConfig(tmp_path / "findings.db"), render_metrics=lambda state, accept: (b"", ""))
    daemon.tick()
    assert daemon.snapshot().engines == []
    rig = a_run()
    writer = RingWriter(tmp_path / "late.ring", rig.identity, 1 << 18, heartbeat=False)
    rig.probe._write = writer.append
    rig.ask(5)
    rig.step(1)
    ended = RingWriter(tmp_path / "ended.ring", rig.identity, 1 << 18, heartbeat=False)
    ended.close()
    daemon._next_discovery = 0.0
    daemon.tick()
    daemon.changed()
    assert [(engine.engine, engine.status) for engine in daemon.snapshot().engines] == [("unit", "up")]
    assert len(daemon.watches) == 1
    writer.close()
    daemon.store.close()
