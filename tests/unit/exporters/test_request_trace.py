from __future__ import annotations

from types import ModuleType

from kvlens.exporters.request_trace import phases_of
from kvlens.observer.schema import Timeline


def outline(timeline: Timeline) -> list[tuple[str, float, float]]:
    return [(phase.name, phase.start, phase.end) for phase in phases_of(timeline)]


def new_tokens(timeline: Timeline) -> int:
    """Prefill tokens of the trace without what was computed again."""
    return sum(
        phase.attributes["kvlens.prefill.tokens"] - phase.attributes["kvlens.prefill.recomputed_tokens"]
        for phase in phases_of(timeline)
        if phase.name == "prefill"
    )


def test_a_request_is_queue_prefills_decode_and_release(states: ModuleType) -> None:
    assert outline(states.a_timeline()) == [
        ("queue", 10.0, 11.0), ("prefill", 11.9, 12.0), ("prefill", 12.9, 13.0), ("decode", 13.0, 19.9),
        ("release", 19.9, 20.0),
    ]  # fmt: skip


def test_prefill_tokens_add_up_to_prompt_minus_cached(states: ModuleType) -> None:
    timeline = states.a_timeline()
    assert new_tokens(timeline) == timeline.prompt_tokens - timeline.cached_tokens


def retracted(states: ModuleType) -> Timeline:
    """Retracted after 5 tokens; then prompt and answer are computed again behind a shorter prefix."""
    return states.a_timeline(
        states.entry(10.0, "queued"), states.scheduled(11.0, 20), states.chunk(13.0, 20, 100, last=True),
        states.released(15.0, 104), states.entry(15.0, "retracted", detail={"output_tokens": 5}),
        states.scheduled(16.0, 10), states.chunk(17.0, 10, 104, last=True), states.released(20.0, 108),
        states.finished(20.0),
    )  # fmt: skip


def test_a_retraction_gives_a_second_round_of_spans(states: ModuleType) -> None:
    assert [name for name, _, _ in outline(retracted(states))] == [
        "queue", "prefill", "decode", "release", "retracted", "prefill", "decode", "release",
    ]  # fmt: skip
    assert ("retracted", 15.0, 16.0) in outline(retracted(states))


def test_what_a_retraction_makes_compute_again_is_told_apart(states: ModuleType) -> None:
    timeline = retracted(states)
    assert new_tokens(timeline) == 80
    again = [phase.attributes["kvlens.prefill.recomputed_tokens"] for phase in phases_of(timeline)
             if phase.name == "prefill"]  # fmt: skip
    assert again == [0, 94]


def test_a_prefill_that_was_cut_goes_on_without_counting_twice(states: ModuleType) -> None:
    timeline = states.a_timeline(
        states.scheduled(11.0, 20), states.chunk(12.0, 20, 60, last=False), states.released(13.0, 60),
        states.entry(13.0, "retracted", detail={"output_tokens": 0}), states.scheduled(14.0, 20),
        states.chunk(15.0, 20, 100, last=True), states.released(20.0, 108), states.finished(20.0),
    )  # fmt: skip
    assert new_tokens(timeline) == 80


def test_a_request_that_never_ran_has_only_its_queue(states: ModuleType) -> None:
    timeline = states.a_timeline(
        states.entry(10.0, "queued"), states.entry(15.0, "abort_requested", detail={"phase": "waiting"}),
        states.finished(15.0, "abort", 0, "aborted"), outcome="abort",
    )  # fmt: skip
    assert outline(timeline) == [("queue", 10.0, 15.0)]


def test_a_request_that_leaked_has_no_release(states: ModuleType) -> None:
    timeline = states.a_timeline(
        states.scheduled(11.0, 20), states.chunk(13.0, 20, 100, last=True), states.finished(15.0, "abort", 3, "aborted")
    )
    assert [name for name, _, _ in outline(timeline)] == ["queue", "prefill", "decode"]


def test_each_phase_says_where_the_record_stood(states: ModuleType) -> None:
    release = next(phase for phase in phases_of(states.a_timeline()) if phase.name == "release")
    assert release.attributes["kv.row"] == 5 and release.attributes["kv.generation"] == 7
    assert release.attributes["kv.allocated_tokens"] == 108 and release.attributes["kv.protected_tokens"] == 0
    assert "kv.committed_tokens" not in release.attributes  # unknown, so not told
