"""Who gives way, and when somebody has to."""

from __future__ import annotations

import pytest

from kvlens.engine.memory.allocate import decode_needs
from kvlens.engine.record import FinishReason, Req
from kvlens.engine.schedule.retract import fits_decode, next_victim


def a_victim(number: int, outputs: int) -> Req:
    return Req(number, f"r{number}", [1], output_ids=[1] * outputs)


def test_the_one_with_the_fewest_tokens_gives_way() -> None:
    reqs = [a_victim(1, 5), a_victim(2, 3), a_victim(3, 4)]
    assert next_victim(reqs).number == 2


def test_among_equals_the_last_to_come_gives_way() -> None:
    assert next_victim([a_victim(1, 3), a_victim(2, 3)]).number == 2


def test_one_that_is_to_end_anyway_gives_way_first() -> None:
    reqs = [a_victim(1, 9), a_victim(2, 1)]
    reqs[0].to_finish = FinishReason("abort")
    assert next_victim(reqs).number == 1


@pytest.mark.parametrize(("spare", "fits"), [(8, True), (4, False)])
def test_only_requests_on_a_page_boundary_need_a_page(a_scheduler, a_request, spare, fits) -> None:
    scheduler = a_scheduler(page_size=4, slots=64)
    for prompt in (8, 9, 12):
        scheduler.add(a_request(prompt, answer=9))
    scheduler.step()
    memory, rows = scheduler.memory, scheduler.running.rows
    memory.slots.alloc(memory.slots.available_size() - spare)
    assert decode_needs(memory, rows) == 8
    assert fits_decode(memory, rows) is fits
