"""Fixtures that several kinds of tests use."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

HERE = Path(__file__).parent

# The same examples everywhere, and none that fails for being slow: a red test must be red again.
settings.register_profile("same", derandomize=True, deadline=None)
settings.load_profile("same")


def _beside(name: str) -> ModuleType:
    """A module of this folder; tests are no package, so it cannot be imported by name."""
    spec = importlib.util.spec_from_file_location(f"tests_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def otlp() -> ModuleType:
    """The module `otlp_receiver`: the class, and `attributes`."""
    return _beside("otlp_receiver")


@pytest.fixture
def otlp_receiver(otlp: ModuleType) -> Iterator[Any]:
    """A listening `OtlpReceiver`: `.endpoint` for the environment, then `.traces()`, `.metrics()`, `.logs()`."""
    with otlp.OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture
def no_otel(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No OTEL_* variable of the outer environment; set the ones the test wants."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture(scope="session")
def staging() -> ModuleType:
    """The module `stage`: `kill`, `get`, `post`, `wait_for`."""
    return _beside("stage")


@pytest.fixture
def stage(staging: ModuleType, tmp_path: Path) -> Iterator[Any]:
    """A `Stage`: starts real engines and observers, and ends them."""
    with staging.stage_in(tmp_path) as running:
        yield running


@pytest.fixture(scope="session")
def states() -> ModuleType:
    """The module `states`: hand-made states, findings and timelines."""
    return _beside("states")
