"""On a GPU, as `make gpu-check` runs it: the same answers, the same accounts."""

from __future__ import annotations

import pytest
import torch

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.record import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
PROMPTS = ["It is a truth universally acknowledged, that", "Emma Woodhouse, " * 20, "Sir Walter"]


def answers(engine: Engine, rounds: int = 2) -> list[list[int]]:
    """Greedy answers, the second round with prefix hits."""
    got: dict[str, list[int]] = {}
    for round_ in range(rounds):
        for number, prompt in enumerate(PROMPTS):
            engine.submit(f"{round_}-{number}", engine.tokenizer.encode(prompt), SamplingParams(max_new_tokens=48))
        while not engine.is_idle:
            for output in engine.step():
                got.setdefault(output.rid, []).extend(output.token_ids)
    slots = engine.memory.slots
    assert slots.available_size() + engine.memory.cache.evictable_size() == slots.size
    return [got[rid] for rid in sorted(got)]


@pytest.mark.parametrize("page_size", [1, 16])
def test_greedy_answers_on_cuda_equal_those_on_the_cpu(page_size: int) -> None:
    settings = {"pool_slots": 1024, "page_size": page_size, "chunked_prefill_size": 64, "dtype": "float32"}
    on_cpu = answers(Engine(EngineConfig(**settings, device="cpu")))
    assert answers(Engine(EngineConfig(**settings, device="cuda"))) == on_cpu


def test_the_checkpoints_own_dtype_is_taken() -> None:
    engine = Engine(EngineConfig(pool_slots=1024, device="cuda"))
    assert engine.plan.dtype is torch.bfloat16
    assert all(len(answer) == 48 or answer[-1] in engine.tokenizer.eos_ids for answer in answers(engine))
