"""Frames say what the records say; a balance that is off is told at once, and once."""

from __future__ import annotations

import numpy as np
import pytest

from kvlens.engine.contracts import CHECKS
from kvlens.engine.probe import CensusTaken, CheckFailed, RequestFinished, SlotRange
from kvlens.engine.record import Phase
from kvlens.observer.frames import FrameError, decode, encode
from kvlens.observer.pool_stats import active_pool_idxs

# -- health -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_every_frame_of_a_healthy_run_balances_and_no_check_fails(a_run, page_size) -> None:
    run = a_run(page_size=page_size)
    for prompt in (5, 40, 70, 12):
        run.ask(prompt, answer=9)
    run.until_idle()
    assert all(account.unaccounted == 0 for frame in run.frames for account in frame.accounts)
    assert run.events(CheckFailed) == []
    assert {account.pool for account in run.last.accounts} == {"rows", "full"}
    assert (run.last.mode, run.last.allocated_tokens) == ("idle", 0)


def test_an_account_is_the_sum_over_what_holders_hold(a_run) -> None:
    run = a_run(page_size=4)
    run.ask(10, answer=30)
    run.ask(6, answer=30)
    run.step(6)
    kvs = [req.kv for req in run.scheduler.running.reqs]
    full = run.last.accounts[1]
    assert full.private == sum(-(-kv.kv_allocated_len // 4) * 4 - kv.cache_protected_len for kv in kvs) > 0
    assert run.last.allocated_tokens == sum(kv.kv_allocated_len for kv in kvs)
    assert run.last.committed_tokens == sum(kv.kv_committed_len for kv in kvs)


def test_active_rows_are_those_of_whoever_is_in_a_queue_or_batch(a_run) -> None:
    run = a_run()
    reqs = [run.ask(90, answer=4), run.ask(6, answer=30), run.ask(6, answer=30)]
    run.step(2)
    assert run.scheduler.chunked is reqs[0]
    held = sorted(req.kv.req_pool_idx for req in reqs if req.kv.holds_kv)
    assert active_pool_idxs(run.scheduler.view).tolist() == held
    run.until_idle()
    lost = run.ask(6, answer=30)
    run.step(2)
    run.lose(lost)
    assert active_pool_idxs(run.scheduler.view).tolist() == []


# -- when a frame is written ------------------------------------------------------------------------------------------


def test_steps_within_five_milliseconds_share_a_frame(a_run) -> None:
    run = a_run()
    run.ask(6, answer=100)
    run.step(2)
    before = len(run.payloads)
    run.step(10, ms=1)
    frames = run.frames[before:]
    assert len(frames) == 2
    assert [(frame.first_step, frame.last_step) for frame in frames] == [(3, 7), (8, 12)]


def test_an_end_is_told_at_once(a_run) -> None:
    run = a_run()
    run.ask(6, answer=3)
    run.step(1)
    run.step(2, ms=0.1)
    assert any(isinstance(event, RequestFinished) for event in run.last.events)


def test_a_key_frame_comes_first_each_second_and_when_the_engine_turns_idle(a_run) -> None:
    run = a_run()
    run.ask(6, answer=210)
    run.step(201)
    keys = [frame.last_step for frame in run.frames if frame.is_key]
    assert keys == [1, 101, 201]
    run.until_idle()
    assert run.last.is_key and run.last.identity == run.identity
    idle = len(run.payloads)
    run.heartbeat(ms=500)
    run.heartbeat(ms=600)
    assert [frame.is_key for frame in run.frames[idle:]] == [False, True]


def test_columns_and_names_say_who_holds_what(a_run) -> None:
    run = a_run()
    req = run.ask(6, answer=300, trace="00-" + "a" * 32 + "-" + "b" * 16 + "-01")
    run.step(101)
    frame = next(frame for frame in reversed(run.frames) if frame.is_key)
    assert memoryview(frame.columns.rows).cast("i").tolist() == [req.kv.req_pool_idx]
    assert memoryview(frame.columns.requests).cast("q").tolist() == [req.number]
    assert list(frame.columns.phases) == [Phase.RUNNING]
    assert frame.names == [(req.number, req.rid, req.trace)]


def test_a_frame_that_is_too_big_is_cut_and_says_so(a_run) -> None:
    run = a_run(largest=600, rows=8)
    for _ in range(8):
        run.ask(30, answer=2)
    run.until_idle()
    assert run.last.dropped_events > 10
    assert all(len(payload) <= 600 for payload in run.payloads)


def test_after_events_were_cut_the_next_frame_tells_all_rows(a_run) -> None:
    run = a_run(largest=900)
    run.ask(6, answer=50)
    run.step(3)
    for _ in range(7):
        run.ask(6, answer=50)
    run.step(1)
    assert not run.last.is_key and run.last.events == [] and run.last.dropped_events > 7
    run.step(1)
    assert run.last.is_key
    assert sorted(run.ledger.rows) == active_pool_idxs(run.scheduler.view).tolist()
    assert len(run.ledger.rows) > 1


@pytest.mark.parametrize("largest", [100, 300, 700, 2000, 5000])
def test_no_queue_and_no_leak_is_too_big_to_go_on_serving(a_run, largest) -> None:
    run = a_run(largest=largest, slots=2048)
    for _ in range(200):
        run.ask(6, answer=12)
    run.step(3)
    run.lose(run.scheduler.running.reqs[0])
    while not run.scheduler.is_idle:
        run.step()
    run.heartbeat(6000)
    assert all(len(payload) <= largest for payload in run.payloads)


def test_a_key_frame_too_big_for_its_ring_becomes_a_step_frame(a_run) -> None:
    run = a_run(largest=300)
    run.ask(6, answer=12)
    run.step(1)
    assert not run.last.is_key and run.last.last_step == 1
    assert run.last.accounts[0].private == 1


def test_a_queue_too_long_for_a_frame_costs_the_names_of_who_waits_and_nothing_else(a_run) -> None:
    run = a_run(largest=2500, slots=2048)
    reqs = [run.ask(6, answer=150) for _ in range(300)]
    run.step(1)
    run.step(105)
    key = next(frame for frame in reversed(run.frames) if frame.is_key)
    held = {req.number for req in reqs if req.kv.holds_kv}
    assert {name[0] for name in key.names} == held == set(memoryview(key.columns.requests).cast("q"))
    assert key.identity == run.identity and key.events
    assert run.last.dropped_events == run.frames[0].dropped_events


def test_what_a_census_found_outlives_its_pool_map(a_run) -> None:
    run = a_run(page_size=1, slots=2048, largest=2000)
    reqs = [run.ask(6, answer=60) for _ in range(8)]  # rows grow in turns: each slot is a run of its own
    run.step(40)
    run.lose(reqs[0])
    (census,) = [event for event in run.last.events if isinstance(event, CensusTaken)]
    assert census.truncated and census.owners == [] and {part.row for part in census.unowned} == {
        int(row) for row, phase in zip(
            memoryview(run.last.columns.rows).cast("i"), run.last.columns.phases, strict=True
        ) if phase == Phase.ORPHAN
    }  # fmt: skip


def test_what_is_untold_at_the_end_is_told_and_the_end_is_clean(a_run) -> None:
    run = a_run()
    run.ask(6, answer=100)
    run.step(1)
    run.step(1, ms=1)
    before = len(run.payloads)
    run.probe.close()
    assert len(run.payloads) == before + 1 and run.closed


# -- when something is wrong ------------------------------------------------------------------------------------------


def test_a_lost_request_is_told_in_the_same_step_once_with_a_census_and_a_key_frame(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=50)
    run.ask(6, answer=50)
    run.step(4)
    row, private = req.kv.req_pool_idx, -(-req.kv.kv_allocated_len // 4) * 4 - req.kv.cache_protected_len
    run.lose(req)
    frame = run.last
    assert frame.is_key and frame.last_step == run.scheduler.steps
    failed = {event.check: event.facts for event in frame.events if isinstance(event, CheckFailed)}
    assert failed["row-pool-balances"]["residual"] == 1
    assert failed["full-pool-balances"]["residual"] == private
    (census,) = [event for event in frame.events if isinstance(event, CensusTaken)]
    assert sum(part.end - part.start for part in census.unowned) == private
    assert {(part.row, part.generation, part.request) for part in census.unowned} == {(row, 1, req.number)}
    assert Phase.ORPHAN in frame.columns.phases
    assert (req.number, req.rid, req.trace) in frame.names
    told = len(run.events(CheckFailed))
    run.step(20)
    assert len(run.events(CheckFailed)) == told


def test_another_amount_is_told_again_and_the_return_to_balance_by_a_key_frame(a_run) -> None:
    run = a_run()
    one, two = run.ask(10, answer=50), run.ask(6, answer=50)
    run.step(4)
    run.lose(one)
    run.lose(two)
    assert [event.facts["residual"] for event in run.events(CheckFailed) if event.check == "row-pool-balances"] == [
        1,
        2,
    ]
    assert run.scheduler.flush()
    assert run.last.is_key and all(account.unaccounted == 0 for account in run.last.accounts)
    assert len(run.last.columns.rows) == 0


def test_more_slots_than_there_are_is_a_negative_remainder_never_clamped(a_run) -> None:
    run = a_run(page_size=1)
    run.ask(10, answer=50)
    run.step(3)
    run.memory.slots._ring._ids = np.concatenate((run.memory.slots._ring._ids, np.array([9, 9])))
    run.memory.slots._ring._capacity += 2
    run.memory.slots._ring._count += 2
    run.step(1)
    assert run.last.accounts[1].unaccounted == -2
    failed = {event.check: event.facts for event in run.events(CheckFailed)}
    assert failed["full-pool-balances"]["residual"] == -2


def test_lengths_that_contradict_each_other_are_told_once_for_each_row(a_run) -> None:
    run = a_run(slots=1024)
    reqs = [run.ask(10, answer=200), run.ask(9, answer=200), run.ask(9, answer=200)]
    run.step(3)
    for req in reqs[:2]:
        req.kv.kv_committed_len += 3
    run.step(20)
    failed = [event for event in run.events(CheckFailed) if event.check == "committed-within-allocated"]
    assert sorted((event.row, event.request) for event in failed) == sorted(
        (req.kv.req_pool_idx, req.number) for req in reqs[:2]
    )


def test_lengths_that_stay_wrong_are_told_each_minute_and_anew_when_they_are_wrong_again(a_run) -> None:
    run = a_run()
    req = run.ask(10, answer=200)
    run.step(3)

    def told() -> int:
        return sum(event.check == "committed-within-allocated" for event in run.events(CheckFailed))

    req.kv.kv_committed_len += 3
    run.step(2)
    run.step(1, ms=59_000)
    assert told() == 1
    run.step(2, ms=1_000)
    assert told() == 2
    req.kv.kv_committed_len -= 3
    run.step(2)
    req.kv.kv_committed_len += 3
    run.step(2)
    assert told() == 3


def test_a_protected_length_off_its_page_border_is_told(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=50)
    run.step(3)
    req.kv.cache_protected_len -= 1
    run.step(1)
    failed = [event for event in run.events(CheckFailed) if event.check == "protected-page-aligned"]
    assert [(event.row, event.protected_tokens) for event in failed] == [(req.kv.req_pool_idx, 7)]


def test_a_failing_check_is_published_before_its_caller_goes_on(a_run) -> None:
    run = a_run()
    run.ask(10, answer=50)
    run.step(2)
    before = len(run.payloads)
    run.memory.contracts.require(CHECKS.locks_balance, False, hint="told first")
    assert len(run.payloads) == before + 1
    assert [event.hint for event in run.last.events if isinstance(event, CheckFailed)] == ["told first"]


# -- the census -------------------------------------------------------------------------------------------------------


def test_a_census_partitions_the_whole_pool(a_run) -> None:
    run = a_run(page_size=4)
    run.ask(10, answer=3)
    run.ask(50, answer=60)
    run.until_idle()
    run.ask(9, answer=60)
    run.step(3)
    run.heartbeat(6000)
    census = run.events(CensusTaken)[-1]
    assert census.owners[0].start == 4
    assert all(one.end == two.start for one, two in zip(census.owners, census.owners[1:], strict=False))
    by_state = {}
    for owner in census.owners:
        by_state[owner.state] = by_state.get(owner.state, 0) + owner.end - owner.start
    full = run.last.accounts[1]
    assert by_state == {"free": full.free, "tree": full.evictable + full.protected, "row": full.private}
    assert census.unowned == census.held_and_free == census.held_twice == census.duplicate_free == []


def test_a_census_names_slots_that_are_held_and_free_held_twice_and_free_twice(a_run) -> None:
    run = a_run(page_size=1)
    one, two = run.ask(10, answer=50), run.ask(7, answer=50)
    run.step(4)
    table = run.memory.rows.req_to_token
    shared = int(table[one.kv.req_pool_idx, one.kv.kv_allocated_len - 1])
    table[two.kv.req_pool_idx, two.kv.kv_allocated_len - 1] = shared
    run.memory.slots._ring._ids[run.memory.slots._ring._head] = shared
    run.memory.slots._ring._ids[run.memory.slots._ring._head + 1] = shared
    run.probe._take_census(run.scheduler.view)
    (census,) = [event for event in run.probe._events if isinstance(event, CensusTaken)]
    assert [(part.start, part.end) for part in census.held_twice] == [(shared, shared + 1)]
    assert [(part.start, part.end) for part in census.held_and_free] == [(shared, shared + 1)]
    assert [(part.start, part.end) for part in census.duplicate_free] == [(shared, shared + 1)]
    failed = [event for event in run.probe._events if isinstance(event, CheckFailed)]
    assert [(event.check, event.facts) for event in failed] == [("no-held-slot-is-free", {"slots": 2})]


def test_slots_of_a_row_that_was_returned_are_still_mapped_to_its_last_tenant(a_run) -> None:
    run = a_run(page_size=4)
    req = run.ask(10, answer=50)
    run.step(3)
    row = req.kv.req_pool_idx
    run.memory.slots.free = run.memory.slots.free_segment = lambda *_: None
    run.memory.slots.free_segments = lambda *_: None
    run.scheduler.abort(req.rid)
    run.step(1)
    census = run.events(CensusTaken)[-1]
    assert census.unowned and {(part.row, part.request) for part in census.unowned} == {(row, req.number)}
    assert isinstance(census.unowned[0], SlotRange)


# -- frames as bytes --------------------------------------------------------------------------------------------------


def test_a_frame_comes_back_as_it_was(a_run) -> None:
    run = a_run()
    run.ask(40, answer=4)
    run.until_idle()
    assert [encode(frame) for frame in run.frames] == run.payloads


def test_events_and_fields_of_a_newer_writer_are_skipped(a_run) -> None:
    import msgspec

    run = a_run()
    run.ask(6, answer=4)
    run.step(1)
    fields = msgspec.msgpack.decode(run.payloads[0])
    events = fields[11]
    fields[11] = [["ThingNobodyKnows", 1, 2], *[[*event, "more"] for event in events]]
    fields.append("a field of the future")
    assert decode(msgspec.msgpack.encode(fields)) == run.frames[0]


@pytest.mark.parametrize("payload", [b"", b"\x00", b"\x93\x01\x02\x03", b"no frame at all"])
def test_what_is_no_frame_is_refused(payload: bytes) -> None:
    with pytest.raises(FrameError, match="is no frame"):
        decode(payload)
