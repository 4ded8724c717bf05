"""The engine as a probe sees it."""

from __future__ import annotations

from kvlens.engine.record import ALLOCATED, Phase


def test_holders_are_those_of_the_batch_and_the_one_between_chunks(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(chunk=8)
    scheduler.add(a_request(4, answer=9))
    scheduler.add(a_request(20))
    scheduler.add(a_request(5))
    scheduler.step()
    held = scheduler.view.holders()
    assert held.requests.tolist() == [1, 2]
    assert held.phases.tolist() == [Phase.RUNNING, Phase.CHUNKED]
    assert scheduler.view.lengths[ALLOCATED, held.rows].tolist() == [4, 4]
    assert scheduler.view.tenants[held.rows].tolist() == [1, 2]
    assert scheduler.view.waiting == 1


def test_a_steady_decode_step_asks_nobody_for_its_row_again(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(4, answer=9))
    scheduler.step()
    held = scheduler.view.holders()
    scheduler.step()
    assert scheduler.view.holders() is held


def test_holders_follow_a_change_of_the_batch(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(4, answer=9))
    scheduler.step()
    scheduler.add(a_request(4, answer=9))
    scheduler.step()
    scheduler.step()
    assert scheduler.view.holders().requests.tolist() == [1, 2]


def test_a_request_that_fell_out_of_every_queue_is_no_holder(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(4, answer=9))
    scheduler.step()
    scheduler.running.remove(scheduler.running.reqs)  # lost, and not released
    view = scheduler.view
    assert len(view.holders().rows) == 0
    assert view.row_size - view.free_row_count == 1


def test_queued_names_every_live_request(a_scheduler, a_request) -> None:
    scheduler = a_scheduler(rows=1)
    for _ in range(2):
        scheduler.add(a_request(4, answer=9))
    scheduler.step()
    assert list(scheduler.view.queued) == [(1, "r1", None), (2, "r2", None)]


def test_the_row_of_a_holder_shows_its_slots(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(4, answer=9))
    scheduler.step()
    view = scheduler.view
    (row,) = view.holders().rows.tolist()
    assert sorted(view.row_slots(row)[:4].tolist()) == sorted(view.pools[0].tree_slots().tolist())
    assert row not in view.free_rows()
