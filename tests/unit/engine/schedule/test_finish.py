"""When a request has said enough, and which reason wins."""

from __future__ import annotations

import pytest

from kvlens.engine.record import Req, SamplingParams
from kvlens.engine.schedule.finish import FinishRules

END = 0


class Letters:
    """Token 1 is a, 2 is b, ..."""

    def decode(self, ids) -> str:
        return "".join(chr(96 + token) for token in ids)


def told(tokens, **sampling):
    """Push tokens one by one; (tokens taken, reason) at the first reason, or (all, None)."""
    rules = FinishRules(Letters(), {END})
    req = Req(1, "r1", [5], SamplingParams(**{"max_new_tokens": 99, **sampling}))
    for token in tokens:
        req.output_ids.append(token)
        reason = rules.reason(req)
        if reason is not None:
            return len(req.output_ids), (reason.kind, reason.matched)
    return len(req.output_ids), None


@pytest.mark.parametrize(
    ("tokens", "sampling", "expected"),
    [
        ([1, 2, 3], {"max_new_tokens": 2}, (2, ("length", None))),
        ([1, END, 3], {}, (2, ("stop", END))),
        ([1, END, 3], {"ignore_eos": True}, (3, None)),
        ([1, 2, 3], {"stop_token_ids": (2,)}, (2, ("stop", 2))),
        ([1, END, 3], {"stop_token_ids": (END,), "ignore_eos": True}, (2, ("stop", END))),
        ([1, 2, 3, 4], {"stop": ("bc",)}, (3, ("stop", "bc"))),
        ([1, 2, 4, 3], {"stop": ("bc",)}, (4, None)),
        ([1, 2, 3], {"stop": ("bc",), "max_new_tokens": 3}, (3, ("stop", "bc"))),
        ([1, END], {"max_new_tokens": 2}, (2, ("stop", END))),
    ],
    ids=[
        "length", "end token", "ignored end token", "stop token", "an ignored end token that is a stop token",
        "stop string across tokens", "interrupted stop string", "a stop string wins over length",
        "the end token wins over length",
    ],
)  # fmt: skip
def test_the_reason_is(tokens, sampling, expected) -> None:
    assert told(tokens, **sampling) == expected


def test_the_text_of_an_ended_request_is_forgotten() -> None:
    rules = FinishRules(Letters(), ())
    req = Req(1, "r1", [5], SamplingParams(stop=("xyz",)), output_ids=[1])
    rules.reason(req)
    rules.forget(req)
    assert rules._texts == {}
