"""Counters that are there from the start, and histograms as Prometheus reads them."""

from __future__ import annotations

from kvlens.engine.contracts import CHECKS
from kvlens.observer.schema import Kind
from kvlens.observer.tallies import OUTCOMES, PHASES, Histogram, TallyBook


def test_a_value_on_a_bound_belongs_to_that_bound_and_counts_are_cumulative() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 2.0, 3.0, 9.0):
        histogram.observe(value)
    state = histogram.state()
    assert state.counts == (2, 3, 4, 5)
    assert state.sum == 15.5


def test_many_equal_observations_are_one_entry() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.25, count=8)
    histogram.observe(3.0, count=0)
    assert (histogram.state().counts, histogram.state().sum) == ((8, 8), 2.0)


def test_the_exemplar_is_the_latest_with_a_trace() -> None:
    histogram = Histogram((1.0,))
    assert histogram.state().exemplar is None
    histogram.observe(0.25, trace_id="a" * 32)
    histogram.observe(0.75)
    assert histogram.state().exemplar == (0.25, "a" * 32)


def test_every_key_is_there_before_anything_happens() -> None:
    tallies = TallyBook().state()
    assert tallies.requests == dict.fromkeys(OUTCOMES, 0)
    assert tallies.aborts == dict.fromkeys(PHASES, 0)
    assert tallies.assertions == {check.name: 0 for check in CHECKS.all()}
    assert tallies.findings == {kind.value: 0 for kind in Kind}
    assert (tallies.retractions, tallies.frames, tallies.probe_seconds) == (0, 0, 0.0)
    assert all(set(histogram.counts) == {0} for histogram in tallies.histograms.values())


def test_a_state_that_was_handed_out_does_not_change() -> None:
    book = TallyBook()
    before = book.state()
    book.requests["stop"] += 1
    book.histograms["queue_seconds"].observe(0.1)
    assert before.requests["stop"] == 0 and before.histograms["queue_seconds"].counts[-1] == 0
