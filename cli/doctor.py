"""`kvlens doctor`: what is installed, on what device, what is reachable, what is misconfigured."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from importlib.resources import files

import msgspec

from kvlens import KvlensError, __version__
from kvlens.cli.http import ask_observer
from kvlens.exporters.otlp import endpoint_of
from kvlens.observer.frames import FrameError, decode
from kvlens.observer.recorder import RingError, RingReader, discover, ring_directory
from kvlens.observer.schema import State

_ROOMS = {
    "observer": ("aiohttp", "msgspec"),
    "exporters": ("prometheus_client", "opentelemetry.sdk"),
    "terminal": ("textual",),
    "engine": ("torch", "numpy", "safetensors", "tokenizers", "jinja2"),
    "dashboards": ("grafana_foundation_sdk", "yaml"),
}
_EXTRAS = {"engine": "engine", "dashboards": "dashboards"}


class Recorder(msgspec.Struct):
    """One ring file. `seconds` is how far back it can be read."""

    path: str
    engine: str
    pid: int
    status: str
    seconds: float | None


class Report(msgspec.Struct):
    """What was looked at. `problems` need somebody; an absent extra is none."""

    kvlens: str
    python: str
    rooms: dict[str, str]
    device: str
    model: str
    ring_directory: str
    recorders: list[Recorder]
    observer: str
    otlp: str
    problems: list[str]

    @property
    def healthy(self) -> bool:
        return not self.problems


def examine(url: str, token: str | None = None) -> Report:
    """Looks at this machine and at the observer at `url`; never raises for what it finds."""
    problems: list[str] = []
    rooms = {room: _room(room) for room in _ROOMS}
    problems += [f"{room}: {state}" for room, state in rooms.items() if room not in _EXTRAS and state != "installed"]
    recorders = list(_recorders(problems))
    try:
        rings = str(ring_directory())
    except RingError as error:
        rings = "none"
        problems.append(str(error))
    return Report(
        kvlens=__version__,
        python=platform.python_version(),
        rooms=rooms,
        device=_device(rooms["engine"] == "installed"),
        model=_bundled_model(),
        ring_directory=rings,
        recorders=recorders,
        observer=_observer(url, token, problems),
        otlp=_otlp(),
        problems=problems,
    )


def report_lines(report: Report) -> Iterator[str]:
    """The report for people."""
    yield f"kvlens      {report.kvlens}, Python {report.python}"
    yield from (f"{room:<11} {state}" for room, state in report.rooms.items())
    yield f"device      {report.device}"
    yield f"model       {report.model}"
    yield f"rings       {report.ring_directory}: {len(report.recorders) or 'none'}"
    for ring in report.recorders:
        held = "nothing to read yet" if ring.seconds is None else f"holds the last {ring.seconds:,.0f} s"
        yield f"            {ring.path}: engine {ring.engine}, pid {ring.pid}, {ring.status}, {held}"
    yield f"observer    {report.observer}"
    yield f"otlp        {report.otlp}"
    yield from (f"PROBLEM     {problem}" for problem in report.problems)
    if report.healthy:
        yield "no problem found"


def _room(room: str) -> str:
    missing = [name for name in _ROOMS[room] if not _importable(name)]
    if not missing:
        return "installed"
    extra = f"[{_EXTRAS[room]}]" if room in _EXTRAS else ""
    return f"not installed ({', '.join(missing)}): pip install 'kvlens{extra}'"


def _importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _device(has_engine: bool) -> str:
    if not has_engine:
        return "not asked: the engine is not installed"
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()} (torch {torch.__version__})"
    return f"cpu, {torch.get_num_threads()} threads (torch {torch.__version__})"


def _bundled_model() -> str:
    weights = files("kvlens.engine.model") / "builtin" / "model.safetensors"
    return f"bundled, {len(weights.read_bytes()) / 1e6:.1f} MB" if weights.is_file() else "the bundled model is missing"


def _recorders(problems: list[str]) -> Iterator[Recorder]:
    for path in discover():
        try:
            with RingReader(path) as reader:
                yield Recorder(str(path), reader.identity.name, reader.pid, reader.status(), _depth(reader))
        except (RingError, FrameError) as error:
            problems.append(str(error))


def _depth(reader: RingReader) -> float | None:
    """Seconds between the oldest record that can be read and the newest."""
    oldest = reader.read(1)
    return reader.written_at - decode(oldest[0].payload).wall_ns / 1e9 if oldest else None


def _observer(url: str, token: str | None, problems: list[str]) -> str:
    try:
        state = ask_observer(url, "/api/v1/state", State, token)
    except KvlensError as error:
        return str(error)
    blind = {rule: why for engine in state.engines for rule, why in engine.rules.items() if why != "ok"}
    problems += [f"rule {rule} cannot run: {why}" for rule, why in blind.items()]
    problems += [f"{found.severity.value}: {found.summary}" for found in state.findings_open]
    return f"{url}, version {state.observer_version}, follows {len(state.engines)} engines"


def _otlp() -> str:
    sent = {signal.lower(): address for signal in ("TRACES", "METRICS", "LOGS") if (address := endpoint_of(signal))}
    return (
        ", ".join(f"{signal} to {address}" for signal, address in sent.items()) or "off: no OTEL_EXPORTER_OTLP_ENDPOINT"
    )
