"""Runs one batch through the model and samples its next tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from kvlens.engine.model.attention import DecodeAttention, PrefillAttention
from kvlens.engine.model.sample import sample

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from kvlens.engine.model.forward import ForwardBatch
    from kvlens.engine.model.llama import LlamaModel
    from kvlens.engine.pools.kv import MHATokenToKVPool
    from kvlens.engine.pools.rows import ReqToTokenPool


class ModelRunner:
    """A model, its KV buffers, and the table that says which slots a row has."""

    def __init__(self, model: LlamaModel, kv_pool: MHATokenToKVPool, rows: ReqToTokenPool) -> None:
        self._model = model
        self._pool = kv_pool
        self._rows = rows

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> NDArray[np.int64]:
        logits = self.logits(batch)
        tokens: NDArray[np.int64] = sample(logits, batch.sampling, batch.numbers, batch.seq_lens.tolist()).cpu().numpy()
        return tokens

    @torch.inference_mode()
    def logits(self, batch: ForwardBatch) -> Tensor:
        """Logits of the token after each request's last one, float32 [B, vocabulary]."""
        attend = self._decode_attention(batch) if batch.is_decode else self._prefill_attention(batch)
        hidden = self._model.hidden(self._device(batch.token_ids), self._device(batch.positions), attend)
        if not batch.is_decode:
            hidden = hidden[self._device((batch.seq_lens - batch.prefix_lens).cumsum() - 1)]
        return self._model.logits(hidden)

    def _decode_attention(self, batch: ForwardBatch) -> DecodeAttention:
        longest = int(batch.seq_lens.max())
        # int32 to int64 on the way: index_select wants no other type on every device.
        slots = self._device(self._rows.req_to_token[batch.rows, :longest].astype(np.int64))
        return DecodeAttention(self._pool, slots, self._device(batch.seq_lens), self._device(batch.out_slots))

    def _prefill_attention(self, batch: ForwardBatch) -> PrefillAttention:
        slots = [
            self._device(self._rows.req_to_token[row, :length].astype(np.int64))
            for row, length in zip(batch.rows.tolist(), batch.seq_lens.tolist(), strict=True)
        ]
        new = (batch.seq_lens - batch.prefix_lens).tolist()
        return PrefillAttention(self._pool, slots, new, self._device(batch.out_slots))

    def _device(self, values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(self._model.device)
