"""The bundled model is what its card says."""

from __future__ import annotations

import hashlib
import math
import re
from pathlib import Path

import pytest
import torch

from kvlens.engine.engine import Engine, EngineConfig
from kvlens.engine.model.config import resolve_model
from kvlens.engine.model.load import load_model
from kvlens.engine.model.tokenizer import Tokenizer
from kvlens.engine.record import SamplingParams

DIRECTORY = resolve_model("builtin")
CARD = (DIRECTORY / "README.md").read_text()
HELD_OUT = (Path(__file__).parents[3] / "data" / "held_out.txt").read_text(encoding="utf-8")


def test_the_weights_are_those_of_the_card() -> None:
    digest = hashlib.sha256((DIRECTORY / "model.safetensors").read_bytes()).hexdigest()
    assert f"`{digest}`" in CARD


def test_the_greedy_continuation_of_a_fixed_prompt() -> None:
    engine = Engine(EngineConfig(pool_slots=256))
    prompt = engine.tokenizer.encode("It is a truth universally acknowledged, that")
    engine.submit("r", prompt, SamplingParams(max_new_tokens=24))
    ids: list[int] = []
    while not engine.is_idle:
        ids += [token for output in engine.step() for token in output.token_ids]
    assert engine.tokenizer.decode(ids) == (
        " it is not a sad change of mind which I have been used to think of. I have been too much in"
    )


def test_held_out_loss_is_that_of_the_card() -> None:
    stated = float(re.search(r"([0-9.]+) bits per byte", CARD)[1])
    tokenizer = Tokenizer(DIRECTORY)
    model = load_model(DIRECTORY, torch.float32, torch.device("cpu"))
    ids = torch.tensor(tokenizer.encode(HELD_OUT))
    nats, count = 0.0, 0
    with torch.inference_mode():
        for start in range(0, len(ids) - 1024, 1024):
            piece = ids[start : start + 1024]
            logits = model.logits(model.hidden(piece, torch.arange(1024), plain_attention))
            nats += torch.nn.functional.cross_entropy(logits[:-1], piece[1:], reduction="sum").item()
            count += 1023
    bits = nats / count / math.log(2) * len(ids) / len(HELD_OUT.encode())
    assert bits == pytest.approx(stated, abs=0.02)


def plain_attention(layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention without a pool."""
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).reshape(len(query), -1)
