"""The decoder, from token ids to logits. Attention is handed in: it alone knows where keys and values live."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kvlens.engine.model.config import ModelConfig


class Attention(Protocol):
    """Attends over what the engine holds of each request."""

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [N, heads, head_dim], key and value [N, kv_heads, head_dim]; returns [N, heads * head_dim]."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one block; products are [out, in]."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class LlamaModel:
    """A Llama- or Qwen-style decoder."""

    def __init__(self, config: ModelConfig, embedding: Tensor, layers: list[Layer], norm: Tensor, head: Tensor) -> None:
        self.config = config
        self._embedding = embedding
        self._layers = layers
        self._norm = norm
        self._head = head
        self._cos, self._sin = rotary_table(config, embedding.device, embedding.dtype)

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    def hidden(self, token_ids: Tensor, positions: Tensor, attend: Attention) -> Tensor:
        """token_ids, positions int64 [N]; returns the last hidden states [N, hidden]."""
        shape, eps = (self.config.hidden_size,), self.config.rms_norm_eps
        cos, sin = self._cos[positions, None], self._sin[positions, None]
        x = F.embedding(token_ids, self._embedding)
        for number, layer in enumerate(self._layers):
            h = F.rms_norm(x, shape, layer.input_norm, eps)
            h = self._attention(number, layer, h, cos, sin, attend)
            x = x + h
            h = F.rms_norm(x, shape, layer.mlp_norm, eps)
            gate, up = F.linear(h, layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.rms_norm(x, shape, self._norm, eps)

    def _attention(self, number: int, layer: Layer, h: Tensor, cos: Tensor, sin: Tensor, attend: Attention) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.heads, config.kv_heads, config.head_dim
        qkv = F.linear(h, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, dim)
        rotated, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if layer.query_norm is not None and layer.key_norm is not None:
            query = F.rms_norm(rotated[:, :heads], (dim,), layer.query_norm, config.rms_norm_eps)
            key = F.rms_norm(rotated[:, heads:], (dim,), layer.key_norm, config.rms_norm_eps)
            rotated = torch.cat((query, key), 1)
        rotated = rotate(rotated, cos, sin)
        out = attend(number, rotated[:, :heads], rotated[:, heads:], value)
        return F.linear(out, layer.output, layer.output_bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [B, hidden] to float32 [B, vocabulary]."""
        return F.linear(hidden, self._head).float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, halves of the head paired: x [N, heads, dim], cos and sin [N, 1, dim / 2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotary_table(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, [context_length, head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = _scaled(1.0 / config.rope_theta**exponents, config)
    angles = torch.outer(torch.arange(config.context_length, dtype=torch.float32), frequencies)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _scaled(frequencies: Tensor, config: ModelConfig) -> Tensor:
    scaling = config.rope_scaling
    if not scaling:
        return frequencies
    factor = float(scaling["factor"])
    if scaling["rope_type"] == "linear":
        return frequencies / factor
    # Llama 3: long wavelengths are stretched, short ones kept, those between blended by how often they turn.
    original = float(scaling["original_max_position_embeddings"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies / factor * (1 - blend) + frequencies * blend
