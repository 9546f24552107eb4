"""Byte pairs in bulk: the ids that the tokenizers library gives, whichever way they come about."""

import json
import random
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken

from sublayer.errors import InputError
from sublayer.text import BytePairs, bulk, load_tokenizer
from sublayer.text import byte_pairs as module
from sublayer.text.bulk import BYTE_OF, Bulk
from sublayer.text.patterns import DEEPSEEK_CODER, PATTERNS
from tests.text import kinds
from tests.text.strings import HARD, texts

FORMS = ["as trained", "ids shuffled", "normalized", "bytes missing", "added tokens", "from ranks", "digits first"]


def data(**options) -> dict:
    return json.loads(kinds.byte_pairs(**options).to_str())


def build(form: str) -> tokenizers.Tokenizer:
    spec = data()
    model = spec["model"]
    if form == "ids shuffled":
        ids = list(range(len(model["vocab"])))
        random.Random(0).shuffle(ids)
        model["vocab"] = {token: ids[id] for token, id in model["vocab"].items()}
    if form == "normalized":
        spec["normalizer"] = {"type": "NFC"}
    if form == "bytes missing":
        for byte in b"\x00\x1c\x85\xf4\xc0":
            absent = next(character for character, known in BYTE_OF.items() if known == byte)
            gone = {token for token in model["vocab"] if absent in token}
            model["vocab"] = {token: id for token, id in model["vocab"].items() if token not in gone}
            model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in gone]
    if form == "digits first":
        spec["pre_tokenizer"] = {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            ],
        }
    built = tokenizers.Tokenizer.from_str(json.dumps(spec))
    if form == "added tokens":
        built.add_tokens([AddedToken(name, normalized=False) for name in ("<think>", "</think>", "<think>a", "x y")])
    return built


def make(form: str) -> BytePairs:
    if form != "from ranks":
        return BytePairs(build(form))
    vocab = data()["model"]["vocab"]
    ranks = {bytes(map(BYTE_OF.__getitem__, token)): id for token, id in vocab.items() if set(token) <= BYTE_OF.keys()}
    return BytePairs.from_ranks(ranks, PATTERNS["o200k"], {"<|end|>": 1000, "<|user|>": 1003}, eos=(1000,))


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest) -> tuple[BytePairs, Bulk, Callable[[str], list[int]]]:
    tokenizer = make(request.param)
    engine = Bulk.of(tokenizer._model)
    assert engine is not None
    return tokenizer, engine, lambda text: tokenizer._model.encode(text, add_special_tokens=False).ids


@given(text=texts)
@example(text="<think>a <think>b</think>x yz<|im_end|>")
@example(text="e\u0301 \u1100\u1161 \u212b\u0327 <think>e\u0301")
@example(text="a\x00b \x1c\U0010ffff 12\x00\x00")
@example(text="1\U00011de02  \U00011de0")
def test_the_ids_are_the_librarys(form, text: str) -> None:
    _, engine, library = form
    assert engine.encode([text])[0].tolist() == library(text)


@pytest.mark.parametrize("part", [1, 7, 60])
def test_long_texts_are_encoded_in_parts(form, part: int, monkeypatch) -> None:
    _, engine, library = form
    long = " ".join(HARD) + "<think> a" + "".join(HARD)
    monkeypatch.setattr(bulk, "PART", part)
    assert engine.encode([long, "", *HARD])[0].tolist() == library(long)
    assert [ids.tolist() for ids in engine.encode(HARD)] == [library(text) for text in HARD]
    parts = list(engine._parts("a b " * 100))
    assert "".join(map(str, parts)) == "a b " * 100
    assert len(parts) > 2


@pytest.mark.parametrize("text", ["a" * 100_000, "^" * 200_000, " " * 1_000_000, "\n" * 300_000, "ab" * 100_000 + "  "])
def test_a_long_text_without_a_gap_is_encoded(text: str) -> None:
    """Among them white space so long that tiktoken's regex engine gives up."""
    tokenizer = BytePairs(kinds.byte_pairs())
    ids = tokenizer.encode(text)
    assert tokenizer._bulk is not None
    assert len(text) > 250_000 or ids == tokenizer._model.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == text


@pytest.fixture
def in_bulk(monkeypatch) -> BytePairs:
    monkeypatch.setattr(module, "BULK", 0)
    model = kinds.byte_pairs()
    specials = [("<|im_start|>", model.token_to_id("<|im_start|>")), ("<|endoftext|>", 500)]
    model.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|>", special_tokens=specials
    )
    tokenizer = BytePairs(model, eos=(500,))
    assert tokenizer._bulk is not None
    return tokenizer


@cache
def much() -> BytePairs:
    tokenizer = BytePairs(kinds.byte_pairs())
    tokenizer.encode("a b" * module.BULK)
    return tokenizer


@given(text=texts)
def test_little_text_and_much_have_the_same_ids(text: str) -> None:
    for specials in ("text", "special"):
        ids = kinds.ALL["byte pairs"].encode(text, specials=specials)
        assert much().encode(text, specials=specials) == ids
        assert much().encode_batch([text, "a"], specials=specials)[0].tolist() == ids


def test_in_bulk_a_text_is_framed_and_checked_as_alone(in_bulk: BytePairs) -> None:
    small = BytePairs(in_bulk._model, eos=(500,))
    ids = in_bulk.encode("the cat")
    assert in_bulk.encode("the cat", framed=True) == [501, *ids, 500]
    assert in_bulk._model.encode("the cat").ids == [501, *ids, 500]
    with pytest.raises(InputError, match="special token '<|im_start|>' at character 4"):
        in_bulk.encode_batch(["ok", "the <|im_start|>"], specials="error")
    with pytest.raises(InputError, match=r"character 2 of the text is U\+DC00"):
        in_bulk.encode_batch(["ok", "ab\udc00"])
    assert in_bulk.encode("<|im_start|>x", specials="special") == small.encode("<|im_start|>x", specials="special")


def test_bulk_begins_after_much_text() -> None:
    tokenizer = BytePairs(kinds.byte_pairs())
    tokenizer.encode("a b" * 20_000)
    assert "_bulk" not in vars(tokenizer)
    tokenizer.encode_batch(["a b" * 20_000] * 3)
    assert isinstance(vars(tokenizer)["_bulk"], Bulk)


def test_many_texts_are_encoded_on_several_cores(monkeypatch) -> None:
    engine = Bulk.of(kinds.byte_pairs())
    assert engine is not None
    alone = [engine.encode([text])[0].tolist() for text in HARD]
    monkeypatch.setattr(bulk, "PART", 64)
    monkeypatch.setattr(bulk, "_cores", lambda: 5)
    assert [ids.tolist() for ids in engine.encode(HARD * 7)] == alone * 7
    assert engine.encode([]) == []


REFUSED = {
    "dropout": {"model": {"dropout": 0.1}},
    "bytes under names of their own": {"model": {"byte_fallback": True}},
    "another normalizer": {"normalizer": {"type": "NFKC"}},
    "another pattern": {"pre_tokenizer": None},
    "a space put before the text": {
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_tiktoken_may_do_otherwise_is_left_to_the_library(what: str) -> None:
    spec = data()
    for key, value in REFUSED[what].items():
        spec[key] = spec[key] | value if key == "model" else value
    if what == "another pattern":
        split = {"type": "Split", "behavior": "Isolated", "invert": False}
        to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        splits = [{**split, "pattern": {"Regex": pattern}} for pattern in DEEPSEEK_CODER]
        spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [*splits, to_bytes]}
    model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert Bulk.of(model) is None
    if what != "dropout":
        tokenizer = BytePairs(model)
        tokenizer._encoded = module.BULK
        assert tokenizer.encode("the cat's 123") == model.encode("the cat's 123", add_special_tokens=False).ids


def test_merges_that_tiktoken_would_do_otherwise_are_left_to_the_library() -> None:
    spec = data()
    vocab = {**{character: id for id, character in enumerate(BYTE_OF)}, "bc": 256, "ab": 257, "abc": 258}
    spec["model"] |= {"vocab": vocab, "merges": [["b", "c"], ["a", "b"], ["ab", "c"]]}
    spec["added_tokens"] = []
    assert Bulk.of(tokenizers.Tokenizer.from_str(json.dumps(spec))) is None
    spec["model"]["merges"] = [["a", "b"], ["b", "c"], ["ab", "c"]]
    assert Bulk.of(tokenizers.Tokenizer.from_str(json.dumps(spec))) is not None


@pytest.mark.parametrize(
    ("added", "fast"),
    [
        ([AddedToken("<a>", normalized=False)], True),
        ([AddedToken("<a>", normalized=True)], True),
        ([AddedToken("<a>", normalized=False, lstrip=True)], False),
        ([AddedToken("<a>", normalized=False, rstrip=True)], False),
        ([AddedToken("word", normalized=False, single_word=True)], False),
        ([AddedToken("<a>", normalized=False), AddedToken("a><", normalized=True)], False),
        ([AddedToken("<a>", normalized=False), AddedToken("<a>b", normalized=True)], False),
        ([AddedToken("im_start", normalized=False)], False),  # inside a special token
        ([AddedToken("|>x", normalized=False)], False),  # begins where one ends
        ([AddedToken("x<|", normalized=False)], False),  # ends where one begins
        ([AddedToken("<a>", normalized=False), AddedToken("<a>b", normalized=False)], True),
    ],
)
def test_added_tokens_are_found_only_where_that_is_one_search(added: list[AddedToken], fast: bool) -> None:
    model = kinds.byte_pairs()
    model.add_tokens(added)
    engine = Bulk.of(model)
    assert (engine is not None) == fast
    if engine is not None:
        model.encode_special_tokens = True
        text = "<a>b <a><a> word <|im_start|>x a><a>"
        assert engine.encode([text])[0].tolist() == model.encode(text, add_special_tokens=False).ids


def test_a_normalizer_and_tokens_found_after_it_are_left_to_the_library() -> None:
    spec = data()
    spec["normalizer"] = {"type": "NFC"}
    model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert Bulk.of(model) is not None
    model.add_tokens([AddedToken("<a>", normalized=True)])
    assert Bulk.of(model) is None


def test_a_special_token_that_merges_make_is_not_forged() -> None:
    spec = data()
    spec["added_tokens"][0] |= {"content": "in", "id": spec["model"]["vocab"]["in"]}
    model = tokenizers.Tokenizer.from_str(json.dumps(spec))
    assert Bulk.of(model) is None
    tokenizer = BytePairs(model)
    tokenizer._encoded = module.BULK
    with pytest.raises(InputError, match="the text holds 'in', which this tokenizer knows only as a special token"):
        tokenizer.encode("in")


def test_a_special_tokens_name_in_the_vocabulary_is_no_piece_of_text() -> None:
    """From ranks, whole pieces are looked up first, and the names stand in the vocabulary."""
    tokenizer = make("from ranks")
    assert (tokenizer.size, tokenizer.eos) == (1004, (1000,))
    tokenizer._encoded = module.BULK
    assert tokenizer._bulk is not None
    for text in ("<|end|>", "<|user|>hi<|end|>"):
        assert not {1000, 1003} & set(tokenizer.encode(text))
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a<|user|>", specials="special")[-1] == 1003


def test_from_ranks_needs_every_byte() -> None:
    ranks = {bytes((byte,)): byte for byte in range(256) if byte != 0x41}
    with pytest.raises(InputError, match="no rank for byte 0x41"):
        BytePairs.from_ranks(ranks, PATTERNS["gpt2"], {})


@given(ids=st.lists(st.integers(0, 502)))
def test_bytes_that_are_not_utf8_are_replaced_as_python_replaces_them(ids: list[int]) -> None:
    tokenizer = kinds.ALL["byte pairs"]
    plain = [id for id in ids if id < 500]
    assert tokenizer.decode(plain) == b"".join(map(tokenizer.token_bytes, plain)).decode("utf-8", "replace")


def test_nothing_is_joined_across_a_special_token() -> None:
    tokenizer = kinds.ALL["byte pairs"]
    first, *rest = "€".encode()
    ids = [next(id for id in range(256) if tokenizer.token_bytes(id) == bytes((byte,))) for byte in (first, *rest)]
    assert tokenizer.decode(ids) == "€"
    assert tokenizer.decode([ids[0], 500, *ids[1:]]) == "\ufffd" + "\ufffd" * 2
    assert tokenizer.decode(np.array(ids)) == "€"  # pyright: ignore[reportArgumentType]


def test_an_added_token_reads_as_its_name(tmp_path) -> None:
    """Also one whose characters would be bytes if it were a token of the vocabulary."""
    model = kinds.byte_pairs()
    model.add_tokens([AddedToken("<é｜>", normalized=False)])
    model.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, BytePairs)
    assert tokenizer.encode("a<é｜>")[1:] == [503]
    assert tokenizer.decode([503]) == "<é｜>"
    assert tokenizer.token_bytes(503) == "<é｜>".encode()


@pytest.mark.parametrize("name", ["<|end of text|>", "line\nbreak", "é ▁"])
def test_names_with_spaces_and_line_ends_are_saved(name: str, tmp_path) -> None:
    model = kinds.byte_pairs()
    model.add_special_tokens([name])
    BytePairs(model, eos=(503,), config={"chat_template": "{{ x }}"}).save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert again.eos == (503,)
    assert again.encode(name, specials="special") == [503]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{{ x }}",
        "eos_token": name,
    }


def test_added_tokens_that_would_take_long_to_compare_are_left_to_the_library() -> None:
    """Each of one kind is held against each of another."""

    def added(count: int) -> list[dict]:
        flags = dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False)
        kinds = ((f"<|{{}}{'=' * 90}|>", True), (f"[{{}}{'=' * 90}]", False))
        return [{"content": form.format(i), "id": i, "special": special, **flags}
                for form, special in kinds for i in range(count)]  # fmt: skip

    assert bulk._names(added(3), plain=True) is not None
    assert bulk._names(added(200), plain=True) is None
