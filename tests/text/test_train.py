"""Training byte-level BPE, held against the tokenizers library's trainer and against tiktoken."""

import json
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
import regex
import tiktoken
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sublayer.errors import InputError, UsageError
from sublayer.text import BytePairs, load_tokenizer, train_bpe
from sublayer.text import train as training
from sublayer.text.bulk import BYTE_OF
from sublayer.text.patterns import PATTERNS

MODULES = ("argparse", "ast", "calendar", "codecs", "difflib", "html/entities", "inspect", "pydoc")
TEXTS = [Path(sysconfig.get_path("stdlib"), f"{name}.py").read_text(encoding="utf-8") for name in MODULES]
TEXTS.append("Η γλώσσα, язык и 言語: 日本語の文章。 عربي हिन्दी naïve café 👩‍👩‍👧\r\n\r\n\t x  y\u2029" * 20)


@pytest.fixture(scope="module")
def small() -> BytePairs:
    return train_bpe(TEXTS, 1000, pattern="cl100k")


def described(tokenizer: BytePairs | tokenizers.Tokenizer) -> dict:
    model = tokenizer if isinstance(tokenizer, tokenizers.Tokenizer) else tokenizer._model
    return json.loads(model.to_str())


def by_the_library(texts: Iterable[str], vocab: int, pattern: str) -> dict:
    """What the tokenizers library's own trainer learns."""
    model = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERNS[pattern]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab, min_frequency=2, initial_alphabet=alphabet, show_progress=False)
    model.train_from_iterator(texts, trainer)
    return described(model)["model"]


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_it_learns_what_the_library_learns_id_for_id(pattern) -> None:
    ours = described(train_bpe(TEXTS, 4000, pattern=pattern, end=None))["model"]
    theirs = by_the_library(TEXTS, 4000, pattern)
    assert ours["vocab"] == theirs["vocab"]
    assert ours["merges"] == theirs["merges"]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.text("ab ", max_size=30), min_size=1, max_size=6).filter(any))
@example(["aaa aaaa aaaaa aaaaaa", "aaaaaaaaaaaaa"])
@example(["abababab ababab", "bababa babababab"])
@example(["aabaabaabaabaab", "abaabaabaaba"])
def test_runs_and_ties_are_joined_as_the_library_joins_them(texts: list[str]) -> None:
    theirs = by_the_library(texts, 400, "gpt2")
    ours = described(train_bpe(texts, len(theirs["vocab"]), end=None))["model"]
    assert ours["merges"] == theirs["merges"]
    assert ours["vocab"] == theirs["vocab"]
    with pytest.raises(InputError, match=f"after {len(theirs['vocab'])} tokens no pair"):
        train_bpe(texts, len(theirs["vocab"]) + 1, end=None)


def test_neither_the_order_of_texts_nor_a_second_time_changes_anything(small: BytePairs) -> None:
    again = train_bpe(iter(TEXTS[::-1]), 1000, pattern="cl100k")
    assert described(again) == described(small)


def test_ids_are_ranks_and_the_end_comes_last(small: BytePairs) -> None:
    data = described(small)["model"]
    assert [small.token_bytes(id)[0] for id in range(256)] == list(BYTE_OF.values())
    assert [data["vocab"][a + b] for a, b in data["merges"]] == list(range(256, 999))
    assert all(max(data["vocab"][a], data["vocab"][b]) < data["vocab"][a + b] for a, b in data["merges"])
    assert (small.size, small.eos, small.token_bytes(999)) == (1000, (999,), b"")


@given(st.text())
@example("   leading spaces\n\n\n   \t")
@example("hello !  x != y\r\n")
@example("<|endoftext|>")
@example("👩‍👩‍👧 日本語 \x00\u2029\ufeff")
def test_decode_gives_back_what_was_encoded(small: BytePairs, text: str) -> None:
    ids = small.encode(text)
    assert small.decode(ids) == text
    assert 999 not in ids


@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_tiktoken_and_transformers_give_the_same_ids(pattern, tmp_path) -> None:
    ours = train_bpe(TEXTS, 2000, pattern=pattern)
    ours.save(tmp_path)
    ranks = {ours.token_bytes(id): id for id in range(1999)}
    specials = {"<|endoftext|>": 1999}
    peer = tiktoken.Encoding("", pat_str=PATTERNS[pattern], mergeable_ranks=ranks, special_tokens=specials)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    long = "\n".join(TEXTS)  # long enough for our own way to tiktoken
    for text in (*TEXTS, long, "it's IT'S 12345  \n\n  x", "a" * 10_000, " " * 5_000):
        ids = ours.encode(text)
        assert ids == peer.encode_ordinary(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.encode_batch([text])[0].tolist() == ids
    framed = ours.encode("a text", framed=True)
    assert theirs.encode("a text") == framed == [1999, *ours.encode("a text")]
    assert theirs.decode(framed, skip_special_tokens=True) == "a text"
    assert theirs.eos_token_id == 1999


def test_much_text_goes_through_tiktoken(small: BytePairs) -> None:
    assert small._bulk is not None


def test_merges_of_spaces_and_newlines_are_saved_and_loaded(tmp_path) -> None:
    ours = train_bpe(["\n\n\n    if x:\n\n\n        y = 'a b'\n" * 50], 270)
    assert any(b"\n\n" in ours.token_bytes(id) for id in range(269))
    assert any(b"    " in ours.token_bytes(id) for id in range(269))
    ours.save(tmp_path)
    again = load_tokenizer(tmp_path)
    assert isinstance(again, BytePairs)
    assert (again.size, again.eos) == (ours.size, ours.eos)
    for text in ("\n\n\n    if x:", "  \n \n\n  y = 'a b'", *TEXTS):
        assert again.encode(text) == ours.encode(text)


def test_without_merges_there_are_bytes() -> None:
    order = list(BYTE_OF.values())
    assert train_bpe(["x"], 256, end=None).encode("né") == [order.index(byte) for byte in "né".encode()]
    assert (train_bpe(["x"], 257).size, train_bpe(["x"], 257).eos) == (257, (256,))
    assert train_bpe(["x"], 256, end=None).eos == ()


def test_counts_beyond_32_bits_do_not_wrap_around() -> None:
    pieces = Counter({" a": 2**31, " b": 3 * 2**32, "xy": 2**31 - 1, "cd": 10})
    names = list(BYTE_OF)
    found = [names[a] + names[b] for a, b in training._learn(pieces, 4, lambda *_: None)]
    assert found == ["Ġb", "Ġa", "xy", "cd"]


def counted(texts: Iterable[str], pattern: str = "gpt2") -> Counter[str]:
    return training.count_pieces(texts, regex.compile(PATTERNS[pattern]).findall, lambda *_: None)


def test_windows_change_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(TEXTS) + " \r\n \n  I'm  YOU'RE x'LL 123456 a\u0301b /\r\n//\n/x"
    for pattern in PATTERNS:
        monkeypatch.setattr(training, "WINDOW", 2**22)
        whole = counted([text], pattern)
        for window in (200, 1331):
            monkeypatch.setattr(training, "WINDOW", window)
            assert counted([text], pattern) == whole


def test_a_text_without_a_gap_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "WINDOW", 100)
    assert counted(["a" * 250]) == {"a" * 100: 2, "a" * 50: 1}
    assert train_bpe(["ab" * 10_000], 260, end=None).token_bytes(259) == b"ab" * 8


def test_memory_is_bounded_by_forgetting_the_rarest_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "KNOWN", 4000)
    largest = 0

    def texts() -> Iterable[str]:
        for i in range(0, 40_000, 10):
            yield " the cat" * 3 + "".join(f" q{n}" for n in range(i, i + 10))

    def bounded(pieces: Counter[str]) -> tuple[Counter[str], int]:
        nonlocal largest
        largest = max(largest, sum(map(len, pieces)))
        kept, size = real(pieces)
        assert size == sum(map(len, kept)) <= 4000
        return kept, size

    real = training._bounded
    monkeypatch.setattr(training, "_bounded", bounded)
    pieces = counted(texts())
    assert largest < 4000 + 100  # one text more than the bound
    assert pieces[" the"] == pieces[" cat"] == 12_000
    assert 0 < len(pieces) - 2 < 4000 / 3


def test_progress_is_told() -> None:
    told: list[tuple] = []
    train_bpe(["a b", "é", "abc abc"], 258, end=None, progress=lambda *args: told.append(args))
    assert told == [("count", 3, None), ("count", 5, None), ("count", 12, None), ("merge", 2, 2)]


@pytest.mark.parametrize("texts", [[], ["", ""]])
def test_nothing_to_train_on_is_refused(texts) -> None:
    with pytest.raises(InputError, match="no text to train on"):
        train_bpe(texts, 300)


def test_mistakes_are_refused() -> None:
    with pytest.raises(InputError, match="vocab=32000: after 261 tokens .* ask for 261 or fewer, or give more text"):
        train_bpe(["hello hello"], 32_000)
    with pytest.raises(UsageError, match="vocab=256: the smallest is 257, the bytes and the end"):
        train_bpe(["x"], 256)
    with pytest.raises(UsageError, match="vocab=255: the smallest is 256, the bytes"):
        train_bpe(["x"], 255, end=None)
    with pytest.raises(UsageError, match=r"pattern='gpt3': no such pattern \(did you mean 'gpt2'"):
        train_bpe(["x"], 300, pattern="gpt3")  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match='end=""'):
        train_bpe(["x"], 300, end="")
    with pytest.raises(UsageError, match="end='hello': the text's own characters"):
        train_bpe(["hello hello"], 261, end="hello")
    with pytest.raises(InputError, match=r"character 1 .* U\+D800"):
        train_bpe(["a\ud800"], 300)


def test_an_interruption_comes_through() -> None:
    def texts() -> Iterable[str]:
        yield "text"
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_bpe(texts(), 300)
