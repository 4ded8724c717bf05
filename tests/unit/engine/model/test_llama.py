"""Logits equal an independent implementation's, however the KV is paged, split and batched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlens.engine.contracts import Contracts
from kvlens.engine.model.forward import ForwardBatch
from kvlens.engine.model.load import load_model
from kvlens.engine.model.runner import ModelRunner
from kvlens.engine.pools.kv import MHATokenToKVPool
from kvlens.engine.pools.rows import ReqToTokenPool
from kvlens.engine.probe import NullProbe
from kvlens.engine.record import SamplingParams


class Bench:
    """A runner over a pool whose slots are handed out in a scrambled order."""

    def __init__(self, directory: Path) -> None:
        self.model = load_model(directory, torch.float32, torch.device("cpu"))
        shape = self.model.config
        self.rows = ReqToTokenPool(4, 128, contracts=Contracts(), probe=NullProbe())
        pool = MHATokenToKVPool(
            256, 1, layers=shape.layers, kv_heads=shape.kv_heads, head_dim=shape.head_dim,
            dtype=torch.float32, device=torch.device("cpu"),
        )  # fmt: skip
        self.runner = ModelRunner(self.model, pool, self.rows)
        self.free = list(np.random.default_rng(3).permutation(np.arange(1, 257)))
        self.held = {1: 0, 2: 0, 3: 0}

    def run(self, work: dict[int, list[int]], decode: bool = False) -> torch.Tensor:
        rows = np.array(list(work), np.int64)
        prefix = np.array([self.held[row] for row in work], np.int64)
        seq = prefix + np.array([len(ids) for ids in work.values()])
        slots = []
        for row, ids in work.items():
            own = np.array([self.free.pop() for _ in ids], np.int64)
            self.rows.write(row, self.held[row], own)
            self.held[row] += len(ids)
            slots.append(own)
        positions = np.concatenate([np.arange(start, end) for start, end in zip(prefix, seq, strict=True)])
        tokens = np.concatenate([np.array(ids, np.int64) for ids in work.values()])
        return self.runner.logits(
            ForwardBatch(
                tokens, positions, np.concatenate(slots), rows, prefix, seq, decode,
                [SamplingParams()] * len(work), list(work),
            )
        )  # fmt: skip


@pytest.fixture
def bench(checkpoint: Path) -> Bench:
    return Bench(checkpoint)


def reference(checkpoint: Path, ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1]


ONE = [3, 17, 42, 8, 9, 60, 61, 2, 90, 33, 5, 5, 12]
TWO = [7, 7, 19, 80]


def test_a_whole_prompt(bench: Bench, checkpoint: Path) -> None:
    assert torch.allclose(bench.run({1: ONE})[0], reference(checkpoint, ONE), atol=1e-4)


def test_a_prompt_in_chunks_beside_another_prompt(bench: Bench, checkpoint: Path) -> None:
    bench.run({1: ONE[:5]})
    logits = bench.run({1: ONE[5:], 2: TWO})
    assert torch.allclose(logits[0], reference(checkpoint, ONE), atol=1e-4)
    assert torch.allclose(logits[1], reference(checkpoint, TWO), atol=1e-4)


def test_decode_of_rows_of_different_length(bench: Bench, checkpoint: Path) -> None:
    bench.run({1: ONE, 2: TWO})
    logits = bench.run({2: [11], 1: [29]}, decode=True)
    assert torch.allclose(logits[0], reference(checkpoint, [*TWO, 11]), atol=1e-4)
    assert torch.allclose(logits[1], reference(checkpoint, [*ONE, 29]), atol=1e-4)


def test_decode_of_one_row(bench: Bench, checkpoint: Path) -> None:
    bench.run({3: TWO})
    assert torch.allclose(bench.run({3: [1]}, decode=True)[0], reference(checkpoint, [*TWO, 1]), atol=1e-4)
