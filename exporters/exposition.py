"""Families of prometheus_client as text: what its own encoders write, several times faster.

A page of sixteen engines has some two thousand series whose labels do not change from scrape to scrape; so the part of
a line before its value is made once and kept. Covers what `SnapshotCollector` yields: gauges, counters and histograms
with exemplars, without timestamps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric
from prometheus_client.samples import Exemplar, Sample
from prometheus_client.utils import floatToGoString as _untyped_number

MOST_SERIES: Final = 100_000
"""Kept line beginnings; engines come and go under new names, so at this many the memory starts afresh."""

_number: Callable[[float], str] = _untyped_number


class PageWriter:
    """Writes families as text format 0.0.4 or OpenMetrics 1.0."""

    def __init__(self) -> None:
        self._begun: dict[tuple[str, ...], str] = {}

    def text(self, families: Iterable[Metric]) -> bytes:
        lines: list[str] = []
        for family in families:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            lines += _head(name, family)
            lines += self._samples(family, exemplars=False)
        return "".join(lines).encode()

    def openmetrics(self, families: Iterable[Metric]) -> bytes:
        lines: list[str] = []
        for family in families:
            lines += _head(family.name, family)
            lines += self._samples(family, exemplars=True)
        lines.append("# EOF\n")
        return "".join(lines).encode()

    def _samples(self, family: Metric, *, exemplars: bool) -> Iterator[str]:
        begun = self._begun
        for sample in family.samples:
            key = (sample.name, *sample.labels.values())
            start = begun.get(key)
            if start is None:
                start = self._begin(key, sample)
            if exemplars and sample.exemplar is not None:
                yield f"{start}{_number(sample.value)} # {_exemplar(sample.exemplar)}\n"
            else:
                yield f"{start}{_number(sample.value)}\n"

    def _begin(self, key: tuple[str, ...], sample: Sample) -> str:
        if len(self._begun) >= MOST_SERIES:
            self._begun.clear()
        start = self._begun[key] = f"{sample.name}{_labels(sample.labels)} "
        return start


def _head(name: str, family: Metric) -> tuple[str, str]:
    help_text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {help_text}\n", f"# TYPE {name} {family.type}\n"


def _labels(labels: dict[str, str]) -> str:
    inside = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{{{inside}}}"


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _exemplar(exemplar: Exemplar) -> str:
    return f"{_labels(exemplar.labels)} {_number(exemplar.value)}"
