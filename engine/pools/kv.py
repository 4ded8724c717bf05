"""The buffers that hold keys and values, slot by slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


class MHATokenToKVPool:
    """Per layer a key and a value tensor [size + page_size, kv_heads, head_dim]; page 0 absorbs padded writes."""

    def __init__(
        self,
        size: int,
        page_size: int,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots = size + page_size
        self.layers = layers
        self.bytes_per_token = 2 * layers * kv_heads * head_dim * dtype.itemsize
        # Zeros, so that a masked read of a slot nobody wrote is a number and not NaN.
        self._buffer = torch.zeros((layers, 2, self.slots, kv_heads, head_dim), dtype=dtype, device=device)
        self._keys = [self._buffer[layer, 0] for layer in range(layers)]
        self._values = [self._buffer[layer, 1] for layer in range(layers)]

    def key(self, layer: int) -> Tensor:
        """[size + page_size, kv_heads, head_dim]"""
        return self._keys[layer]

    def value(self, layer: int) -> Tensor:
        """[size + page_size, kv_heads, head_dim]"""
        return self._values[layer]

    def set_kv_buffer(self, layer: int, loc: Tensor, k: Tensor, v: Tensor) -> None:
        """Write k, v [N, kv_heads, head_dim] to slots `loc` int64 [N]. Raises IndexError for a slot out of range."""
        self._keys[layer].index_copy_(0, loc, k)
        self._values[layer].index_copy_(0, loc, v)
