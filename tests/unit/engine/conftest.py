"""Builders for the engine's tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.allocate import alloc_for_decode, alloc_for_extend
from kvlens.engine.memory.memory import KvMemory, build_memory
from kvlens.engine.probe import AnyEvent, NullProbe
from kvlens.engine.record import Req


class Recording(NullProbe):
    """Keeps every event."""

    def __init__(self) -> None:
        self.events: list[AnyEvent] = []

    def emit(self, event: AnyEvent) -> None:
        self.events.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


class Bench:
    """Memory with its probe, and what an engine would do with it."""

    def __init__(self, memory: KvMemory, probe: Recording) -> None:
        self.memory, self.probe = memory, probe
        self._numbers = 0

    def a_request(self, tokens: list[int], match: bool = True) -> Req:
        self._numbers += 1
        req = Req(self._numbers, f"r{self._numbers}", list(tokens))
        if match:
            found = self.memory.cache.match_prefix(tokens[:-1])
            self.memory.cache.inc_lock_ref(found.last_node)
            req.prefix_indices, req.last_node = found.indices, found.last_node
        return req

    def extend(self, *reqs: Req, to: int | None = None) -> np.ndarray:
        for req in reqs:
            req.extend_start = len(req.prefix_indices)
            req.extend_end = to or len(req.prompt_ids)
        return alloc_for_extend(self.memory, reqs)[0]

    def prefill(self, tokens: list[int], to: int | None = None, match: bool = True) -> Req:
        """A request whose prompt (or its first `to` tokens) is computed and kept."""
        req = self.a_request(tokens, match)
        self.extend(req, to=to)
        self.memory.cache.cache_unfinished_req(req)
        return req

    def decode(self, req: Req, *tokens: int) -> None:
        for token in tokens:
            alloc_for_decode(self.memory, np.array([req.kv.req_pool_idx], np.int64))
            req.output_ids.append(token)

    def lengths(self, req: Req) -> tuple[int | None, int, int, int]:
        """row, P, C, A"""
        kv = req.kv
        return kv.req_pool_idx, kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len

    def account(self) -> tuple[int, int, int]:
        """available, evictable, protected"""
        cache = self.memory.cache
        return self.memory.slots.available_size(), cache.evictable_size(), cache.protected_size()


@pytest.fixture
def a_bench() -> Callable[..., Bench]:
    """`a_bench(slots=64, page_size=1, ...)`"""

    def build(
        slots: int = 64,
        page_size: int = 1,
        rows: int = 4,
        cache: str = "radix",
        mode: Mode = Mode.STRICT,
        width: int = 128,
    ) -> Bench:
        probe = Recording()
        memory = build_memory(
            rows=rows, width=width, slots=slots, page_size=page_size, cache=cache, contracts=Contracts(mode, probe),
            probe=probe,
        )  # fmt: skip
        return Bench(memory, probe)

    return build
