"""Step by step: what runs, what is told, and that everything comes back."""

from __future__ import annotations

import pytest

from kvlens.engine.contracts import Mode
from kvlens.engine.probe import (
    AbortRequested,
    CacheFlushed,
    ChunkComputed,
    DecodeStepped,
    FirstToken,
    KvReleased,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    RequestScheduled,
    RowReturned,
    RowSet,
    RowTaken,
)
from kvlens.engine.record import FinishReason, Phase


def leak(scheduler, slots: int) -> None:
    """Slots that nobody holds any more."""
    assert scheduler.memory.slots.alloc(slots) is not None


# -- the way of a request ---------------------------------------------------------------------------------------------


def test_a_prompt_in_chunks_then_decodes_allocates_token_by_token(a_scheduler, a_request) -> None:
    scheduler, req = a_scheduler(chunk=4), a_request(10, answer=3)
    scheduler.add(req)
    allocated, modes = [], []
    while not scheduler.is_idle:
        scheduler.step()
        allocated.append(req.kv.kv_allocated_len)
        modes.append(scheduler.mode)
    assert [(b.prefix_lens[0], b.seq_lens[0]) for b in scheduler.runner.batches] == [
        (0, 4), (4, 8), (8, 10), (10, 11), (11, 12),
    ]  # fmt: skip
    assert allocated == [4, 8, 10, 11, 0]
    assert modes == ["prefill"] * 3 + ["decode"] * 2
    assert req.kv.kv_committed_len == 12  # the last token is sampled, and never computed


def test_the_events_of_a_request_come_in_the_order_they_happened(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(chunk=4)
    scheduler.add(a_request(6, answer=2))
    run_out(scheduler)
    assert [type(event) for event in scheduler.probe.events] == [
        RequestQueued,
        RowTaken, RequestScheduled, RowSet, ChunkComputed, RowSet,
        RowSet, ChunkComputed, FirstToken, RowSet,
        DecodeStepped, RowReturned, KvReleased, RequestFinished,
    ]  # fmt: skip
    assert [event.phase for event in scheduler.probe.of(RowSet)] == [
        Phase.PREFILL, Phase.CHUNKED, Phase.PREFILL, Phase.RUNNING,
    ]  # fmt: skip


def test_a_finished_request_is_no_holder_at_the_quiet_moment_of_its_last_step(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(3, answer=2))
    scheduler.step()
    scheduler.step()
    assert [list(held) for held in scheduler.probe.holders] == [[1], []]


def test_prompts_and_answers_take_turns(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(chunk=4)
    scheduler.add(a_request(4, answer=20))
    scheduler.step()
    scheduler.add(a_request(12, answer=1))
    for _ in range(4):
        scheduler.step()
    assert scheduler.probe.modes == ["prefill", "decode", "prefill", "decode", "prefill"]


def test_a_second_request_takes_the_prefix_from_the_cache(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(page_size=16, slots=128)
    scheduler.add(a_request(range(40), answer=1))
    run_out(scheduler)
    scheduler.add(a_request(range(40), answer=1))
    assert run_out(scheduler)["r2"][0].cached_tokens == 32
    assert scheduler.runner.batches[-1].prefix_lens.tolist() == [32]


def test_a_prompt_that_is_wholly_cached_still_computes_its_last_token(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler()
    for _ in range(2):
        scheduler.add(a_request(range(10), answer=1))
        outputs = run_out(scheduler)
    assert outputs["r2"][0].cached_tokens == 9


# -- aborts -----------------------------------------------------------------------------------------------------------


def test_abort_of_a_waiting_request_ends_it_at_once(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request())
    assert scheduler.abort("r1") == 1
    (output,) = scheduler.step()
    assert (output.finish.kind, output.token_ids) == ("abort", ())
    assert scheduler.runner.batches == []
    assert all_is_back(scheduler)


@pytest.mark.parametrize(("cache", "evictable"), [("radix", 16), ("chunk", 0)])
def test_abort_between_chunks_returns_every_slot(a_scheduler, a_request, all_is_back, cache, evictable) -> None:
    scheduler = a_scheduler(chunk=8, cache=cache)
    scheduler.add(a_request(40))
    scheduler.step()
    scheduler.step()
    scheduler.abort("r1")
    assert [output.finish.kind for output in scheduler.step()] == ["abort"]
    assert scheduler.chunked is None
    assert scheduler.memory.cache.evictable_size() == evictable
    assert all_is_back(scheduler)


def test_abort_while_a_prefill_is_in_flight_ends_it_with_that_step(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(5))
    scheduler.runner.during = lambda: scheduler.abort("r1")
    (output,) = scheduler.step()
    assert output.finish.kind == "abort"
    assert [event.phase for event in scheduler.probe.of(AbortRequested)] == ["prefill"]
    assert all_is_back(scheduler)


def test_abort_while_a_chunk_is_in_flight_ends_it_before_the_next(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler(chunk=4)
    scheduler.add(a_request(10))
    scheduler.runner.during = lambda: scheduler.abort("r1")
    assert scheduler.step() == []
    assert [output.finish.kind for output in scheduler.step()] == ["abort"]
    assert len(scheduler.runner.batches) == 1
    assert all_is_back(scheduler)


def test_abort_of_a_running_request_keeps_its_kv_for_reuse(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(5, answer=20))
    scheduler.step()
    scheduler.abort("r1")
    assert [output.finish.kind for output in scheduler.step()] == ["abort"]
    assert scheduler.memory.cache.evictable_size() == 6
    assert all_is_back(scheduler)


def test_a_second_abort_finds_nobody(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(5, answer=20))
    scheduler.step()
    assert [scheduler.abort("r1"), scheduler.abort("r1"), scheduler.abort("r2")] == [1, 0, 0]
    assert len(scheduler.probe.of(AbortRequested)) == 1


def test_abort_of_everybody_reaches_every_place(a_scheduler, a_request, run_out, all_is_back) -> None:
    scheduler = a_scheduler(chunk=8, rows=3)
    for prompt in (4, 20, 5):
        scheduler.add(a_request(prompt, answer=20))
    scheduler.step()
    assert (len(scheduler.running), scheduler.chunked.rid, len(scheduler.waiting)) == (1, "r2", 1)
    assert scheduler.abort() == 3
    assert {outputs[-1].finish.kind for outputs in run_out(scheduler).values()} == {"abort"}
    assert all_is_back(scheduler)


# -- too little room --------------------------------------------------------------------------------------------------


def test_a_retracted_request_gives_the_answer_it_would_have_given(a_scheduler, a_request, run_out, all_is_back) -> None:
    scheduler = a_scheduler(slots=32, reserve=0.0)
    reqs = [a_request(8, answer=16) for _ in range(3)]
    for req in reqs:
        scheduler.add(req)
    outputs = run_out(scheduler)
    assert len(scheduler.probe.of(RequestRetracted)) > 0
    for req in reqs:
        tokens = [token for output in outputs[req.rid] for token in output.token_ids]
        assert tokens == [req.number * 100 + length for length in range(8, 24)]
        assert req.cached_tokens == 0  # what a second prefill finds in the cache is not counted
    assert all_is_back(scheduler)


def test_a_retraction_waits_at_the_head_of_the_queue(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(slots=16, rows=2, reserve=0.0)
    for _ in range(3):
        scheduler.add(a_request(7, answer=9))
    while not scheduler.probe.of(RequestRetracted):
        scheduler.step()
    assert [req.rid for req in scheduler.waiting] == ["r2", "r3"]


def test_a_request_that_is_to_end_is_not_retracted(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler(slots=16, reserve=0.0)
    for _ in range(2):
        scheduler.add(a_request(8, answer=8))
    scheduler.step()
    scheduler.abort("r1")  # without it r2, the later one, would give way
    ends = [output for output in scheduler.step() if output.finish is not None]
    assert [(output.rid, output.finish.kind) for output in ends] == [("r1", "abort")]
    assert scheduler.probe.of(RequestRetracted) == []
    assert [req.rid for req in scheduler.running.reqs] == ["r2"]


def test_the_request_between_chunks_gives_way_to_the_last_running_one(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(slots=16, chunk=8, reserve=0.0, cache="chunk")
    scheduler.add(a_request(7, answer=9))
    scheduler.step()
    scheduler.step()
    scheduler.add(a_request(16, answer=1))
    outputs = run_out(scheduler)
    assert [event.request for event in scheduler.probe.of(RequestRetracted)] == [2]
    assert {rid: got[-1].finish.kind for rid, got in outputs.items()} == {"r1": "length", "r2": "length"}


def test_a_request_that_fits_no_more_is_told_so(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler(slots=32)
    leak(scheduler, 20)
    scheduler.add(a_request(10, answer=10))
    finish = run_out(scheduler)["r1"][-1].finish
    assert (finish.kind, finish.status) == ("abort", 503)
    assert "needs 13 slots and a row; the pool has 12 slots of 32 and 4 rows left" in finish.message
    assert scheduler.memory.slots.available_size() + scheduler.memory.cache.evictable_size() == 12


@pytest.mark.parametrize("cache", ["radix", "chunk"])
def test_a_prompt_whose_next_chunk_fits_no_more_is_told_so_instead_of_waiting(
    a_scheduler, a_request, run_out, cache
) -> None:
    scheduler = a_scheduler(slots=32, chunk=8, cache=cache)
    leak(scheduler, 12)
    scheduler.add(a_request(30))
    scheduler.add(a_request(4, answer=1))
    outputs = run_out(scheduler)
    assert outputs["r1"][-1].finish.status == 503
    assert outputs["r2"][-1].finish.kind == "length"  # nobody else pays for it
    assert scheduler.memory.slots.available_size() + scheduler.memory.cache.evictable_size() == 20


def test_a_prompt_that_lost_its_row_and_does_not_fit_at_once_starts_over(a_scheduler, a_request, run_out) -> None:
    # r2 shares r1's prompt; computed from position 0 again, [0, 36) would not fit beside it, with the hit it does.
    scheduler = a_scheduler(slots=48, chunk=16, mode=Mode.REPORT)
    scheduler.add(a_request(range(16), answer=8))
    scheduler.step()
    req = a_request([*range(16), *range(100, 120)], answer=1)
    scheduler.add(req)
    while scheduler.chunked is None:
        scheduler.step()
    row = req.kv.req_pool_idx
    scheduler.release(req, is_insert=False)
    req.kv.req_pool_idx = row  # a record that says it holds what was given back
    outputs = run_out(scheduler)
    assert {rid: got[-1].finish.kind for rid, got in outputs.items()} == {"r1": "length", "r2": "length"}


# -- quiet ------------------------------------------------------------------------------------------------------------


def test_a_flush_is_refused_while_somebody_is_here(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(5, answer=5))
    scheduler.step()
    assert scheduler.flush() is False
    assert scheduler.probe.of(CacheFlushed) == []


def test_a_flush_empties_the_cache_and_brings_lost_slots_back(a_scheduler, a_request, run_out) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(5))
    run_out(scheduler)
    leak(scheduler, 7)
    assert scheduler.flush() is True
    assert scheduler.memory.slots.available_size() == 64
    assert scheduler.memory.cache.total_size() == 0
    assert scheduler.probe.modes[-1] == "idle"


def test_end_all_releases_everybody_wherever_the_step_broke(a_scheduler, a_request, all_is_back) -> None:
    scheduler = a_scheduler(chunk=8, rows=3)
    for prompt in (4, 20, 5):
        scheduler.add(a_request(prompt, answer=20))
    scheduler.step()

    def lose_the_device() -> None:
        raise RuntimeError("device lost")

    scheduler.runner.during = lose_the_device
    with pytest.raises(RuntimeError, match="device lost"):
        scheduler.step()
    outputs = scheduler.end_all(FinishReason("abort", message="broken", status=500))
    assert {output.rid: output.finish.message for output in outputs} == dict.fromkeys(("r1", "r2", "r3"), "broken")
    assert len(scheduler.probe.of(RequestFinished)) == 3
    assert scheduler.is_idle
    assert all_is_back(scheduler)


def test_end_all_unlocks_what_admission_had_locked(a_scheduler, a_request, run_out, all_is_back, monkeypatch) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(range(10), answer=1))
    run_out(scheduler)

    def broken(reqs, site):
        raise RuntimeError("no rows today")

    monkeypatch.setattr(scheduler.memory.rows, "alloc", broken)
    scheduler.add(a_request(range(10), answer=1))
    with pytest.raises(RuntimeError, match="no rows today"):
        scheduler.step()
    assert scheduler.memory.cache.protected_size() > 0
    scheduler.end_all(FinishReason("abort", status=500))
    assert all_is_back(scheduler)


def test_end_all_also_tells_what_the_broken_step_had_brought(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(3, answer=1))
    scheduler.add(a_request(3, answer=1))
    release = scheduler.release

    def breaks_at_the_second(req, *, is_insert):
        if req.rid == "r2" and is_insert:
            raise RuntimeError("broken release")
        release(req, is_insert=is_insert)

    scheduler.release = breaks_at_the_second
    with pytest.raises(RuntimeError, match="broken release"):
        scheduler.step()
    outputs = scheduler.end_all(FinishReason("abort", status=500))
    assert [(output.rid, output.finish.kind) for output in outputs] == [("r1", "length"), ("r2", "abort")]


def test_who_cannot_be_released_keeps_what_it_holds_and_hinders_nobody(a_scheduler, a_request, capsys) -> None:
    scheduler = a_scheduler()
    for _ in range(2):
        scheduler.add(a_request(4, answer=9))
    scheduler.step()
    release = scheduler.release

    def never_the_first(req, *, is_insert):
        if req.rid == "r1":
            raise RuntimeError("broken release")
        release(req, is_insert=is_insert)

    scheduler.release = never_the_first
    assert len(scheduler.end_all(FinishReason("abort", status=500))) == 2
    assert scheduler.memory.rows.available_size() == 3
    assert "broken release" in capsys.readouterr().err
