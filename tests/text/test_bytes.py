import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublayer.errors import InputError
from sublayer.text import Bytes, load_tokenizer

SPECIAL = Bytes(specials=("<|end|>", "<|user|>"))
texts = st.text()  # hypothesis leaves lone surrogates out, as UTF-8 does
all_ids = st.lists(st.integers(0, SPECIAL.size - 1))


@given(texts)
@example("   leading spaces")
@example("hello !  x != y\r\n")
@example("naïve 日本語 👩‍👩‍👧 \x00")
@example("\ufeffa BOM inside a text is the text's own: readers drop the one of a file")
@example("hi<|end|>\n<|user|>")
def test_decode_gives_back_what_was_encoded(text: str) -> None:
    ids = SPECIAL.encode(text)
    assert SPECIAL.decode(ids) == text
    assert bytes(ids) == text.encode()


def test_special_names_in_text_are_text() -> None:
    assert not set(SPECIAL.encode("<|end|><|user|>")) & {256, 257}


def test_specials_have_ids_of_their_own() -> None:
    assert (Bytes().size, Bytes().eos) == (256, ())
    assert (SPECIAL.size, SPECIAL.eos) == (258, (256,))
    assert SPECIAL.decode([104, 256, 105, 257]) == "hi"


@given(st.lists(st.integers(0, 255)))
def test_bytes_that_are_not_utf8_are_replaced_as_python_replaces_them(ids: list[int]) -> None:
    assert Bytes().decode(ids) == bytes(ids).decode(errors="replace")


@given(all_ids)
def test_a_stream_gives_what_decode_gives(ids: list[int]) -> None:
    stream = SPECIAL.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join(pieces) + stream.finish() == SPECIAL.decode(ids)


def test_a_stream_waits_for_whole_characters() -> None:
    stream = SPECIAL.stream()
    assert [stream.push(token) for token in "a€𝄞".encode()] == ["a", "", "", "€", "", "", "", "𝄞"]
    assert stream.finish() == ""


def test_a_stream_gives_up_a_character_that_ends_early() -> None:
    stream = SPECIAL.stream()
    first, second, third = "€".encode()
    assert [stream.push(token) for token in (first, second, 256, third)] == ["", "", "\ufffd", "\ufffd"]
    assert [stream.push(first), stream.finish(), stream.push(97)] == ["", "\ufffd", "a"]


def test_strict_decoding_refuses_bytes_that_are_not_utf8() -> None:
    assert Bytes().decode([226, 130, 172], errors="strict") == "€"
    with pytest.raises(InputError, match="not UTF-8"):
        Bytes().decode([226, 130], errors="strict")
    with pytest.raises(InputError, match="not UTF-8"):
        Bytes().decode([97, 255], errors="strict")


def test_a_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(InputError, match=r"character 2 .* U\+D83D, a lone"):
        Bytes().encode("ab\ud83d")


@pytest.mark.parametrize("token", [-1, 258, 1000])
def test_ids_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(InputError, match=f"token id {token} .* 0 to 257"):
        SPECIAL.decode([104, token])
    with pytest.raises(InputError, match=f"token id {token} "):
        SPECIAL.stream().push(token)


def test_it_is_saved_and_loaded(tmp_path) -> None:
    tokenizer = Bytes(specials=("<|fin ✓|>",))
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path) == tokenizer
    assert [path.name for path in tmp_path.iterdir()] == ["tokenizer.json"]


def test_unknown_keys_and_wrong_values_are_refused() -> None:
    with pytest.raises(InputError, match="Bytes.special: unknown key .*'specials'"):
        Bytes.from_json({"type": "Bytes", "special": []})
    with pytest.raises(InputError, match="Bytes.specials: expected a list of strings"):
        Bytes.from_json({"type": "Bytes", "specials": "<|end|>"})
    assert Bytes.from_json(json.loads('{"type": "Bytes"}')) == Bytes()


def test_a_framed_text_begins_as_documents_do_in_training() -> None:
    assert Bytes(("<|end|>",)).encode("ab", framed=True) == [256, 97, 98]
    assert Bytes().encode("ab", framed=True) == [97, 98]
