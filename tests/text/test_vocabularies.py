import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from sublayer.errors import InputError
from sublayer.text import BytePairs, Pretrained, Tokenizer, load_tokenizer
from tests.text import kinds
from tests.text.strings import HARD

SPEC = json.loads(kinds.byte_pairs().to_str())["model"]
WORDS = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "cat", "##s", "sep", ",", ".", "é", "\u2028"]


def write_pair(folder, names=("vocab.json", "merges.txt"), version="#version: 0.2\n", **config) -> None:
    (folder / names[0]).write_text(json.dumps(SPEC["vocab"] | {"<|endoftext|>": 500}))
    (folder / names[1]).write_bytes((version + "".join(f"{left} {right}\n" for left, right in SPEC["merges"])).encode())
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
@pytest.mark.parametrize("name", [None, "GPT2Tokenizer", "Qwen2TokenizerFast"])
def test_gpt2s_pair_of_files(names, name, tmp_path) -> None:
    write_pair(tmp_path, names, **({"tokenizer_class": name} if name else {}))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BytePairs)
    model = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=SPEC["vocab"], merges=[(a, b) for a, b in SPEC["merges"]]))
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name == "Qwen2TokenizerFast":
        assert tokenizer.encode("12") == tokenizer.encode("1") + tokenizer.encode("2")
        assert tokenizer.decode(tokenizer.encode("e\u0301")) == "\u00e9"
    else:
        for text in HARD:
            assert tokenizer.encode(text) == model.encode(text).ids
    assert tokenizer.eos == (500,)
    assert tokenizer.encode("<|endoftext|>", specials="special") == [500]
    for file in names:
        assert load_tokenizer(tmp_path / file).encode("Hello") == tokenizer.encode("Hello")


def test_line_ends_and_a_missing_version_do_not_matter(tmp_path) -> None:
    write_pair(tmp_path, version="")
    plain = load_tokenizer(tmp_path).encode("Hello world")
    merges = tmp_path / "merges.txt"
    merges.write_bytes(b"#version: 0.2\r\n" + merges.read_bytes().replace(b"\n", b"\r\n") + b"\r\n")
    assert load_tokenizer(tmp_path).encode("Hello world") == plain


def test_pairs_that_are_not_gpt2s_are_refused(tmp_path) -> None:
    write_pair(tmp_path, tokenizer_class="CLIPTokenizer")
    with pytest.raises(InputError, match="how CLIPTokenizer cuts text is known only from its tokenizer.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    vocab, merges = tmp_path / "vocab.json", tmp_path / "merges.txt"
    good = json.loads(vocab.read_text()), merges.read_text()
    for bad, reason in (
        ({**good[0], "x": "1"}, r"vocab.json: 'x': expected its id, found '1'"),
        ({**good[0], "xyzzy": -1}, r"vocab.json: 'xyzzy': expected its id"),
        ({**good[0], "xyzzy": 3}, "vocab.json: two tokens have one id"),
        ({**good[0], "xyz</w>": 501}, "vocab.json: not a byte-level vocabulary"),
        ({token: id for token, id in good[0].items() if token != "a"}, "vocab.json: not a byte-level vocabulary"),
    ):
        vocab.write_text(json.dumps(bad))
        with pytest.raises(InputError, match=reason):
            load_tokenizer(tmp_path)
    vocab.write_text(json.dumps(good[0]))
    for line, reason in (
        ("ab", r"merges.txt:2: expected two tokens and a space between them, found 'ab'"),
        ("a b c", "merges.txt:2: expected two tokens"),
        ("a qqq", "merges.txt:2: 'qqq' is not in the vocabulary"),
        ("q x", "merges.txt:2: 'qx' is not in the vocabulary"),
    ):
        merges.write_text(f"#version: 0.2\n{line}\n")
        with pytest.raises(InputError, match=reason):
            load_tokenizer(tmp_path)
    merges.write_bytes(b"#version: 0.2\n\xff \xff\n")
    with pytest.raises(InputError, match="merges.txt: not UTF-8 at byte 14"):
        load_tokenizer(tmp_path)
    merges.unlink()
    with pytest.raises(InputError, match="one of a pair, and merges.txt is not beside it"):
        load_tokenizer(vocab)
    with pytest.raises(InputError, match="no tokenizer.json there"):
        load_tokenizer(tmp_path)


def write_words(folder, words=WORDS, **config) -> None:
    (folder / "vocab.txt").write_bytes("\n".join([*words, ""]).encode())
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_berts_list_of_words(tmp_path) -> None:
    write_words(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, Pretrained)
    assert (tokenizer.size, tokenizer.eos) == (13, ())
    assert tokenizer.encode("Cats, [SEP] qq.", framed=True) == [3, 6, 7, 9, 2, 8, 2, 2, 10, 4]
    assert tokenizer.encode("cat[SEP]", specials="special") == [6, 4]
    assert tokenizer.decode([3, 6, 7, 9, 6, 10, 4]) == "cats, cat."
    assert [tokenizer.token_bytes(id) for id in (3, 6, 7, 11, 2)] == [b"", b"cat", b"s", "é".encode(), b""]


@pytest.mark.parametrize(
    ("words", "config", "lowercased"),
    [
        (WORDS, {}, True),
        ([*WORDS, "Cat"], {}, False),
        (WORDS, {"do_lower_case": False}, False),
        ([*WORDS, "Cat"], {"do_lower_case": True}, True),
    ],
)
def test_text_is_lowercased_as_the_folder_says_or_the_words_show(words, config, lowercased: bool, tmp_path) -> None:
    write_words(tmp_path, words, **config)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.encode("Cats") == ([6, 7] if lowercased else [13, 7] if "Cat" in words else [2])


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("bert")
    vocab = json.loads(kinds.word_piece().to_str())["model"]["vocab"]
    write_words(folder, sorted(vocab, key=vocab.__getitem__), do_lower_case=True)
    return load_tokenizer(folder)


@given(text=st.one_of(st.text("[]catsep,. "), st.text()))
def test_berts_ids_are_those_of_a_tokenizer_json(bert: Tokenizer, text: str) -> None:
    assert bert.encode(text) == kinds.ALL["word piece"].encode(text)
    assert bert.encode(text, framed=True) == kinds.ALL["word piece"].encode(text, framed=True)


def test_a_list_without_berts_special_tokens_is_refused(tmp_path) -> None:
    write_words(tmp_path, WORDS[:4])
    with pytest.raises(InputError, match=r"vocab.txt: not BERT's vocabulary: no token is \[SEP\]"):
        load_tokenizer(tmp_path)
