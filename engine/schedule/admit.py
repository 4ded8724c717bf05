"""Which requests are prefilled next, and how much of each."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.engine.contracts import CHECKS

if TYPE_CHECKING:
    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.record import Req
    from kvlens.engine.schedule.batch import RunningBatch


@dataclass(frozen=True, slots=True)
class Limits:
    """What one step may take on. Sizes are tokens."""

    max_running: int
    chunked_prefill_size: int
    """New prompt tokens per step; a longer prompt is computed in chunks of it."""
    clip_new_tokens: int = 1024
    """No more of a request's future is reserved than this."""


class Admission:
    """First come, first served. Nothing is admitted that does not fit beside what runs.

    A part of the tokens that running requests may still produce is reserved. The part shrinks while no request has to
    be retracted, and grows when one was: most answers end before their limit.
    """

    RESERVE_MOST, RESERVE_LEAST, RESERVE_DECAY, RESERVE_PENALTY = 0.7, 0.1, 0.002, 0.2

    def __init__(self, memory: KvMemory, limits: Limits) -> None:
        self._memory = memory
        self._limits = limits
        self._reserve = self.RESERVE_MOST

    def decoded(self) -> None:
        """A decode step went by without a retraction."""
        self._reserve = max(self.RESERVE_LEAST, self._reserve - self.RESERVE_DECAY)

    def retracted(self) -> None:
        """A request had to be sent back: too much was admitted."""
        self._reserve = min(1.0, self._reserve + self.RESERVE_PENALTY)

    def compose(self, waiting: deque[Req], chunked: Req | None, running: RunningBatch) -> tuple[list[Req], Req | None]:
        """Requests to prefill now, taken off `waiting` and locked; and the one that is cut short, if any.

        The one between two chunks comes first. At most one request of a batch is truncated.
        """
        budget = self._limits.chunked_prefill_size
        admitted: list[Req] = []
        truncated: Req | None = None
        if chunked is not None:
            if not self._fits(self._pages(chunked, min(budget, self._left(chunked)))):
                return [], None
            truncated = self._cut(chunked, budget)
            admitted.append(chunked)
            budget -= chunked.extend_end - chunked.extend_start
        taken = sum(self._pages(req, req.extend_end - req.extend_start) for req in admitted)
        reserved = sum(self._future(req) for req in running.reqs)
        while waiting and budget > 0 and truncated is None and self._has_row(admitted, chunked, running):
            req = waiting[0]
            alone = not admitted and not running
            if not self._take(req, budget, taken, reserved, alone):
                break
            waiting.popleft()
            truncated = self._cut(req, budget)
            admitted.append(req)
            budget -= req.extend_end - req.extend_start
            taken += self._pages(req, req.extend_end - req.extend_start)
            reserved += self._future(req)
        cut = sum(req.extend_end < req.seq_len for req in admitted)
        self._memory.contracts.require(
            CHECKS.one_chunked_request,
            cut <= 1,
            hint="the batch runs; the second one will be taken for complete",
            facts={"truncated": cut},
        )
        return admitted, truncated

    def _has_row(self, admitted: list[Req], chunked: Req | None, running: RunningBatch) -> bool:
        fresh = len(admitted) - (chunked is not None)
        in_use = len(running) + len(admitted)
        return fresh < self._memory.rows.available_size() and in_use < self._limits.max_running

    def _take(self, req: Req, budget: int, taken: int, reserved: int, alone: bool) -> bool:
        """Match and lock the prefix of a waiting request, if what is left of it fits; otherwise leave it as it was."""
        cache = self._memory.cache
        match = cache.match_prefix(req.tokens[: req.seq_len - 1], req.namespace)
        cache.inc_lock_ref(match.last_node)  # before counting: what it locks is not evictable for itself
        req.prefix_indices, req.last_node = match.indices, match.last_node
        req.extend_start = len(match.indices)
        new = min(budget, self._left(req))
        needs = taken + self._pages(req, new)
        future = 0 if alone else int((reserved + self._future(req)) * self._reserve)
        if self._fits(needs + future) and self._chunk_end(req, new) > req.extend_start:
            return True
        cache.dec_lock_ref(match.last_node)
        req.restart()
        return False

    def _fits(self, tokens: int) -> bool:
        return tokens <= self._memory.slots.available_size() + self._memory.cache.evictable_size()

    def _left(self, req: Req) -> int:
        return req.seq_len - len(req.prefix_indices)

    def _pages(self, req: Req, new: int) -> int:
        """Slots of the whole pages that `new` more tokens open."""
        ceil, start = self._memory.cache.ceil, len(req.prefix_indices)
        return ceil(start + new) - ceil(start)

    def _future(self, req: Req) -> int:
        left = req.sampling.max_new_tokens - len(req.output_ids)
        return min(left, self._limits.clip_new_tokens)

    def _chunk_end(self, req: Req, new: int) -> int:
        """Where a prefill of `new` tokens ends; a chunk ends on a page, so that the cache can keep all of it."""
        end = len(req.prefix_indices) + new
        return end if end == req.seq_len else self._memory.cache.floor(end)

    def _cut(self, req: Req, budget: int) -> Req | None:
        """Set what the next prefill computes; the request itself when that is not all of it."""
        req.extend_start = len(req.prefix_indices)
        req.extend_end = self._chunk_end(req, min(budget, self._left(req)))
        return req if req.extend_end < req.seq_len else None
