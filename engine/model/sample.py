"""Choosing the next token. A draw depends on the request and its position alone, never on who shares the batch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from kvlens.engine.record import SamplingParams

_GREEDY_BELOW = 1e-5


def sample(
    logits: Tensor, params: Sequence[SamplingParams], numbers: Sequence[int], positions: Sequence[int]
) -> Tensor:
    """logits float32 [B, vocabulary] to token ids int64 [B].

    numbers: the request's running number, which stands in for a seed; positions: where the new token will stand.
    """
    tokens = logits.argmax(dim=-1)
    drawn = [row for row, chosen in enumerate(params) if chosen.temperature >= _GREEDY_BELOW]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        chosen = [params[row] for row in drawn]
        uniform = [draw(chosen.seed, numbers[row], positions[row]) for row, chosen in zip(drawn, chosen, strict=True)]
        tokens[index] = _draw(logits[index], chosen, uniform)
    return tokens


def draw(seed: int | None, number: int, position: int) -> float:
    """Uniform in [0, 1), the same for the same request and position: also after a retraction or in another batch."""
    source = f"{'seed' if seed is not None else 'request'} {seed if seed is not None else number} {position}"
    return int.from_bytes(blake2b(source.encode(), digest_size=6).digest(), "big") / (1 << 48)


def _draw(logits: Tensor, params: list[SamplingParams], uniform: list[float]) -> Tensor:
    """Inverse transform over the probabilities, most likely first; cut by top-k, then by top-p."""
    device, vocabulary = logits.device, logits.shape[1]
    temperature = torch.tensor([chosen.temperature for chosen in params], device=device)[:, None]
    probabilities, order = (logits / temperature).softmax(dim=-1).sort(dim=-1, descending=True)
    top_k = torch.tensor([chosen.top_k or vocabulary for chosen in params], device=device)[:, None]
    probabilities = probabilities.masked_fill(torch.arange(vocabulary, device=device) >= top_k, 0.0)
    probabilities = probabilities / probabilities.sum(dim=-1, keepdim=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([chosen.top_p for chosen in params], device=device)[:, None]
    cut = before >= top_p  # the token that crosses top_p stays
    cut[:, 0] = False  # and the likeliest one, however small top_p is
    kept = probabilities.masked_fill(cut, 0.0)
    reached = kept.cumsum(dim=-1)
    target = torch.tensor(uniform, device=device)[:, None] * reached[:, -1:]
    place = torch.searchsorted(reached, target, right=True).clamp(max=vocabulary - 1)
    last = (kept > 0).sum(dim=-1, keepdim=True) - 1  # rounding must not reach a token that was cut
    return order.gather(1, torch.minimum(place, last))[:, 0]
