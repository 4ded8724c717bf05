"""KV buffers: shape, size, and that a write lands where it was sent."""

from __future__ import annotations

import pytest
import torch

from kvlens.engine.pools.kv import MHATokenToKVPool


def a_pool() -> MHATokenToKVPool:
    return MHATokenToKVPool(64, 4, layers=2, kv_heads=2, head_dim=16, dtype=torch.float32, device=torch.device("cpu"))


def test_a_token_takes_512_bytes_and_the_pool_has_a_dummy_page() -> None:
    pool = a_pool()
    assert pool.bytes_per_token == 512
    assert pool.key(0).shape == pool.value(1).shape == (68, 2, 16)


def test_keys_and_values_of_one_layer_are_written_and_no_other() -> None:
    pool = a_pool()
    key, value = torch.rand(3, 2, 16), torch.rand(3, 2, 16)
    pool.set_kv_buffer(1, torch.tensor([5, 60, 7]), key, value)
    assert torch.equal(pool.key(1)[[5, 60, 7]], key) and torch.equal(pool.value(1)[[5, 60, 7]], value)
    assert not pool.key(0).any() and int((pool.key(1) != 0).any(-1).any(-1).sum()) == 3


def test_a_slot_out_of_range_is_noticed() -> None:
    with pytest.raises(IndexError):
        a_pool().set_kv_buffer(0, torch.tensor([68]), torch.rand(1, 2, 16), torch.rand(1, 2, 16))
