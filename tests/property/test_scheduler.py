"""Law of the scheduler: whatever comes, is cancelled, evicted or retracted, each pool balances after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import numpy as np
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvlens.engine.contracts import Contracts, Mode
from kvlens.engine.memory.memory import KvMemory, build_memory
from kvlens.engine.model.forward import ForwardBatch
from kvlens.engine.probe import AbortRequested, Evicted, KvReleased, NodeSplit, NullProbe, RequestRetracted
from kvlens.engine.record import Phase as ReqPhase
from kvlens.engine.record import Req, SamplingParams
from kvlens.engine.schedule.admit import Limits
from kvlens.engine.schedule.finish import FinishRules
from kvlens.engine.schedule.scheduler import Scheduler

ROWS, WIDTH = 5, 96
SEEN: Counter[str] = Counter()


class Counting(NullProbe):
    """Counts what the run has to have seen, and adds up where each release put what it gave back."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def emit(self, event) -> None:
        match event:
            case Evicted(freed_tokens=freed) if freed:
                SEEN["eviction"] += 1
            case RequestRetracted():
                SEEN["retraction"] += 1
            case NodeSplit():
                SEEN["split"] += 1
            case AbortRequested(phase=phase):
                SEEN[f"abort {phase}"] += 1
            case KvReleased():
                parts = event.inserted_tokens + event.duplicate_tokens + event.body_tokens + event.tail_tokens
                assert event.protected_tokens + parts == -(-event.allocated_tokens // self.page_size) * self.page_size


class Fake:
    """A model whose KV is the token itself, so that a slot of somebody else's shows; calls back in mid-flight.

    The next token depends on request and position only.
    """

    during: Callable[[], None] | None = None

    def __init__(self, memory: KvMemory, live: Callable[[], Iterable[Req]]) -> None:
        self.kv = np.zeros(memory.slots.size + memory.page_size, np.int64)
        self.table = memory.rows.req_to_token
        self.live = live

    @staticmethod
    def answer(number: int, length: int) -> int:
        return (7 * number + length) % 3 + 1

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        self.kv[batch.out_slots] = batch.token_ids
        tokens = {req.number: req.tokens for req in self.live()}
        lengths = batch.seq_lens.tolist()
        for number, row, length in zip(batch.numbers, batch.rows, lengths, strict=True):
            assert self.kv[self.table[row, :length]].tolist() == tokens[number][:length]
        if self.during is not None:
            during, self.during = self.during, None
            during()
        assert len(set(batch.out_slots.tolist())) == len(batch.token_ids)
        return np.array([self.answer(number, length) for number, length in zip(batch.numbers, lengths, strict=True)])


class Engine(RuleBasedStateMachine):
    @initialize(
        page_size=st.sampled_from([1, 16]), slots=st.sampled_from([96, 128, 192]), chunk=st.sampled_from([16, 32]),
        cache=st.sampled_from(["radix", "radix", "radix", "chunk"]),
    )  # fmt: skip
    def build(self, page_size: int, slots: int, chunk: int, cache: str) -> None:
        probe = Counting(page_size)
        self.memory = build_memory(
            rows=ROWS, width=WIDTH, slots=slots, page_size=page_size, cache=cache,
            contracts=Contracts(Mode.STRICT, probe), probe=probe,
        )  # fmt: skip
        self.runner = Fake(self.memory, lambda: self.scheduler.live.values())
        self.scheduler = Scheduler(self.memory, self.runner, Limits(ROWS, chunk, 8), FinishRules(None, ()))
        self.asked: dict[str, Req] = {}
        self.answers: dict[str, list[int]] = {}
        self.number = 0
        self.ended: dict[str, int] = {}

    # -- what users do ----------------------------------------------------------------------------------------------

    @rule(
        prompts=st.lists(
            st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.integers(1, 12)), min_size=1, max_size=4
        ),
        answer=st.integers(1, 30),
    )
    def arrive(self, prompts: list[tuple[list[int], int]], answer: int) -> None:
        for pattern, times in prompts:
            self.number += 1
            prompt = (pattern * times)[: WIDTH - 31]
            sampling = SamplingParams(max_new_tokens=min(answer, WIDTH - len(prompt)))
            req = Req(self.number, f"r{self.number}", prompt, sampling)
            self.asked[req.rid], self.answers[req.rid] = req, []
            self.scheduler.add(req)

    @precondition(lambda self: self.scheduler.live)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.scheduler.live)))
        assert self.scheduler.abort(rid) <= 1

    @rule(first=st.integers(1, 3), steps=st.integers(4, 12))
    def cancel_between_chunks(self, first: int, steps: int) -> None:
        """Of a prompt longer than any chunk, so that this phase is not left to luck."""
        self.arrive([([first, 1, 2, 3, 2], 13)], 4)
        for _ in range(steps):
            self.step()
            if self.scheduler.chunked is not None:
                self.scheduler.abort(self.scheduler.chunked.rid)
                break

    @rule(first=st.integers(1, 3))
    def crowd(self, first: int) -> None:
        """More long answers than the pool holds: somebody has to give way."""
        self.arrive([([first + number, 1 + number], 6) for number in range(ROWS)], 30)

    @rule(length=st.integers(1, 12))
    def cancel_in_mid_flight(self, length: int) -> None:
        """Of those whose prompt is being computed right then; steps on until there is somebody."""
        self.arrive([([3, 1, 2], length)], 4)
        for _ in range(12):
            self.runner.during = self.cancel_one_in_prefill
            before = SEEN["abort prefill"]
            self.step()
            if SEEN["abort prefill"] > before:
                break
        self.runner.during = None

    def cancel_one_in_prefill(self) -> None:
        in_flight = [req.rid for req in self.scheduler.live.values() if req.phase is ReqPhase.PREFILL]
        for rid in in_flight[:1]:
            self.scheduler.abort(rid)

    @precondition(lambda self: len(self.scheduler.running))
    @rule(data=st.data())
    def cancel_running(self, data: st.DataObject) -> None:
        self.scheduler.abort(data.draw(st.sampled_from(self.scheduler.running.reqs)).rid)

    @rule()
    def flush(self) -> None:
        assert self.scheduler.flush() == (not self.scheduler.live)

    @rule()
    def step(self) -> None:
        SEEN["step"] += 1
        produced: Counter[str] = Counter()
        for output in self.scheduler.step():
            produced[output.rid] += len(output.token_ids)
            self.answers[output.rid] += output.token_ids
            if output.finish is not None:
                assert output.rid not in self.ended
                self.ended[output.rid] = 1
                self.check_answer(self.asked[output.rid])
        assert all(count == 1 for count in produced.values() if count)
        self.balance()

    @rule(steps=st.integers(2, 12))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    # -- what must hold ---------------------------------------------------------------------------------------------

    def balance(self) -> None:
        scheduler, memory = self.scheduler, self.memory
        rows, page = memory.rows, memory.page_size
        holders = scheduler.running.reqs + ([scheduler.chunked] if scheduler.chunked else [])
        owners = Counter(memory.slots.free_slots().tolist())
        owners.update(memory.cache.tree_slots().tolist())
        for req in holders:
            kv = req.kv
            assert 0 <= kv.cache_protected_len <= kv.kv_committed_len == kv.kv_allocated_len
            line = rows.req_to_token[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len].tolist()
            owners.update({slot // page * page + i for slot in line for i in range(page)})
        assert owners == Counter(range(page, page + memory.slots.size))
        assert Counter(rows.free_slots + [req.kv.req_pool_idx for req in holders]) == Counter(range(1, ROWS + 1))
        assert {req.rid for req in holders} | {req.rid for req in scheduler.waiting} == set(scheduler.live)
        assert not any(req.kv.holds_kv for req in scheduler.waiting)

    def check_answer(self, req: Req) -> None:
        """Whatever happened meanwhile, the answer is the one it would have got alone; cut short only by an abort."""
        start, got = len(req.prompt_ids), self.answers[req.rid]
        assert got == [self.runner.answer(req.number, start + at) for at in range(len(got))]
        assert req.finish is not None
        if req.finish.kind == "abort":
            assert req.finish.status == 499, req.finish.message  # asked for, never the engine's own doing
        else:
            assert len(got) == req.sampling.max_new_tokens

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for _ in range(3000):
            if self.scheduler.is_idle:
                break
            self.step()
        assert len(self.ended) == self.number
        assert self.memory.slots.available_size() + self.memory.cache.evictable_size() == self.memory.slots.size
        assert self.memory.cache.protected_size() == 0
        assert self.memory.rows.available_size() == ROWS


def test_pools_balance_after_every_step_and_the_run_saw_what_it_is_for() -> None:
    SEEN.clear()
    run_state_machine_as_test(
        Engine,
        settings=settings(
            max_examples=200, stateful_step_count=40, deadline=None, derandomize=True, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
    assert SEEN["step"] >= 2000, SEEN
    aborts = [f"abort {phase}" for phase in ("waiting", "chunked", "prefill", "running")]
    for needed in ("eviction", "retraction", "split", *aborts):
        assert SEEN[needed] >= 50, (needed, SEEN)
