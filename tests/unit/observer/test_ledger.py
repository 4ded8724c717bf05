"""The ledger says what the engine's own records say, from frames alone."""

from __future__ import annotations

import msgspec
import pytest

from kvlens.engine.probe import CheckFailed, ChunkComputed, RequestFinished
from kvlens.engine.record import Phase
from kvlens.observer.ledger import MOST_FAILED, Ledger
from kvlens.observer.stories import MOST_ENDED, MOST_ENTRIES, Stories, Story

TRACE = "00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"


def held(ledger: Ledger) -> dict[int, tuple]:
    return {
        row: (one.generation, one.request, one.phase, one.protected, *ledger.lengths(one))
        for row, one in ledger.rows.items()
    }


def records(run) -> dict[int, tuple]:
    scheduler = run.scheduler
    holders = scheduler.running.reqs + ([scheduler.chunked] if scheduler.chunked else [])
    return {
        req.kv.held_row: (
            req.kv.generation, req.number, req.phase, req.kv.cache_protected_len, req.kv.kv_committed_len,
            req.kv.kv_allocated_len,
        )
        for req in holders
    }  # fmt: skip


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_follow_the_records_after_every_step(a_run, page_size) -> None:
    run = a_run(page_size=page_size, slots=192, coalesce_ms=0)
    for prompt, answer in ((5, 9), (70, 20), (40, 3), (12, 60), (90, 30)):
        run.ask(prompt, answer)
    while not run.scheduler.is_idle:
        run.step()
        assert held(run.ledger) == records(run)
    assert held(run.ledger) == {}


def test_tallies_are_the_engines_own_totals(a_run) -> None:
    run = a_run(page_size=4, slots=128, rows=6)
    run.scheduler.admission._reserve = 0.0
    reqs = [run.ask(20, answer=30) for _ in range(6)]
    run.step(12)
    run.scheduler.abort(reqs[0].rid)
    run.ask(9, answer=2)
    run.until_idle()
    tallies = run.ledger.tallies.state()
    finished = run.events(RequestFinished)
    assert tallies.requests == {
        "stop": 0, "length": sum(event.outcome == "length" for event in finished), "abort": 1,
    }  # fmt: skip
    assert sum(tallies.aborts.values()) == 1
    assert tallies.generated_tokens == sum(event.output_tokens for event in finished)
    assert tallies.prefilled_tokens == sum(event.end - event.start for event in run.events(ChunkComputed))
    assert tallies.retractions == sum(event.retractions for event in finished) > 0
    assert tallies.frames == len(run.payloads)
    assert tallies.histograms["time_to_first_token_seconds"].counts[-1] == 7
    assert tallies.histograms["queue_seconds"].counts[-1] == 7
    assert tallies.histograms["kv_uncommitted_tokens"].counts == (7 + tallies.retractions,) * 11
    gaps = tallies.histograms["inter_token_seconds"]
    # One gap per token that a decode step brought, less those of whoever had just joined.
    assert 0 < gaps.counts[-1] <= tallies.generated_tokens - 7


def test_prefilled_is_prompt_minus_cached_where_nobody_was_retracted(a_run) -> None:
    run = a_run(page_size=4)
    for _ in range(2):
        run._numbers = 0
        run.ask(30, answer=3)
        run.until_idle()
    tallies = run.ledger.tallies
    assert run.events(RequestFinished)[1].cached_tokens == 28
    assert tallies.counts["prefilled_tokens"] == 30 + 2
    assert tallies.counts["prefix_hit_tokens"] == 28


def test_a_timeline_tells_the_life_of_a_request_with_its_lengths(a_run) -> None:
    run = a_run(page_size=4, chunk=32)
    run.ask(50, answer=3, trace=TRACE)
    run.until_idle()
    timeline = run.ledger.timeline("r1")
    assert [entry.event for entry in timeline.entries] == [
        "queued", "scheduled", "chunk", "chunk", "first_token", "released", "finished",
    ]  # fmt: skip
    assert (timeline.outcome, timeline.prompt_tokens, timeline.output_tokens) == ("length", 50, 3)
    assert timeline.traceparent == TRACE and timeline.ended_at is not None
    chunks = [(entry.detail["start"], entry.detail["end"], entry.detail["last"]) for entry in timeline.entries[2:4]]
    assert chunks == [(0, 32, False), (32, 50, True)]
    released = timeline.entries[5]
    assert (released.row, released.generation, released.allocated_tokens) == (8, 1, 52)
    (ended,) = [one for applied in run.applied for one in applied.ended]
    assert ended == timeline


def test_a_request_that_nobody_knows_has_no_timeline(a_run) -> None:
    assert a_run().ledger.timeline("r1") is None


def test_frames_that_are_replayed_rebuild_the_picture_and_count_and_tell_nothing(a_run) -> None:
    run = a_run()
    run.ask(10, answer=4, trace=TRACE)
    run.ask(10, answer=90)
    run.step(20)
    again = Ledger(run.identity)
    for frame in run.frames:
        assert not again.apply(frame, replay=True).ended
    assert held(again) == held(run.ledger)
    assert again.tallies.counts["frames"] == 0 and not any(again.tallies.requests.values())
    assert again.timeline("r1").outcome == "length"


def test_a_reader_that_lost_frames_forgets_what_ended_meanwhile(a_run) -> None:
    run = a_run()
    run.ask(10, answer=4)
    run.step(3)
    late = Ledger(run.identity)
    for frame in run.frames:
        late.apply(frame)
    missed = len(run.frames)
    run.ask(10, answer=150)
    run.step(120)
    late.lost(7)
    key = next(frame for frame in run.frames[missed:] if frame.is_key)
    for frame in run.frames[run.frames.index(key) :]:
        late.apply(frame)
    assert held(late) == held(run.ledger) and set(late.stories.live) == {2}
    assert late.tallies.counts["frames_lost"] == 7
    run.until_idle()


def test_the_rate_is_of_the_last_seconds_and_ends_with_the_frames(a_run) -> None:
    run = a_run(coalesce_ms=0)
    run.ask(10, answer=240)
    run.step(200)
    now = run.last.wall_ns / 1e9
    assert run.ledger.tokens_per_second(now) > 0
    assert run.ledger.tokens_per_second(now + 60) == 0


def test_a_flush_forgets_rows_censuses_and_failed_checks(a_run) -> None:
    run = a_run()
    req = run.ask(10, answer=90)
    run.step(3)
    run.lose(req)
    assert [one.phase for one in run.ledger.rows.values()] == [Phase.ORPHAN] and run.ledger.failed
    run.scheduler.flush()
    run.follow()
    assert not run.ledger.rows and not run.ledger.failed


def test_memory_is_bounded_however_many_requests_and_events_there_are() -> None:
    stories = Stories()
    for number in range(MOST_ENDED + 500):
        stories.begin(Story(number, f"r{number}", None, 0.0))
        stories.end(number)
    assert stories.by_rid("r0") is None and stories.by_rid(f"r{MOST_ENDED + 499}") is not None
    assert len(stories._by_rid) == MOST_ENDED
    story = Story(1, "r", None, 0.0)
    for step in range(MOST_ENTRIES * 3):
        story.tell(float(step), "chunk", step)
    assert len(story.entries) == MOST_ENTRIES
    assert (story.entries[0].step, story.entries[-1].step) == (0, MOST_ENTRIES * 3 - 1)


def test_a_row_that_the_first_frame_tells_of_was_taken_then(a_run) -> None:
    run = a_run()
    run.ask(10, answer=90)
    run.step(1)
    (one,) = run.ledger.rows.values()
    assert one.taken_at == run.frames[0].wall_ns / 1e9


def test_a_phase_that_only_a_later_engine_knows_is_held_and_does_not_grow(a_run) -> None:
    run = a_run(coalesce_ms=0)
    run.ask(10, answer=90)
    run.step(3)
    key = next(frame for frame in run.frames if frame.is_key and frame.columns.rows)
    unknown = msgspec.structs.replace(key.columns, phases=b"\xc8" * len(key.columns.phases))
    ledger = Ledger(run.identity)
    ledger.apply(msgspec.structs.replace(key, columns=unknown))
    before = ledger.lengths(ledger.rows[8])
    ledger.apply(run.last)
    assert ledger.lengths(ledger.rows[8]) == before


def test_checks_that_fail_for_ever_new_tenancies_are_bounded(a_run) -> None:
    run = a_run()
    run.ask(5)
    run.step(1)
    failures = [
        CheckFailed(run.now, 1, "locks-balance", request, -1, -1, -1, -1, -1, "", {})
        for request in [*range(MOST_FAILED), 0, *range(MOST_FAILED, MOST_FAILED + 10)]
    ]
    run.ledger.apply(msgspec.structs.replace(run.last, events=failures))
    assert len(run.ledger.failed) == MOST_FAILED
    assert run.ledger.failed["locks-balance", -1, -1, 0].count == 2  # it failed again, so others went before it
    assert ("locks-balance", -1, -1, 1) not in run.ledger.failed


def test_a_request_that_a_key_frame_had_no_room_to_name_is_told_to_its_end(a_run) -> None:
    run = a_run(rows=2)
    for _ in range(4):
        run.ask(10, answer=5)
    run.step(2)
    key = next(frame for frame in run.frames if frame.is_key)
    run.ledger.apply(msgspec.structs.replace(key, events=[], names=[]))
    run.until_idle()
    ended = [timeline for applied in run.applied for timeline in applied.ended]
    assert sorted((timeline.request_id, timeline.outcome) for timeline in ended) == [
        (f"r{number}", "length") for number in (1, 2, 3, 4)
    ]
