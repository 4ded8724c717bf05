"""What a step hands to the model."""

from __future__ import annotations

from kvlens.engine.schedule.batch import RunningBatch


def test_a_decode_batch_has_one_token_per_request_at_its_next_position(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    for prompt in (3, 5):
        scheduler.add(a_request(prompt, answer=9))
    scheduler.step()
    scheduler.step()
    batch = scheduler.runner.batches[-1]
    assert batch.is_decode
    assert batch.token_ids.tolist() == [103, 205]
    assert batch.positions.tolist() == [3, 5]
    assert batch.seq_lens.tolist() == [4, 6]
    table = scheduler.memory.rows.req_to_token
    assert batch.out_slots.tolist() == [table[row, at] for row, at in zip(batch.rows, batch.positions, strict=True)]


def test_a_prefill_batch_concatenates_what_each_request_computes(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request([7, 8, 9]))
    scheduler.add(a_request([5, 6]))
    scheduler.step()
    batch = scheduler.runner.batches[-1]
    assert not batch.is_decode
    assert batch.token_ids.tolist() == [7, 8, 9, 5, 6]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1]
    assert batch.numbers == [1, 2]


def test_the_arrays_are_rebuilt_only_when_the_composition_changes(a_scheduler, a_request) -> None:
    scheduler = a_scheduler()
    scheduler.add(a_request(3, answer=9))
    scheduler.step()
    rows, changes = scheduler.running.rows, scheduler.running.changes
    scheduler.step()
    assert scheduler.running.rows is rows
    assert scheduler.running.changes == changes


def test_removing_nobody_is_no_change() -> None:
    batch = RunningBatch()
    changes = batch.changes
    batch.remove([])
    assert batch.changes == changes
