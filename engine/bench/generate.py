"""Generation against `transformers` on the same weights, in turns, in one process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.record import SamplingParams

PROMPT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


def bench_generate(
    model: Path,
    batches: Sequence[int] = (1, 8, 64),
    new_tokens: int = 64,
    rounds: int = 5,
    device: str = "cpu",
) -> list[dict[str, Any]]:
    """Greedy tokens per second of both, and their ratio, as medians over `rounds` alternating runs.

    The dtype is the engine's own on that device. Raises ImportError without `transformers`.
    """
    from transformers import AutoModelForCausalLM

    config = EngineConfig(
        model=str(model),
        pool_slots=max(batches) * 256,
        max_running=max(batches),
        chunked_prefill_size=8192,
        device=device,
    )
    engine = Engine(config)
    torch.set_num_threads(engine.plan.threads)
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=engine.plan.dtype).to(engine.plan.device).eval()
    results = []
    for batch in batches:
        ours, theirs = [], []
        for round_ in range(rounds + 1):  # the first warms both up
            # Another beginning each round: neither side may answer from what it has kept.
            prompts = [engine.tokenizer.encode(f"{round_} {number} {PROMPT}")[:24] for number in range(batch)]
            ours.append(_ours(engine, prompts, new_tokens))
            theirs.append(_theirs(reference, prompts, new_tokens))
        tokens = batch * new_tokens
        mine, other = (tokens / statistics.median(times[1:]) for times in (ours, theirs))
        results.append(
            {
                "batch": batch, "kvlens_tokens_per_second": mine, "transformers_tokens_per_second": other,
                "ratio": statistics.median(t / o for o, t in zip(ours[1:], theirs[1:], strict=True)),
            }
        )  # fmt: skip
    return results


def _ours(engine: Engine, prompts: list[list[int]], new_tokens: int) -> float:
    begun = time.perf_counter()
    for number, prompt in enumerate(prompts):
        engine.submit(f"r{number}", prompt, SamplingParams(max_new_tokens=new_tokens, ignore_eos=True))
    while not engine.is_idle:
        engine.step()
    return time.perf_counter() - begun


def _theirs(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    ids = torch.tensor(prompts, device=model.device)
    begun = time.perf_counter()
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
    return time.perf_counter() - begun
