from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublayer.decoding.stop import GrowingText
from sublayer.text import Bytes


class Pieces:
    """A tokenizer, and its stream, whose ids number given pieces of text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self.pieces = pieces

    @property
    def size(self) -> int:
        return len(self.pieces)

    def stream(self) -> "Pieces":
        return self

    def push(self, token: int) -> str:
        return self.pieces[token]

    def finish(self) -> str:
        return ""


def growing(pieces: Sequence[str], stops: Sequence[str]) -> GrowingText:
    tokenizer: Any = Pieces(pieces)
    return GrowingText(tokenizer, stops)


def read(pieces: Sequence[str], stops: Sequence[str]) -> tuple[list[str], bool]:
    """What each piece makes certain, until a stop string is complete; then what the end brings."""
    text, released = growing(pieces, stops), []
    for token in range(len(pieces)):
        released.append(text.push(token))
        if text.stopped:
            break
    return [*released, text.finish()], text.stopped


def test_a_stop_string_is_found_across_tokens_and_cut_off() -> None:
    assert read(["one. ", "E", "N", "D two"], ["END"]) == (["one. ", "", "", "", ""], True)


def test_what_may_begin_a_stop_string_is_held_back_until_it_does_not() -> None:
    assert read(["a", "\n", "b"], ["\n\n"]) == (["a", "", "\nb", ""], False)


def test_what_was_held_back_comes_at_the_end() -> None:
    assert read(["a", "\n"], ["\n\n"]) == (["a", "", "\n"], False)


def test_a_held_back_end_may_itself_begin_again() -> None:
    assert read(["aa", "ab"], ["aab"]) == (["", "a", ""], True)


def test_of_two_stop_strings_the_one_complete_first_counts() -> None:
    for pieces in (["abcd"], ["a", "b", "c", "d"]):
        released, stopped = read(pieces, ["abcd", "bc"])
        assert ("".join(released), stopped) == ("a", True)
    assert read(["xabc"], ["bc", "abc"]) == (["x", ""], True)


def test_without_stop_strings_nothing_is_held_back() -> None:
    assert read(["a", "b"], []) == (["a", "b", ""], False)


def expected(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


letters = st.text("ab", min_size=1, max_size=4)


@given(st.lists(st.text("ab", max_size=5), max_size=10), st.lists(letters, max_size=3))
def test_the_text_does_not_depend_on_how_it_is_split(pieces, stops) -> None:
    released, stopped = read(pieces, stops)
    assert ("".join(released), stopped) == expected("".join(pieces), stops)


@given(st.lists(st.text("ab", max_size=5), max_size=10), st.lists(letters, max_size=3))
def test_nothing_that_may_still_be_cut_is_released_and_nothing_else_is_held(pieces, stops) -> None:
    text, seen, shown = growing(pieces, stops), "", ""
    for token, piece in enumerate(pieces):
        shown, seen = shown + text.push(token), seen + piece
        if text.stopped:
            return
        held = seen[len(shown) :]
        assert seen == shown + held
        longer = range(len(held) + 1, len(seen) + 1)
        assert not any(stop.startswith(seen[-size:]) for stop in stops for size in longer)
        assert not held or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("stops", [[], ["é!"]])
def test_characters_come_whole(stops) -> None:
    text = GrowingText(Bytes(), stops)
    assert [text.push(byte) for byte in "aé€".encode()] == [
        "a",
        "",
        "" if stops else "é",
        "",
        "",
        "é€" if stops else "€",
    ]
    assert text.push(0xE2) == ""
    assert text.finish() == "�"  # an incomplete character at the end


def test_ids_beyond_the_tokenizer_read_as_nothing() -> None:
    text = GrowingText(Bytes())  # ids 0 to 255
    assert [text.push(token) for token in (97, 256, 999, 98)] == ["a", "", "", "b"]


@pytest.mark.parametrize("before", [0xE2, 256, 999], ids=["half a character", "special", "unknown"])
def test_what_is_no_text_before_it_changes_nothing(before: int) -> None:
    text = GrowingText(Bytes(("<|end|>",)), before=before)
    assert [text.push(token) for token in b"a"] == ["a"]
    assert text.finish() == ""
