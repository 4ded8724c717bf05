"""The one way out: every request gives its KV back here, whatever ended it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvlens.engine.contracts import CHECKS
from kvlens.engine.probe import KvReleased

if TYPE_CHECKING:
    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req


def release_kv_cache(req: Req, memory: KvMemory, *, is_insert: bool = True) -> None:
    """Give back everything a request holds: prefix unlocked, body kept by the cache or freed, tail freed, row freed.

    | positions      | goes to                                                        |
    |----------------|----------------------------------------------------------------|
    | [0, P)         | stays the cache's, one lock less                               |
    | [P, ceil(C))   | the cache's hook: inserted (`is_insert`), or freed             |
    | [ceil(C), A)   | freed here, by whole pages: no page twice, none left out       |

    `is_insert` False is for KV that is wanted back at once, or was not computed to its end. Afterwards the record holds
    no row, A is 0, and C still says how far the request got.

    Raises KvContractError (strict) before anything is touched when the record is not held, or its lengths contradict
    each other. In report mode a record that holds nothing is left alone; one that contradicts itself loses its lock and
    its claim (a row it still had is then found as an orphan); and lengths are brought into order.
    """
    started_ns = time.monotonic_ns()
    record, contracts = req.kv, memory.contracts
    if not contracts.require(
        CHECKS.held_xor_released,
        record.holds_kv != record.is_kv_released,
        record=record,
        request=req.number,
        hint="what it says it holds cannot be told; nothing is freed",
    ):
        memory.cache.dec_lock_ref(req.last_node)
        req.last_node = None
        record.disown()
        record.mark_kv_released()
        return
    if not contracts.require(
        CHECKS.free_needs_held_row,
        record.holds_kv,
        record=record,
        request=req.number,
        hint="a request is released once per tenancy; nothing is freed",
    ):
        return
    protected, committed, allocated = record.cache_protected_len, record.kv_committed_len, record.kv_allocated_len
    contracts.require(
        CHECKS.committed_within_allocated,
        protected <= committed == allocated,
        record=record,
        request=req.number,
        hint="the release goes by what is allocated",
        facts={"protected": protected, "committed": committed, "allocated": allocated},
    )
    end = min(max(committed, protected), allocated)
    row, generation = record.held_row, record.generation
    parts = memory.cache.cache_finished_req(req, is_insert=is_insert, kv_len_to_handle=end)
    tail = memory.cache.ceil(end)
    if tail < allocated:
        memory.slots.free_segment(memory.rows.req_to_token[row, tail:allocated].astype("int64"), tail)
    memory.rows.free(record, req.number)
    record.mark_kv_released()
    memory.probe.emit(
        KvReleased(
            started_ns=started_ns,
            at_ns=time.monotonic_ns(),
            request=req.number,
            row=row,
            generation=generation,
            protected_tokens=protected,
            allocated_tokens=allocated,
            inserted_tokens=parts.inserted,
            duplicate_tokens=parts.duplicate,
            body_tokens=parts.body,
            tail_tokens=memory.cache.ceil(allocated) - tail,
        )
    )
