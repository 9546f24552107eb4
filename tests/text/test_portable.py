"""Our own tokenizers in a file of the tokenizers library: it gives the same ids, framed and not."""

import re
import sys

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sublayer.errors import InputError
from sublayer.text import Bytes, Characters, Tokenizer, Words, load_tokenizer, train_bpe
from sublayer.text.counted import WORD
from sublayer.text.portable import portable
from tests.text.strings import HARD, PARTS, mixed

SPACES = " \t\n\r\x1c\x1f\x85\u00a0\u1680\u2028\u3000"
CORPUS = [*HARD, *PARTS, "def word(s):\n    return  s\n" * 3, f"a_1{SPACES}é2² Ⅷ", "don't stop, e\u0301 \u0ba4\u0bc1"]
OURS: dict[str, Tokenizer] = {
    "bytes": Bytes(("<|end|>", "<|other|>")),
    "bytes, endless": Bytes(),
    "characters": Characters.train(CORPUS, end="<|end|>"),
    "characters, unknown": Characters.train(["abc de"], end="<|end|>", unknown="<|?|>"),
    "words": Words.train(CORPUS * 2, 60),
    "words, endless": Words.train(CORPUS * 2, 60, end=None),
    "bpe": train_bpe(CORPUS * 3, 300, specials=("<|im_start|>",)),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> dict[str, tokenizers.Tokenizer]:
    """Each as the library reads it."""
    found = {}
    for name, tokenizer in OURS.items():
        folder = tmp_path_factory.mktemp("tokenizer")
        portable(tokenizer).save(folder)
        found[name] = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        found[name].encode_special_tokens = True  # what a text says is text
    return found


@pytest.mark.parametrize("name", OURS)
@given(texts=st.lists(st.one_of(st.text(), mixed, st.text(SPACES + "ab_é2'."), st.sampled_from(CORPUS)), max_size=8))
def test_the_ids_are_the_same(name: str, texts: list[str], files) -> None:
    ours, theirs = OURS[name], files[name]
    for text in texts:
        try:
            wanted = ours.encode(text, framed=True)
        except InputError:  # of a character that was not counted
            with pytest.raises(Exception, match="UNK"):
                theirs.encode(text)
        else:
            assert theirs.encode(text).ids == wanted, ascii(text)


@pytest.mark.parametrize("name", OURS)
def test_it_is_read_back_with_the_same_end_and_decodes_the_same(name: str, tmp_path) -> None:
    ours = OURS[name]
    portable(ours).save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.size, again.eos) == (ours.size, ours.eos)
    ids = ours.encode("abc de", framed=True)
    assert again.encode("abc de", framed=True) == ids
    if getattr(ours, "unknown", None) is None:  # which reads as U+FFFD here, and there as nothing
        assert again.decode(ids) == ours.decode(ids)


def test_words_are_cut_at_the_same_places_whatever_the_script(files) -> None:
    """Between letters, spaces and signs, the characters at which a class of them begins or ends: the regex engines'
    own tables differ in some."""
    every = [chr(code) for code in range(sys.maxunicode + 1) if not 0xD800 <= code < 0xE000]
    kinds = [2 * char.isspace() + (char.isalnum() or char == "_") for char in every]
    edges = {i + shift for i in range(1, len(every)) if kinds[i] != kinds[i - 1] for shift in (-1, 0)}
    assert len(edges) > 2000
    text = "".join(f"a{c}b {c} {c}{c}.\n" for c in (every[i] for i in sorted(edges)))
    cut = files["words"].pre_tokenizer
    assert [piece for piece, _ in cut.pre_tokenize_str(text)] == WORD.findall(text)


def test_a_special_token_that_is_a_unit_too_is_refused() -> None:
    with pytest.raises(InputError, match=re.escape("the special token '?' is one of the tokenizer's characters too")):
        portable(Characters("ab?", "<|end|>", "?"))


def test_what_other_libraries_read_already_is_left_as_it_is() -> None:
    assert portable(OURS["bpe"]) is OURS["bpe"]
