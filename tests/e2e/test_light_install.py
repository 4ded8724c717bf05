"""The light install: observer, exporters and terminal, without torch and numpy, in less than 60 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What serves, or runs inside the process that serves.
NEEDS_ENGINE = (
    "kvlens.engine.pools", "kvlens.engine.cache", "kvlens.engine.memory", "kvlens.engine.schedule",
    "kvlens.engine.model", "kvlens.engine.serve", "kvlens.engine.engine", "kvlens.engine.bench",
    "kvlens.engine.faults", "kvlens.observer.pool_stats", "kvlens.observer.census", "kvlens.cli.bench_",
    "kvlens.cli.serve", "kvlens.dashboards", "kvlens.__main__",
)  # fmt: skip
IMPORT_ALL = f"""
import importlib, pkgutil, sys, kvlens
names = [m.name for m in pkgutil.walk_packages(kvlens.__path__, "kvlens.", onerror=lambda name: None)]
light = [name for name in names if not name.startswith({NEEDS_ENGINE!r})]
for name in light:
    importlib.import_module(name)
assert not {{"torch", "numpy"}} & set(sys.modules)
print(len(light))
"""


@pytest.fixture(scope="module")
def light(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`bin` of a fresh environment with the base package only."""
    home = tmp_path_factory.mktemp("light")
    venv.create(home, with_pip=True)
    pip = [str(home / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), str(ROOT)], check=True, timeout=280)
    return home / "bin"


def run(light: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(light / "kvlens"), *arguments],
        capture_output=True, text=True, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def test_it_is_under_60_megabytes_without_what_every_environment_has(light: Path) -> None:
    packages = next((light.parent / "lib").glob("python3*")) / "site-packages"
    given = ("pip", "setuptools", "pkg_resources", "_distutils_hack")
    size = sum(
        file.stat().st_size
        for package in packages.iterdir() if not package.name.startswith(given)
        for file in ([package] if package.is_file() else package.rglob("*")) if file.is_file()
    )  # fmt: skip
    assert size < 60e6


def test_it_brings_neither_torch_nor_numpy_and_imports_every_room_but_the_engines(light: Path) -> None:
    done = subprocess.run([str(light / "python"), "-c", IMPORT_ALL], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 30


def test_doctor_says_what_is_not_installed_and_finds_no_problem(light: Path, tmp_path: Path) -> None:
    done = run(light, "doctor", "--json", "--url", "http://127.0.0.1:1", XDG_RUNTIME_DIR=str(tmp_path))
    report = json.loads(done.stdout)
    assert done.returncode == 0, done.stdout
    assert report["rooms"]["observer"] == "installed"
    assert "pip install 'kvlens[engine]'" in report["rooms"]["engine"]


def test_serve_says_how_to_get_the_engine(light: Path) -> None:
    done = run(light, "serve")
    assert done.returncode == 2
    assert "pip install 'kvlens[engine]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_observe_and_top_follow_a_recorder_written_elsewhere(light: Path, tmp_path: Path) -> None:
    ring = tmp_path / "engine.ring"
    writer = subprocess.Popen([sys.executable, "-c", WRITE_A_RING, str(ring)], stdout=subprocess.PIPE, text=True)
    observer = None
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "written\n"
        observer = subprocess.Popen(
            [str(light / "kvlens"), "observe", "--ring", str(ring), "--port", "0", "--store", str(tmp_path / "f.db")],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert observer.stdout is not None
        url = observer.stdout.readline().split()[-1]
        for _ in range(50):
            done = run(light, "top", url, "--once", "--json")
            if done.returncode == 0 and json.loads(done.stdout)["state"]["engines"]:
                break
        picture = run(light, "top", url, "--once")
        assert "light" in picture.stdout and "full" in picture.stdout
        assert done.returncode == picture.returncode == 0
    finally:
        for process in filter(None, (observer, writer)):
            process.terminate()
            process.wait(20)
            assert process.stdout is not None
            process.stdout.close()


WRITE_A_RING = """
import sys, time
from pathlib import Path
from kvlens.observer.frames import encode
from kvlens.observer.recorder import RingWriter
from kvlens.observer.schema import Frame, Identity, PoolAccount, PoolInfo, RowColumns
pools = (PoolInfo("rows", "row", 4, 1, 0), PoolInfo("full", "slot", 64, 1, 8))
identity = Identity(name="light", instance="0" * 32, pools=pools)
writer = RingWriter(Path(sys.argv[1]), identity, 1 << 20)
frame = Frame(
    first_step=1, last_step=1, monotonic_ns=time.monotonic_ns(), wall_ns=time.time_ns(), mode="idle",
    running=0, waiting=0,
    accounts=[PoolAccount("rows", 4, 4, 0, 0, 0, 0), PoolAccount("full", 64, 64, 0, 0, 0, 0)],
    allocated_tokens=0, committed_tokens=0, events=[], columns=RowColumns(*[b""] * 7), names=[], identity=identity,
)
writer.append(encode(frame))
print("written", flush=True)
time.sleep(120)
"""
