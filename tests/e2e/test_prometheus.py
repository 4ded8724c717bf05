"""A real Prometheus scrapes a real observer of a real engine: panels equal the API, and the leak alert rings."""

from __future__ import annotations

import asyncio
import bisect
import json
import re
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvlens.cli.users import SyntheticUsers, UsersConfig
from kvlens.dashboards.build import files, queries
from kvlens.exporters import catalog
from kvlens.observer.schema import State

ENGINE = (
    "--pool-slots", "2048", "--page-size", "16", "--chunked-prefill-size", "64", "--max-running", "8", "--allow-faults",
)  # fmt: skip


class Tap:
    """Stands between Prometheus and the observer, and keeps the state that belongs to each page it hands on.

    Page and state are of the same snapshot when the state before and after the page is the same.
    """

    def __init__(self, observer: str) -> None:
        self._observer = observer
        self.states: list[tuple[float, State]] = []
        tap = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = tap.page(self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> Tap:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    def page(self, accept: str) -> tuple[bytes, str]:
        while True:
            before, _ = self._get("/api/v1/state", "")
            page, content_type = self._get("/metrics", accept)
            after, _ = self._get("/api/v1/state", "")
            if before == after:
                self.states.append((time.time(), msgspec.json.decode(before, type=State)))
                return page, content_type

    def _get(self, path: str, accept: str) -> tuple[bytes, str]:
        request = urllib.request.Request(self._observer + path, headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.read(), response.headers["Content-Type"]


class Prometheus:
    """Debian's Prometheus with our rules, scraping one target every second."""

    def __init__(self, home: Path, target: str) -> None:
        (home / "kvlens-rules.yml").write_text(files()["kvlens-rules.yml"])
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(home / "kvlens-rules.yml")],
            "scrape_configs": [{"job_name": "kvlens", "static_configs": [{"targets": [target]}]}],
        }
        (home / "prometheus.yml").write_text(yaml.safe_dump(config))
        self._log = (home / "prometheus.log").open("w")
        self.port = free_port()
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={home / 'prometheus.yml'}", f"--storage.tsdb.path={home / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{self.port}"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        self._log.close()

    def ask(self, path: str, **parameters: Any) -> Any:
        url = f"http://127.0.0.1:{self.port}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                return json.load(response)["data"]
        except OSError:
            return None

    def query(self, expr: str, at: float | None = None) -> list[Any]:
        answer = self.ask("query", query=expr, **({} if at is None else {"time": at}))
        return answer["result"] if answer else []

    def alert(self, name: str) -> str:
        """inactive, pending or firing."""
        groups = self.ask("rules", type="alert")
        rules = {rule["name"]: rule["state"] for group in groups["groups"] for rule in group["rules"]} if groups else {}
        return rules.get(name, "inactive")


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def running(stage, tmp_path: Path):
    """(engine, observer, tap, prometheus)"""
    engine = stage.engine(*ENGINE)
    observer = stage.observer()
    with Tap(observer.url) as tap, Prometheus(tmp_path, f"127.0.0.1:{tap.server.server_port}") as prometheus:
        yield engine, observer, tap, prometheus


def load(url: str, seconds: float) -> None:
    async def run() -> None:
        stop = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, stop.set)
        totals = await SyntheticUsers(UsersConfig(url, users=6, hang_up=0.25)).run(stop)
        assert totals.answered > 3 and not totals.errors, totals

    asyncio.run(run())


def test_every_panel_has_data_whose_values_are_the_states_of_the_same_scrape(running, staging) -> None:
    engine, _, tap, prometheus = running
    loading = threading.Thread(target=load, args=(engine.url, 25.0))
    loading.start()
    staging.wait_for(lambda: prometheus.query("kvlens_engine_up"))
    loading.join()
    compared = 0
    for metric in catalog.METRICS:
        compared += compare_series(metric, tap, prometheus)
    assert compared > 400
    moments = {state.engines[0].step for _, state in tap.states if state.engines and state.engines[0].running}
    assert len(moments) > 10  # it was compared under load, not at rest
    checked = 0
    for title, expr in queries("20s"):
        assert prometheus.query(expr), f"panel {title} has no data: {expr}"
        checked += compare_panel(expr, tap, prometheus)
    assert checked > 12


def expected_of(metric: catalog.Metric, state: State) -> dict[tuple[str, ...], float]:
    """What a page of that state says, by the labels behind engine and rank; of a histogram, how often it observed."""
    engine = state.engines[0]
    if metric.kind == "histogram":
        return {(): engine.tallies.histograms[metric.name.removeprefix("kvlens_")].counts[-1]}
    return dict(catalog.samples(metric, engine, state))


def compare_panel(expr: str, tap: Tap, prometheus: Prometheus) -> bool:
    """A panel that sums a metric shows the sums of the state that was scraped last before that moment."""
    parts = re.fullmatch(r'sum by \((.*?)\) \((kvlens_\w+)\{engine=~"\.\*"(?:, (\w+)="(\w+)")?\}\)', expr)
    if parts is None:
        return False
    metric = next(metric for metric in catalog.METRICS if metric.name == parts[2])
    at, state = tap.states[-3]
    expected: Counter[tuple[str, ...]] = Counter()
    for values, value in expected_of(metric, state).items():
        labels = dict(zip(metric.label_names, (state.engines[0].engine, state.engines[0].rank, *values), strict=True))
        if parts[3] is None or labels[parts[3]] == parts[4]:
            expected[tuple(labels[name] for name in parts[1].split(", "))] += value
    shown = {
        tuple(series["metric"][name] for name in parts[1].split(", ")): float(series["value"][1])
        for series in prometheus.query(expr, at + 0.2)
    }
    assert shown == pytest.approx(dict(expected)), expr
    return True


def compare_series(metric: catalog.Metric, tap: Tap, prometheus: Prometheus) -> int:
    """Every sample that Prometheus took of a metric is what the state of that scrape says; returns how many."""
    states = [state for _, state in tap.states]
    times = [at for at, _ in tap.states]
    matched = 0
    name = f"{metric.name}_count" if metric.kind == "histogram" else metric.name
    for series in prometheus.query(f"{name}[40s]"):
        labels = series["metric"]
        key = tuple(labels[name] for name in metric.labels)
        for at, value in series["values"]:
            # A sample bears the time its scrape began; the page was made right after.
            place = bisect.bisect_left(times, at)
            if place == len(times):
                continue
            expected = expected_of(metric, states[place])
            assert float(value) == pytest.approx(expected[key], rel=1e-9), (metric.name, labels, at)
            matched += 1
    assert matched or not any(expected_of(metric, state) for state in states if state.engines), metric.name
    return matched


def test_the_leak_alert_fires_under_the_fault_and_resolves_when_the_pool_is_flushed(running, staging) -> None:
    engine, observer, _, prometheus = running
    staging.wait_for(lambda: prometheus.query("kvlens_engine_up"))
    load(engine.url, 3.0)
    assert prometheus.alert("KvlensRowLeak") == prometheus.alert("KvlensSlotLeak") == "inactive"
    staging.post(f"{engine.url}/faults/abort-skips-release", {"enabled": True, "times": 1})
    loading = threading.Thread(target=load, args=(engine.url, 8.0))
    loading.start()
    staging.wait_for(lambda: prometheus.alert("KvlensRowLeak") == "firing", 90)
    staging.wait_for(lambda: prometheus.alert("KvlensSlotLeak") == "firing", 90)
    loading.join()
    (found,) = staging.get(f"{observer.url}/api/v1/state")["findings_open"]
    (leaked,) = prometheus.query('kvlens_leaked_slots{pool="full"}')
    assert float(leaked["value"][1]) == found["leaked_slots"] > 0
    staging.wait_for(lambda: staging.post(f"{engine.url}/flush_cache", {})["flushed"])
    staging.wait_for(lambda: prometheus.alert("KvlensRowLeak") == "inactive", 60)
    staging.wait_for(lambda: prometheus.alert("KvlensSlotLeak") == "inactive", 60)
