"""What holds for every tokenizer, whatever its kind."""

import json
from copy import copy

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sublayer.errors import InputError, UsageError
from sublayer.text import Bytes, Tokenizer, load_tokenizer
from sublayer.text import byte_pairs as byte_pairs_module
from sublayer.text.tokenizer import Names
from tests.text.kinds import ALL, LOSSLESS
from tests.text.strings import HARD, texts

NAMES = {  # a special token of each
    "bytes": "<|im_end|>",
    "byte pairs": "<|im_end|>",
    "byte fallback": "</s>",
    "word piece": "[SEP]",
    "unigram": "</s>",
    "sentencepiece bpe": "</s>",
    "sentencepiece unigram": "</s>",
}
each = pytest.mark.parametrize("kind", ALL)


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = tokenizer.stream()
    return "".join([stream.push(token) for token in ids]) + stream.finish()


def encodable(kind: str, text: str) -> str:
    """What stands for a space or a special token in a vocabulary cannot be told from it, or is refused."""
    text = text.replace("▁", "_")
    return text.replace("</s>", "s").replace("<s>", "s").replace("<unk>", "") if kind == "unigram" else text


@each
@given(text=texts)
def test_a_batch_is_each_text_alone(kind: str, text: str) -> None:
    tokenizer, text = ALL[kind], encodable(kind, text)
    given_texts = [text, "", text + " a", "the cat"]
    batch = tokenizer.encode_batch(given_texts)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(one) for one in given_texts]
    assert {ids.dtype for ids in batch} == {np.dtype(np.uint32)}


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=texts)
@example(text="\ufeffa BOM inside a text is the text's own: readers drop the one of a file")
def test_decode_gives_back_what_was_encoded(kind: str, text: str) -> None:
    tokenizer, text = ALL[kind], encodable(kind, text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == streamed(tokenizer, ids) == text
    joined = b"".join(map(tokenizer.token_bytes, ids))
    assert joined == text.encode() or (joined == b" " + text.encode() and kind not in ("bytes", "byte pairs"))


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", HARD)
def test_hard_texts_come_back(kind: str, text: str) -> None:
    assert ALL[kind].decode(ALL[kind].encode(text)) == text


@each
@given(data=st.data())
def test_a_stream_gives_what_decode_gives_for_any_ids(kind: str, data: st.DataObject) -> None:
    tokenizer = ALL[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=20))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids)


@each
def test_a_stream_is_as_new_after_its_end(kind: str) -> None:
    tokenizer = ALL[kind]
    stream, ids = tokenizer.stream(), tokenizer.encode("the cat")
    first = "".join([stream.push(token) for token in ids]) + stream.finish()
    assert first == "".join([stream.push(token) for token in ids]) + stream.finish() == tokenizer.decode(ids)


@each
def test_a_stream_goes_on_after_a_wrong_id(kind: str) -> None:
    tokenizer = ALL[kind]
    stream, ids = tokenizer.stream(), tokenizer.encode("the cat")
    shown = stream.push(ids[0])
    with pytest.raises(InputError):
        stream.push(tokenizer.size)
    assert shown + "".join([stream.push(token) for token in ids[1:]]) + stream.finish() == tokenizer.decode(ids)


@each
def test_a_special_tokens_name_in_text(kind: str) -> None:
    tokenizer, name = ALL[kind], NAMES[kind]
    text = f"cat {name}cat"
    (token,) = tokenizer.encode(name, specials="special")
    assert (tokenizer.decode([token]), tokenizer.token_bytes(token)) == ("", b"")
    assert token in tokenizer.encode(text, specials="special")
    assert token in tokenizer.encode_batch([text], specials="special")[0]
    with pytest.raises(InputError, match=r"special token '.*' at character 4: ") as alone:
        tokenizer.encode(text, specials="error")
    with pytest.raises(InputError) as batch:
        tokenizer.encode_batch(["cat", text], specials="error")
    assert str(batch.value) == str(alone.value)
    assert repr(name) in str(alone.value)
    assert tokenizer.encode("cat cat", specials="error") == tokenizer.encode("cat cat")
    if kind == "unigram":  # its vocabulary holds the name as a piece like any other
        with pytest.raises(InputError, match="only as a special token"):
            tokenizer.encode(text)
        with pytest.raises(InputError, match="only as a special token"):
            tokenizer.encode_batch([text])
    else:
        assert token not in tokenizer.encode(text)
        assert token not in tokenizer.encode_batch([text])[0]


@each
def test_an_unknown_policy_is_refused(kind: str) -> None:
    for encode in (ALL[kind].encode, lambda text, specials: ALL[kind].encode_batch([text], specials=specials)):
        with pytest.raises(UsageError, match='specials: "text", "special" or "error", got \'all\''):
            encode("cat", specials="all")  # pyright: ignore[reportArgumentType]


@each
def test_mistakes_are_refused(kind: str) -> None:
    tokenizer = ALL[kind]
    for encode in (tokenizer.encode, lambda text: tokenizer.encode_batch(["", text])):
        with pytest.raises(InputError, match=r"character 1 of the text is U\+D800, a lone surrogate"):
            encode("a\ud800")
    for token in (-1, tokenizer.size, 2**40):
        for use in (tokenizer.token_bytes, tokenizer.stream().push, lambda token: tokenizer.decode([0, token])):
            with pytest.raises(InputError, match=f"token id {token} is outside .* 0 to {tokenizer.size - 1}"):
                use(token)


@each
@pytest.mark.parametrize("eos", ["own", "none", "one", "several"])
def test_it_is_saved_and_loaded(kind: str, eos: str, tmp_path) -> None:
    tokenizer = ALL[kind]
    ends = {"own": tokenizer.eos, "none": (), "one": (1,), "several": (2, 1)}[eos]
    if not isinstance(tokenizer, Bytes):  # whose end is its first special token, always
        tokenizer = copy(tokenizer)
        tokenizer.eos = ends  # pyright: ignore[reportAttributeAccessIssue]
    elif eos != "own":
        return
    tokenizer.save(tmp_path / "deep" / "folder")
    again = load_tokenizer(tmp_path / "deep" / "folder")
    assert (type(again), again.size, again.eos) == (type(tokenizer), tokenizer.size, ends)
    for text in (encodable(kind, text) for text in HARD):
        assert again.encode(text) == tokenizer.encode(text)
        assert again.encode(text, framed=True) == tokenizer.encode(text, framed=True)
        assert again.encode(text, specials="special") == tokenizer.encode(text, specials="special")
        assert again.decode(again.encode(text)) == tokenizer.decode(tokenizer.encode(text))


@each
def test_saving_sets_right_what_the_folder_says_of_the_end(kind: str, tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 77, "temperature": 0.5}')
    (tmp_path / "tokenizer.json").write_text("{}")
    ALL[kind].save(tmp_path)
    assert load_tokenizer(tmp_path).eos == ALL[kind].eos
    assert json.loads((tmp_path / "generation_config.json").read_text())["temperature"] == 0.5


def test_names_are_found_leftmost_and_longest() -> None:
    names = Names({"<a>": 1, "<a><b>": 2, "<b>": 3, "a*": 4})
    assert list(names.split("x<a><b><b><a>a*a")) == ["x", 2, 3, 1, 4, "a"]
    assert list(Names({}).split("text")) == ["text"]
    assert list(names.split("")) == []


def test_bulk_is_not_prepared_for_little_text() -> None:
    tokenizer = ALL["byte pairs"]
    assert byte_pairs_module.BULK > 10_000
    assert "_bulk" not in vars(tokenizer) or tokenizer._encoded >= byte_pairs_module.BULK  # pyright: ignore
