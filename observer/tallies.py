"""Counters and histograms of one engine, since the observer follows it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

from kvlens.engine.contracts import CHECKS
from kvlens.observer.schema import HistogramState, Kind, Tallies

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TOKENS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
OUTCOMES = ("stop", "length", "abort")
PHASES = ("waiting", "chunked", "prefill", "running")


class Histogram:
    """Counts per upper bound, and of what is above them all."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        self._exemplar: tuple[float, str] | None = None

    def observe(self, value: float, count: int = 1, trace_id: str | None = None) -> None:
        """`count` observations of `value`; the latest with a trace becomes the exemplar."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count
        if trace_id is not None:
            self._exemplar = (value, trace_id)

    def state(self) -> HistogramState:
        total, cumulative = 0, []
        for count in self._counts:
            total += count
            cumulative.append(total)
        return HistogramState(self._bounds, tuple(cumulative), self._sum, self._exemplar)


class TallyBook:
    """Only grows. Every key that can occur is there from the start, so that no rate misses a first increase."""

    def __init__(self) -> None:
        self.requests = Counter(dict.fromkeys(OUTCOMES, 0))
        self.aborts = Counter(dict.fromkeys(PHASES, 0))
        self.assertions = Counter({check.name: 0 for check in CHECKS.all()})
        self.findings = Counter({kind.value: 0 for kind in Kind})
        self.counts: Counter[str] = Counter()
        self.histograms = {
            "time_to_first_token_seconds": Histogram(SECONDS),
            "inter_token_seconds": Histogram(SHORT_SECONDS),
            "queue_seconds": Histogram(SECONDS),
            "kv_uncommitted_tokens": Histogram(TOKENS),
        }

    def state(self) -> Tallies:
        counts = self.counts
        return Tallies(
            requests=dict(self.requests),
            aborts=dict(self.aborts),
            retractions=counts["retractions"],
            prefix_queried_tokens=counts["prefix_queried_tokens"],
            prefix_hit_tokens=counts["prefix_hit_tokens"],
            prefilled_tokens=counts["prefilled_tokens"],
            generated_tokens=counts["generated_tokens"],
            evicted_tokens=counts["evicted_tokens"],
            assertions=dict(self.assertions),
            findings=dict(self.findings),
            frames=counts["frames"],
            frames_lost=counts["frames_lost"],
            dropped_events=counts["dropped_events"],
            probe_seconds=counts["probe_ns"] / 1e9,
            histograms={name: histogram.state() for name, histogram in self.histograms.items()},
        )
