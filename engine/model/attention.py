"""Scaled-dot-product attention over paged KV: gathers the slots of each row, on CPU and CUDA alike."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from kvlens.engine.pools.kv import MHATokenToKVPool


class DecodeAttention:
    """One new token per row.

    slots int64 [B, longest]: slot of each position, anything beyond a row's length; lengths int64 [B], with the new
    token; out_slots int64 [B]: where the new keys and values go.
    """

    def __init__(self, pool: MHATokenToKVPool, slots: Tensor, lengths: Tensor, out_slots: Tensor) -> None:
        self._pool = pool
        self._slots = slots.reshape(-1)
        self._shape = slots.shape
        self._out_slots = out_slots
        longest = slots.shape[1]
        seen = torch.arange(longest, device=lengths.device) < lengths[:, None]
        self._mask = None if bool(seen.all()) else seen[:, None, None, :]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pool, (batch, longest) = self._pool, self._shape
        pool.set_kv_buffer(layer, self._out_slots, key, value)
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
        keys = pool.key(layer).index_select(0, self._slots).view(batch, longest, kv_heads, dim).transpose(1, 2)
        values = pool.value(layer).index_select(0, self._slots).view(batch, longest, kv_heads, dim).transpose(1, 2)
        # The query heads of one KV head stand where a sequence of queries would: no copy of keys per query head.
        grouped = query.view(batch, kv_heads, heads // kv_heads, dim)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=self._mask)
        return out.reshape(batch, heads * dim)


class PrefillAttention:
    """Several new tokens per row, after a prefix that is already in the pool.

    slots: per request int64 [prefix + new]; new: how many tokens of each are new; out_slots int64 [sum(new)].
    """

    def __init__(self, pool: MHATokenToKVPool, slots: list[Tensor], new: list[int], out_slots: Tensor) -> None:
        self._pool = pool
        self._slots = slots
        self._new = new
        self._out_slots = out_slots
        self._masks = [self._mask(len(held), count, out_slots.device) for held, count in zip(slots, new, strict=True)]

    @staticmethod
    def _mask(length: int, new: int, device: torch.device) -> Tensor | None:
        if new == length:
            return None
        places = torch.arange(length, device=device)
        return places <= places[length - new :, None]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self._pool.set_kv_buffer(layer, self._out_slots, key, value)
        keys, values = self._pool.key(layer), self._pool.value(layer)
        parts: list[Tensor] = []
        for q, held, mask in zip(torch.split(query, self._new), self._slots, self._masks, strict=True):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                keys.index_select(0, held).transpose(0, 1)[None],
                values.index_select(0, held).transpose(0, 1)[None],
                attn_mask=mask,
                is_causal=mask is None,
                enable_gqa=True,
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts).reshape(len(query), -1)
