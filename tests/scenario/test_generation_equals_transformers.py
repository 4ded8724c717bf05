"""Greedy answers equal those of `transformers`, token for token, whatever the engine does with the KV meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.record import SamplingParams

VOCABULARY, ANSWER = 96, 24


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    torch.manual_seed(11)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            intermediate_size=64, max_position_embeddings=256, eos_token_id=None, bos_token_id=None,
        )
    )  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.4)
    model.save_pretrained(directory)
    letters = {chr(0x4E00 + token): token for token in range(VOCABULARY)}
    Tokenizer(models.WordLevel(letters, unk_token=next(iter(letters)))).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def reference(checkpoint: Path):
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()

    def answer(prompt: list[int], tokens: int = ANSWER) -> list[int]:
        with torch.no_grad():
            out = model.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=tokens, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        return out[0, len(prompt) :].tolist()

    return answer


def prompts(count: int, length: int, shared: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count * 1000 + length)
    start = torch.randint(1, VOCABULARY, (shared,), generator=generator).tolist()
    return [
        start + torch.randint(1, VOCABULARY, (length + 3 * number - shared,), generator=generator).tolist()
        for number in range(count)
    ]


def run(engine: Engine, asked: list[list[int]], tokens: int = ANSWER) -> list[list[int]]:
    for number, prompt in enumerate(asked):
        engine.submit(f"r{number}", prompt, SamplingParams(max_new_tokens=tokens, ignore_eos=True))
    answers: dict[str, list[int]] = {f"r{number}": [] for number in range(len(asked))}
    while not engine.is_idle:
        for output in engine.step():
            answers[output.rid] += output.token_ids
            assert output.finish is None or output.finish.kind == "length"
    slots, cache = engine.memory.slots, engine.memory.cache
    assert slots.available_size() + cache.evictable_size() == slots.size
    return list(answers.values())


@pytest.fixture(params=[1, 16], ids=["page 1", "page 16"])
def page_size(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.mark.parametrize("cache", ["radix", "chunk"])
def test_alone_and_in_a_batch(checkpoint: Path, reference, page_size: int, cache: str) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), page_size=page_size, pool_slots=1024, cache=cache))
    asked = prompts(5, 20)
    assert run(engine, asked[:1]) == [reference(asked[0])]
    assert run(engine, asked) == [reference(prompt) for prompt in asked]


def test_with_prefix_hits(checkpoint: Path, reference, page_size: int) -> None:
    engine = Engine(EngineConfig(model=str(checkpoint), page_size=page_size, pool_slots=1024))
    asked = prompts(4, 70, shared=50)
    expected = [reference(prompt) for prompt in asked]
    assert run(engine, asked[:1]) == expected[:1]
    hits: list[int] = []
    engine.submit("again", asked[1], SamplingParams(max_new_tokens=1))
    while not engine.is_idle:
        hits += [output.cached_tokens for output in engine.step()]
    assert hits == [engine.memory.cache.floor(50)]
    assert run(engine, asked) == expected


def test_with_chunked_prefill(checkpoint: Path, reference, page_size: int) -> None:
    config = EngineConfig(model=str(checkpoint), page_size=page_size, pool_slots=1024, chunked_prefill_size=32)
    asked = prompts(3, 100)
    assert run(Engine(config), asked) == [reference(prompt) for prompt in asked]


def test_after_retractions(checkpoint: Path, reference, page_size: int) -> None:
    config = EngineConfig(model=str(checkpoint), page_size=page_size, pool_slots=176, max_running=8)
    engine = Engine(config)
    engine.scheduler.admission.RESERVE_MOST = engine.scheduler.admission.RESERVE_LEAST = 0.0
    engine.scheduler.admission._reserve = 0.0  # admit as if nobody would go on, so that somebody has to give way
    asked = prompts(6, 24)
    requests = []
    add = engine.scheduler.add
    engine.scheduler.add = lambda req: (requests.append(req), add(req))[1]
    assert run(engine, asked, 48) == [reference(prompt, 48) for prompt in asked]
    assert sum(req.retractions for req in requests) > 0
