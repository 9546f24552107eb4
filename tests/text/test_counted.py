import json
import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublayer.errors import InputError, UsageError
from sublayer.text import Bytes, Characters, Tokenizer, Words, load_tokenizer

END = "<|endoftext|>"
VERSE = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n"
CHARACTERS = Characters.train([VERSE])
WORDS = Words.train([VERSE], 16)
A_WORD = re.compile(r" ?\w+| ?[^\w\s]|\s+(?!\S)|\s+")
KINDS = [Characters.train([VERSE], end=END), Characters.train([VERSE], end=END, unknown="<|unknown|>"), WORDS]


def test_characters_are_numbered_by_code_point() -> None:
    """As nanoGPT numbers those of its text: sorted(set(text))."""
    order = sorted(set(VERSE))
    assert CHARACTERS.units == "".join(order)
    assert CHARACTERS.encode(VERSE) == [order.index(character) for character in VERSE]
    assert (CHARACTERS.size, CHARACTERS.eos) == (len(order), ())
    assert Characters.train(iter([VERSE[:50], VERSE[50:]])) == CHARACTERS


def test_words_are_numbered_by_frequency_and_each_has_the_space_before_it() -> None:
    tokenizer = Words.train(["to be, or not to be\n\n  that to"], 9, unknown=None)
    counts = Counter(["to", " be", ",", " or", " not", " to", " be", "\n\n ", " that", " to"])
    assert tokenizer.units == tuple(sorted(counts, key=lambda word: (-counts[word], word)))
    assert tokenizer.units[:2] == (" be", " to")
    assert tokenizer.decode(tokenizer.encode("to be or not to be,")) == "to be or not to be,"
    assert tokenizer.encode(" to to") == [1, 1]


@given(st.text(st.characters(codec="utf-8"), max_size=60))
@example(" a  b\n\n  c_d9 don't x!=y \t\r\n")
def test_words_cover_any_text(text: str) -> None:
    found = set(A_WORD.findall(text or "x"))
    words = Words.train([text or "x"], 1 + len(found), end=None)
    assert set(words.units) == found
    assert words.decode(words.encode(text)) == text
    characters = Characters.train([text or "x"])
    assert characters.decode(characters.encode(text)) == text


@given(st.text("Fi rstCz:\n,hé€", max_size=40))
def test_what_is_unknown_is_lost_and_shown(text: str) -> None:
    tokenizer = KINDS[1]
    assert tokenizer.decode(tokenizer.encode(text)) == "".join(c if c in VERSE else "\ufffd" for c in text)
    assert tokenizer.encode_batch([text])[0].tolist() == tokenizer.encode(text)
    assert len(tokenizer.encode(text)) == len(text)
    words = A_WORD.findall(text)
    assert WORDS.decode(WORDS.encode(text)) == "".join(w if w in WORDS.units else "\ufffd" for w in words)


def test_the_unknown_has_an_id_but_no_bytes() -> None:
    assert WORDS.encode(" speak quietly") == [WORDS.units.index(" speak"), 14]
    assert (WORDS.unknown_id, WORDS.eos, WORDS.size) == (14, (15,), 16)
    assert (WORDS.token_bytes(14), WORDS.token_bytes(15), WORDS.token_bytes(0)) == (b"", b"", WORDS.units[0].encode())


@pytest.mark.parametrize("text", ["hé", "h\U0001f600", "hq"])
def test_without_an_id_for_the_unknown_it_is_refused_with_its_place(text) -> None:
    with pytest.raises(InputError, match=f"the character {text[1]!r} at character 1 of the text is none of the 30 "):
        CHARACTERS.encode(text)
    plain = Words(("to", " be"), unknown=None)
    with pytest.raises(InputError, match="the word ' not' at character 8 of the text is none of the 2 "):
        plain.encode("to be be not")
    with pytest.raises(InputError, match="the word ' not' at character 7"):
        Words(("to", " be"), end="||").encode("to be|| not", specials="special")


@pytest.mark.parametrize("tokenizer", KINDS)
def test_special_names_in_text_follow_the_policy(tokenizer: Tokenizer) -> None:
    eos = tokenizer.eos[0]
    text = f"speak{END}hear"
    if isinstance(tokenizer, Characters) and tokenizer.unknown is None:
        with pytest.raises(InputError, match="the character '<' at character 5"):
            tokenizer.encode(text)
    else:
        assert eos not in tokenizer.encode(text)
    with_special = [*tokenizer.encode("speak"), eos, *tokenizer.encode("hear")]
    assert tokenizer.encode(text, specials="special") == with_special
    assert tokenizer.encode_batch([text, ""], specials="special")[0].tolist() == with_special
    with pytest.raises(InputError, match="the text holds the special token '<|endoftext|>' at character 5"):
        tokenizer.encode(text, specials="error")
    with pytest.raises(UsageError, match="specials:"):
        tokenizer.encode(text, specials="none")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("tokenizer", KINDS)
def test_the_rest_of_what_tokenizers_promise(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("speak, speak.")
    assert tokenizer.encode("speak, speak.", framed=True) == [*tokenizer.eos, *ids]
    stream = tokenizer.stream()
    assert "".join(map(stream.push, ids)) + stream.finish() == tokenizer.decode([*tokenizer.eos, *ids])
    (array,) = tokenizer.encode_batch(["speak, speak."])
    assert (array.dtype, array.tolist()) == (np.uint32, ids)
    assert tokenizer.encode("") == []
    with pytest.raises(InputError, match=r"character 1 .* U\+D800, a lone"):
        tokenizer.encode("a\ud800")
    for token in (-1, tokenizer.size):
        for use in (tokenizer.token_bytes, tokenizer.stream().push, lambda id: tokenizer.decode([id])):
            with pytest.raises(InputError, match=f"token id {token} "):
                use(token)


@pytest.mark.parametrize("tokenizer", [*KINDS, CHARACTERS, Words(("a", "\n"), "é")])
def test_it_is_saved_and_loaded(tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path / "new")
    again = load_tokenizer(tmp_path / "new")
    assert again == tokenizer
    assert type(again) is type(tokenizer)
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.json"]


def test_mistakes_are_refused(tmp_path) -> None:
    for texts in ([], [""]):
        with pytest.raises(InputError, match="no text to train on"):
            Characters.train(texts)
        with pytest.raises(InputError, match="no text to train on"):
            Words.train(texts, 10)
    with pytest.raises(InputError, match="vocab=10: this text has only 3 different words; ask for 5 or fewer"):
        Words.train(["a b c"], 10)
    assert Words.train(["a b c"], 5).size == 5
    with pytest.raises(UsageError, match="vocab=2: the special tokens leave no id for a word"):
        Words.train(["a b c"], 2)
    with pytest.raises(UsageError, match="Characters.end: a name of its own"):
        Characters("ab", "x", "x")
    with pytest.raises(InputError, match="Words.units: each word once"):
        Words(("a", "a"))
    with pytest.raises(InputError, match="Words.units: each word once, and none empty"):
        Words(("a", ""))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ({"type": "Words", "units": "ab"}, "Words.units: expected a list of strings"),
        ({"type": "Words", "units": ["a", 1]}, "Words.units: expected a list of strings"),
        ({"type": "Characters", "units": ["a"]}, "Characters.units: expected a string"),
        ({"type": "Characters"}, "Characters.units: expected a string"),
        ({"type": "Characters", "units": "aa"}, "Characters.units: each character once"),
        ({"type": "Characters", "units": "a\ud800"}, "holds U+D800, half a character"),
        ({"type": "Characters", "units": "a", "ned": "x"}, "Characters.ned: unknown key (did you mean 'end'?)"),
        ({"type": "Characters", "units": "a", "end": 1}, "Characters.end: expected a name or null, got 1"),
        ({"type": "Characters", "units": "a", "end": ""}, "Characters.end: a name of its own"),
    ],
)
def test_files_that_are_none_are_refused(data, reason, tmp_path) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=re.escape(reason)):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("tokenizer", [Characters("ab", "<|end|>"), Bytes(("<|end|>",))])
def test_a_surrogate_behind_a_special_token_is_told_by_its_place_in_the_whole_text(tokenizer: Tokenizer) -> None:
    with pytest.raises(InputError, match="character 8 of the text is U\\+D800"):
        tokenizer.encode("a<|end|>\ud800", specials="special")
