"""The scheduler: what runs next, step by step, on one thread."""

from __future__ import annotations

import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlens.engine.memory.allocate import alloc_for_decode, alloc_for_extend
from kvlens.engine.memory.memory import KvOutOfMemory
from kvlens.engine.memory.release import release_kv_cache
from kvlens.engine.probe import (
    AbortRequested,
    CacheFlushed,
    ChunkComputed,
    DecodeStepped,
    FirstToken,
    RequestFinished,
    RequestQueued,
    RequestRetracted,
    RequestScheduled,
    RowSet,
)
from kvlens.engine.record import FinishReason, Phase, Req
from kvlens.engine.schedule.admit import Admission, Limits
from kvlens.engine.schedule.batch import RunningBatch, prefill_batch
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.retract import fits_decode, next_victim
from kvlens.engine.schedule.view import SchedulerView

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvlens.engine.memory.memory import KvMemory
    from kvlens.engine.model.forward import Runner
    from kvlens.engine.probe import Probe


@dataclass(frozen=True, slots=True)
class Output:
    """What a step brought one request: new token ids, and why it ended if it did."""

    rid: str
    token_ids: tuple[int, ...]
    finish: FinishReason | None
    prompt_tokens: int
    cached_tokens: int


class Scheduler:
    """Continuous batching with chunked prefill and retraction.

    A request is in exactly one place: `waiting`, `chunked` (between two chunks of its prompt), or `running`. Everything
    here runs on the thread that calls `step`; `between` is called once more while a step's results are not applied yet,
    so that an abort that came during the forward pass costs no further step.
    """

    def __init__(
        self,
        memory: KvMemory,
        runner: Runner,
        limits: Limits,
        finish_rules: FinishRules,
        *,
        bytes_per_slot: int = 0,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self.memory = memory
        self.runner = runner
        self.probe: Probe = memory.probe
        self.admission = Admission(memory, limits)
        self.finish_rules = finish_rules
        self.release: Callable[..., None] = self._release
        self.waiting: deque[Req] = deque()
        self.chunked: Req | None = None
        self.running = RunningBatch()
        self.live: dict[str, Req] = {}
        self.steps = 0
        self.mode = "idle"
        self._between = between
        self._prefilled_last = False
        self._outputs: list[Output] = []
        self.view = SchedulerView(self, bytes_per_slot)

    # -- the outside ------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """Nobody is here, and every end has been told."""
        return not self.live and not self._outputs

    def add(self, req: Req) -> None:
        """Queue a request."""
        self.live[req.rid] = req
        self.waiting.append(req)
        self.probe.emit(
            RequestQueued(
                time.monotonic_ns(), req.number, req.rid, req.trace, len(req.prompt_ids), req.sampling.max_new_tokens
            )
        )

    def abort(self, rid: str | None = None, message: str = "aborted on request") -> int:
        """End one request, or with None every one; returns how many. Those that hold KV end with the next results."""
        found = [req for req in self.live.values() if (rid is None or req.rid == rid) and req.to_finish is None]
        for req in found:
            req.to_finish = FinishReason("abort", message=message, status=499)
            self.probe.emit(AbortRequested(time.monotonic_ns(), req.number, req.phase.name.lower()))
            if req.phase is Phase.WAITING:
                self.waiting.remove(req)
                self._finish(req, req.to_finish)
        return len(found)

    def flush(self) -> bool:
        """Forget cache, rows and slots; False, and nothing changes, while a request is here."""
        if self.live:
            return False
        self.memory.clear()
        self.running = RunningBatch()
        self.view = SchedulerView(self, self.view.pools[0].bytes_per_slot)
        self.probe.emit(CacheFlushed(self.steps))
        self.mode = "idle"
        self.probe.step(self.view)
        return True

    def idle(self) -> None:
        """A heartbeat: nothing to do, and whoever watches sees that it is so."""
        self.mode = "idle"
        self.probe.step(self.view)

    def end_all(self, reason: FinishReason) -> list[Output]:
        """End everybody after a step that broke off, through the one way out; also what that step had brought by then.

        Who cannot be released keeps what it holds, and the balance shows it.
        """
        for req in list(self.live.values()):
            try:
                if req.kv.holds_kv:
                    self.release(req, is_insert=False)
                elif req.last_node is not None:  # locked by admission, and no row yet
                    self.memory.cache.dec_lock_ref(req.last_node)
            except Exception:
                traceback.print_exc()
            self._finish(req, reason)
        self.waiting.clear()
        self.chunked = None
        self.running.remove(self.running.reqs)
        outputs, self._outputs = self._outputs, []
        return outputs

    # -- one step ---------------------------------------------------------------------------------------------------

    def step(self) -> list[Output]:
        """Compute one batch, or nothing when there is none; what it brought each request."""
        self.steps += 1
        self.mode = "idle"
        self.process_pending_chunked_abort()
        if not (self._prefill() or self._decode()):
            self._refuse_what_never_fits()
        self.probe.step(self.view)
        outputs, self._outputs = self._outputs, []
        return outputs

    def process_pending_chunked_abort(self) -> None:
        """Give back what was cancelled between two chunks: it is in no batch whose results would end it."""
        req = self.chunked
        if req is not None and req.to_finish is not None:
            self.chunked = None
            self.release(req, is_insert=False)
            self._finish(req, req.to_finish)

    # -- prefill ----------------------------------------------------------------------------------------------------

    def _prefill(self) -> bool:
        # Prompts and answers take turns, so that a stream of long prompts does not stop everybody's text.
        if self._prefilled_last and len(self.running):
            return False
        reqs, truncated = self.admission.compose(self.waiting, self.chunked, self.running)
        if not reqs:
            return False
        try:
            slots, rows = alloc_for_extend(self.memory, reqs)
        except KvOutOfMemory:
            self._take_back(reqs)
            return False
        self.mode = "prefill"
        self._prefilled_last = True
        self._begin_prefill(reqs)
        started = time.monotonic_ns()
        tokens = self.runner.forward(prefill_batch(reqs, rows, slots))
        self._between()
        self._apply_prefill(reqs, truncated, tokens, started)
        return True

    def _begin_prefill(self, reqs: list[Req]) -> None:
        for req in reqs:
            if req.phase is Phase.WAITING:
                self._scheduled(req)
            self._set_phase(req, Phase.PREFILL)

    def _scheduled(self, req: Req) -> None:
        if req.retractions == 0:
            req.cached_tokens = req.extend_start
        self.probe.emit(
            RequestScheduled(
                time.monotonic_ns(), req.number, req.kv.req_pool_idx or 0, req.kv.generation,
                cached_tokens=req.extend_start, queried_tokens=req.seq_len - 1,
            )
        )  # fmt: skip

    def _apply_prefill(self, reqs: list[Req], truncated: Req | None, tokens: NDArray[np.int64], started: int) -> None:
        now = time.monotonic_ns()
        self.chunked = truncated
        staying: list[Req] = []
        for req, token in zip(reqs, tokens.tolist(), strict=True):
            whole = req is not truncated
            self.probe.emit(ChunkComputed(started, now, req.number, req.extend_start, req.extend_end, whole))
            if not whole:
                self.memory.cache.cache_unfinished_req(req)
                self._set_phase(req, Phase.CHUNKED)
            elif self._got_token(req, token, now):
                self.memory.cache.cache_unfinished_req(req)
                self._set_phase(req, Phase.RUNNING)
                staying.append(req)
        self.running.add(staying)

    def _take_back(self, reqs: Iterable[Req]) -> None:
        """Undo an admission whose allocation failed: those without a row go back to the head of the queue."""
        for req in reversed(list(reqs)):
            if req.kv.holds_kv:
                continue
            self.memory.cache.dec_lock_ref(req.last_node)
            req.restart()
            req.phase = Phase.WAITING
            self.waiting.appendleft(req)
            if req is self.chunked:
                self.chunked = None

    # -- decode -----------------------------------------------------------------------------------------------------

    def _decode(self) -> bool:
        self._prefilled_last = False
        self._make_room()
        running = self.running
        if not len(running):
            return False
        slots = alloc_for_decode(self.memory, running.rows)
        self.mode = "decode"
        self.probe.emit(DecodeStepped(time.monotonic_ns(), len(running), 1))
        tokens = self.runner.forward(running.forward_batch(self.memory, slots))
        self._between()
        now = time.monotonic_ns()
        ended = [
            req
            for req, token in zip(running.reqs, tokens.tolist(), strict=True)
            if not self._got_token(req, token, now)
        ]
        running.remove(ended)
        self.admission.decoded()
        return True

    def _make_room(self) -> None:
        """Retract until the next token of everybody left fits; the request between two chunks goes last."""
        while len(self.running) and not fits_decode(self.memory, self.running.rows):
            if len(self.running) > 1 or self.chunked is None:
                victim = next_victim(self.running.reqs)
                self.running.remove([victim])
            else:
                victim, self.chunked = self.chunked, None
            self._retract(victim)

    def _retract(self, req: Req) -> None:
        self.release(req, is_insert=False)
        if req.to_finish is not None:  # not worth a second prefill
            self._finish(req, req.to_finish)
            return
        req.reset_for_retract()
        self.admission.retracted()
        self.waiting.appendleft(req)
        self.probe.emit(RequestRetracted(time.monotonic_ns(), req.number, len(req.output_ids)))

    def _refuse_what_never_fits(self) -> None:
        """Nothing runs, and who is next cannot go on: it never will, so say so instead of waiting for ever."""
        if self.running.reqs or not (self.chunked or self.waiting):
            return
        if self.chunked is not None:
            req, self.chunked = self.chunked, None
            self.release(req, is_insert=False)
        else:
            req = self.waiting.popleft()
        left = self.memory.slots.available_size() + self.memory.cache.evictable_size()
        message = (
            f"the request needs {req.seq_len:,} slots and a row; the pool has {left:,} slots of "
            f"{self.memory.slots.size:,} and {self.memory.rows.available_size():,} rows left: KV has leaked, flush the "
            "cache or restart the engine"
        )
        self._finish(req, FinishReason("abort", message=message, status=503))

    # -- ends -------------------------------------------------------------------------------------------------------

    def _got_token(self, req: Req, token: int, now: int) -> bool:
        """Take one sampled token; True when the request goes on, otherwise it was released and finished."""
        if not req.output_ids:
            self.probe.emit(FirstToken(now, req.number))
        req.output_ids.append(token)
        reason = req.to_finish or self.finish_rules.reason(req)
        if reason is None:
            self._outputs.append(Output(req.rid, (token,), None, len(req.prompt_ids), req.cached_tokens))
            return True
        self.release(req, is_insert=True)
        self._finish(req, reason, (token,))
        return False

    def _release(self, req: Req, *, is_insert: bool) -> None:
        release_kv_cache(req, self.memory, is_insert=is_insert)

    def _finish(self, req: Req, reason: FinishReason, new: tuple[int, ...] = ()) -> None:
        """The request is gone; it holds nothing any more."""
        req.finish = reason
        req.phase = Phase.ABORTED if reason.is_abort else Phase.FINISHED
        del self.live[req.rid]
        self.finish_rules.forget(req)
        self._outputs.append(Output(req.rid, new, reason, len(req.prompt_ids), req.cached_tokens))
        self.probe.emit(
            RequestFinished(
                time.monotonic_ns(), req.number, reason.kind, len(req.output_ids), req.cached_tokens, req.retractions,
                reason.message,
            )
        )  # fmt: skip

    def _set_phase(self, req: Req, phase: Phase) -> None:
        req.phase = phase
        kv = req.kv
        self.probe.emit(
            RowSet(
                kv.req_pool_idx or 0, kv.generation, int(phase),
                kv.cache_protected_len, kv.kv_committed_len, kv.kv_allocated_len,
            )
        )  # fmt: skip
