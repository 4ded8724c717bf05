"""Text grows with its tokens: never half a character, never past a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from kvlens.engine.model.text import TextStream


class Bytes:
    """A tokenizer whose tokens are bytes: every character beyond ASCII takes several."""

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")


def stream(text: str, stop: Sequence[str] = (), step: int = 1) -> tuple[list[str], TextStream]:
    """What each push of `step` tokens brought, and what the end did."""
    ids = list(text.encode())
    growing = TextStream(Bytes(), stop)
    parts = [growing.push(ids[at : at + step]) for at in range(0, len(ids), step)]
    return [*parts, growing.finish()], growing


def test_a_character_comes_whole() -> None:
    parts, _ = stream("aé€🙂b")
    assert parts == ["a", "", "é", "", "", "€", "", "", "", "🙂", "b", ""]


def test_bytes_that_never_become_a_character_are_not_waited_for_for_ever() -> None:
    growing = TextStream(Bytes())
    assert growing.push([0xF0]) == ""
    assert growing.push([0x9F, 0x99]) == ""
    assert growing.finish() == "\ufffd"


@given(st.text(max_size=40), st.integers(1, 5))
def test_all_text_comes_exactly_once(text: str, step: int) -> None:
    parts, _ = stream(text, step=step)
    assert "".join(parts) == text


def test_text_ends_before_a_stop_string_that_crosses_tokens() -> None:
    parts, growing = stream("hello STOP and more", ["STOP"])
    assert "".join(parts) == "hello " and growing.matched == "STOP"
    assert growing.push([65]) == "" and growing.finish() == ""


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    parts, growing = stream("a ST b", ["STOP"])
    assert parts == ["a", " ", "", "", "ST ", "b", ""] and growing.matched is None


def test_what_was_held_back_comes_at_the_end() -> None:
    parts, growing = stream("a STO", ["STOP"])
    assert parts[-1] == "STO" and growing.matched is None


def test_of_several_stop_strings_the_first_in_the_text_counts() -> None:
    parts, growing = stream("one two three", ["three", "two"])
    assert "".join(parts) == "one " and growing.matched == "two"


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_a_stop_string_is_found_wherever_tokens_end(text: str, stop: list[str], step: int) -> None:
    parts, growing = stream(text, stop, step)
    expected, matched = text, False
    for end in [*range(step, len(text), step), len(text)]:  # what is known after each push
        places = [place for one in stop if (place := text[:end].find(one)) >= 0]
        if places:
            expected, matched = text[: min(places)], True
            break
    assert "".join(parts) == expected
    assert (growing.matched is not None) == matched
