"""Sampling: greedy is greedy, limits hold, and a draw is the request's own."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from kvlens.engine.model.sample import draw, sample
from kvlens.engine.record import SamplingParams

LOGITS = torch.tensor([[0.0, 2.0, 1.0, -1.0, 1.5]])


def draws(params: SamplingParams, count: int = 2000) -> Counter[int]:
    tokens = sample(LOGITS.repeat(count, 1), [params] * count, [1] * count, list(range(count)))
    return Counter(tokens.tolist())


def test_temperature_zero_takes_the_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=0.0))) == {1}


def test_frequencies_follow_the_probabilities() -> None:
    got = draws(SamplingParams(temperature=1.0), 20_000)
    expected = LOGITS[0].softmax(-1)
    for token, probability in enumerate(expected.tolist()):
        assert got[token] / 20_000 == pytest.approx(probability, abs=0.015)


def test_a_lower_temperature_is_sharper() -> None:
    assert draws(SamplingParams(temperature=0.3))[1] > draws(SamplingParams(temperature=1.5))[1]


def test_top_k_leaves_the_k_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=2.0, top_k=2))) == {1, 4}
    assert set(draws(SamplingParams(temperature=2.0, top_k=0))) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    probabilities = LOGITS[0].softmax(-1).sort(descending=True).values.cumsum(-1).tolist()
    assert set(draws(SamplingParams(temperature=1.0, top_p=probabilities[0] - 0.01))) == {1}
    assert set(draws(SamplingParams(temperature=1.0, top_p=probabilities[0] + 0.01))) == {1, 4}


def test_a_top_p_too_small_for_a_float_leaves_the_likeliest() -> None:
    assert set(draws(SamplingParams(temperature=1.0, top_p=1e-300), 50)) == {1}


def test_a_draw_depends_on_seed_or_number_and_position_alone() -> None:
    seeded, free = SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=1.0)
    greedy = SamplingParams()
    logits = LOGITS.repeat(4, 1)
    crowd = sample(logits, [greedy, seeded, free, seeded], [9, 5, 6, 7], [10, 20, 30, 20]).tolist()
    assert crowd[0] == 1 and crowd[1] == crowd[3]
    assert sample(LOGITS, [seeded], [99], [20]).tolist() == [crowd[1]]
    assert sample(LOGITS, [free], [6], [30]).tolist() == [crowd[2]]
    assert len({draw(None, 1, 1), draw(1, 1, 1), draw(None, 2, 1), draw(None, 1, 2)}) == 4
    assert all(0 <= draw(None, number, 5) < 1 for number in range(200))
