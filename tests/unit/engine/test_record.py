"""The record answers what is held; nothing else does."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from kvlens.engine.record import ReqKvInfo

ROOT = Path(__file__).parents[3]


def test_a_fresh_record_holds_nothing_and_is_released() -> None:
    record = ReqKvInfo()
    assert (record.holds_kv, record.is_kv_released) == (False, True)
    assert (record.cache_protected_len, record.kv_committed_len, record.kv_allocated_len) == (0, 0, 0)


def test_a_bound_record_is_a_view_of_its_column_and_keeps_its_lengths_when_unbound() -> None:
    table = np.zeros((4, 3), np.int32)
    record = ReqKvInfo()
    record.kv_committed_len = 5
    record.bind(2, 7, table)
    record.kv_allocated_len = 9
    assert table[:, 2].tolist() == [0, 5, 9, 0]
    table[1, 2] += 1
    assert (record.kv_committed_len, record.generation, record.holds_kv) == (6, 7, True)
    record.unbind()
    assert not table.any()
    assert (record.kv_committed_len, record.kv_allocated_len, record.holds_kv) == (6, 9, False)


def test_marking_released_clears_what_is_allocated_and_keeps_what_was_committed() -> None:
    record = ReqKvInfo()
    record.kv_committed_len = record.kv_allocated_len = 12
    record.swa_evicted_seqlen = 3
    assert not record.is_kv_released
    record.mark_kv_released()
    assert record.is_kv_released and record.kv_committed_len == 12


@pytest.mark.parametrize("row", [0, -1])
def test_a_row_that_cannot_be_held_is_refused(row: int) -> None:
    with pytest.raises(ValueError, match="rows start at 1"):
        ReqKvInfo().req_pool_idx = row


def test_presence_is_asked_nowhere_but_through_the_record() -> None:
    """`req_pool_idx is None` and `kv_committed_len > 0` are how engines have come to free what they did not hold."""
    bypass = re.compile(r"req_pool_idx is (not )?None|kv_committed_len\s*(>|!=|==)\s*0|if [\w.]*kv_committed_len:")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for folder in ("engine", "observer", "cli")
        for path in (ROOT / folder).rglob("*.py")
        if path.name != "record.py"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if bypass.search(line)
    ]
    assert found == []
