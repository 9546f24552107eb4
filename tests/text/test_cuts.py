"""That tiktoken cuts text into the library's pieces: piece by piece, for every pattern that is known."""

import json

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from sublayer.text import cuts
from sublayer.text.build import byte_level
from sublayer.text.bulk import BYTE_OF, SAFE, to_bytes
from sublayer.text.cuts import cut
from sublayer.text.patterns import DEEPSEEK_CODER, DEEPSEEK_V3, DIGIT, GPT2, PATTERNS, QWEN2, QWEN35, TEKKEN
from tests.text.strings import HARD, PARTS

WAYS = [*((pattern,) for pattern in (*PATTERNS.values(), GPT2, QWEN2, QWEN35, TEKKEN)), (DIGIT, GPT2), DEEPSEEK_V3]
VOCAB_BYTES = {bytes((byte,)): byte for byte in range(256)}
VOCAB = {character: id for id, character in enumerate(BYTE_OF)}
short = st.one_of(
    st.text(max_size=10), st.lists(st.sampled_from([part for part in PARTS if len(part) < 6]), max_size=8).map("".join)
)


def library(patterns: tuple[str, ...]) -> Tokenizer:
    return byte_level(VOCAB, [], patterns)


def pieces_of_library(model: Tokenizer, text: str) -> list[bytes]:
    pieces = [to_bytes(piece) for piece, _ in model.pre_tokenizer.pre_tokenize_str(text)]
    return [piece for piece in pieces if piece is not None]


def pieces_of_tiktoken(pattern: str, text: str) -> list[bytes]:
    """With every stretch of the text a token, each piece is one token."""
    data = text.encode()
    stretches = {data[i:j] for i in range(len(data)) for j in range(i + 2, len(data) + 1)}
    ranks = {token: id for id, token in enumerate([*map(bytes, zip(range(256), strict=True)), *stretches])}
    engine = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return engine.decode_tokens_bytes(engine.encode_ordinary(text))


@pytest.mark.parametrize("patterns", WAYS)
@given(text=short)
@example(text="12 345\u00b2  6")
@example(text="don't 'S 'ſ I'LL")
@example(text=" \r\n\n  x\n ")
@example(text="\x00\x01a\x02 \x03中\u3040a")
@example(text="a゛゚1・ー中国  中 1")
@example(text="!abc ?!\n\n  \t.")
@example(text="camelCaseHTTPǅʰé")
def test_pieces_are_the_librarys(patterns: tuple[str, ...], text: str) -> None:
    model = library(patterns)
    how = cut(json.loads(model.to_str())["pre_tokenizer"])
    assert how is not None
    if how.unlike is None or not how.unlike.search(text):
        assert pieces_of_tiktoken(how.pattern, text) == pieces_of_library(model, text)


@pytest.mark.parametrize("patterns", WAYS)
@given(left=short, right=short)
@example(left="it'", right=" s  ")
@example(left="x", right="  \n y")
def test_a_text_may_be_cut_between_another_character_and_a_space(patterns, left: str, right: str) -> None:
    model = library(patterns)
    left, right = left + ".", " " + right
    assert [found.end() for found in SAFE.finditer(left + right)].count(len(left)) == 1
    assert pieces_of_library(model, left + right) == pieces_of_library(model, left) + pieces_of_library(model, right)


def steps(*inner: dict) -> dict:
    return {"type": "Sequence", "pretokenizers": list(inner)}


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
SPLIT = {"type": "Split", "pattern": {"Regex": QWEN2}, "behavior": "Isolated", "invert": False}


@pytest.mark.parametrize(
    "pre_tokenizer",
    [
        None,
        {"type": "Metaspace"},
        BYTES,  # no pattern at all
        steps(SPLIT),  # no bytes
        steps(SPLIT, SPLIT),
        steps(BYTES, SPLIT),
        steps(SPLIT, BYTES, BYTES),
        steps(SPLIT, {**BYTES, "add_prefix_space": True}),
        steps(SPLIT, {**BYTES, "use_regex": True}),
        steps({**SPLIT, "behavior": "MergedWithNext"}, BYTES),
        steps({**SPLIT, "invert": True}, BYTES),
        steps({**SPLIT, "behavior": "Removed"}, BYTES),
        steps({**SPLIT, "pattern": {"String": QWEN2}}, BYTES),
        steps({**SPLIT, "pattern": {"Regex": QWEN2 + "?"}}, BYTES),
        steps({"type": "Digits", "individual_digits": False}, {**BYTES, "use_regex": True}),
        steps(*({**SPLIT, "pattern": {"Regex": one}} for one in DEEPSEEK_CODER), BYTES),
        steps(*({**SPLIT, "pattern": {"Regex": one}} for one in DEEPSEEK_V3[1:]), BYTES),
    ],
)
def test_what_is_not_known_is_left_to_the_library(pre_tokenizer) -> None:
    assert cut(pre_tokenizer) is None


def test_the_built_in_pattern_and_removing_what_lies_between_are_known() -> None:
    written_out = steps({**SPLIT, "pattern": {"Regex": GPT2}}, BYTES)
    assert cut({"type": "ByteLevel", "add_prefix_space": False}) == cut(written_out) is not None
    assert cut(steps({**SPLIT, "behavior": "Removed", "invert": True}, BYTES)) == cut(steps(SPLIT, BYTES))


def test_characters_that_the_two_engines_class_otherwise_are_found() -> None:
    digits = cut(steps({"type": "Digits", "individual_digits": True}, {**BYTES, "use_regex": True}))
    assert digits is not None
    digit = pre_tokenizers.Digits(individual_digits=True)
    engine = tiktoken.Encoding("", pat_str=r"\p{N}", mergeable_ranks=VOCAB_BYTES, special_tokens={})
    for code in (*range(0x80, 0x3400, 3), *range(0x11DD0, 0x11DF0), *range(0x16FF0, 0x17000)):
        by_library = len(digit.pre_tokenize_str(f"a{chr(code)}a")) == 3
        by_engine = engine.encode_ordinary(chr(code)) != []
        found = digits.unlike is not None and digits.unlike.search(chr(code)) is not None
        assert found == (by_library != by_engine), hex(code)


def test_a_class_that_differs_is_told(monkeypatch) -> None:
    monkeypatch.setattr(cuts, "_outside", lambda kind: set(cuts._characters()) - {"\u0660", "\u3042"})
    assert cuts._class_differs.__wrapped__(r"\p{N}") >= {"\u3042"}
    assert "\u0660" not in cuts._class_differs.__wrapped__(r"\p{N}")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [r"\p{L}", r"\p{N}", r"\s", r"\p{M}", r"\p{P}", r"\p{S}", r"\p{Lu}", r"\p{Ll}"])
def test_the_characters_left_out_of_the_comparison_are_alike(kind: str) -> None:
    """Those whose class no table has changed: with the versions that are pinned, at least."""
    every = "".join(map(chr, (*range(0x80, 0xD800), *range(0xE000, 0x110000))))
    without = normalizers.Replace(Regex(kind + "+"), "").normalize_str(every)
    engine = tiktoken.Encoding("", pat_str=kind, mergeable_ranks=VOCAB_BYTES, special_tokens={})
    inside = bytes(engine.encode_ordinary(every)).decode()
    assert set(every) - set(without) == set(inside)


@pytest.mark.parametrize("text", HARD)
def test_hard_texts_are_cut_alike(text: str) -> None:
    text = text[:60]
    for patterns in WAYS:
        model = library(patterns)
        how = cut(json.loads(model.to_str())["pre_tokenizer"])
        assert how is not None
        assert pieces_of_tiktoken(how.pattern, text) == pieces_of_library(model, text)


def test_a_bare_model_has_no_pieces() -> None:
    assert cut(json.loads(Tokenizer(models.BPE()).to_str())["pre_tokenizer"]) is None
