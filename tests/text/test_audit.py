"""Audit: figures counted by hand on small texts."""

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers

from sublayer.errors import InputError
from sublayer.text import Bytes, Characters, Pretrained, Words, train_bpe
from sublayer.text.audit import SCRIPTS, Figures, _pieces, audit, classify, kind_of

PAIRS = train_bpe(["the the the cat cat cat hat hat the"], 262)  # at, he, the, cat, " the", and the end
TEXT = "the cat, the dog 12"


def test_figures_counted_by_hand() -> None:
    # the| |cat|,| the| |d|o|g| |1|2
    report = audit({"pairs": PAIRS}, [(TEXT, "a.txt")]).reports["pairs"]
    assert report.total == Figures(bytes=19, tokens=12, words=4, word_tokens=1 + 2 + 1 + 4, whole_words=2)
    assert report.total.bytes_per_token == 19 / 12
    assert report.total.tokens_per_word == 2
    assert report.total.whole_share == 0.5
    assert report.scripts == {
        "Latin": Figures(15, 8, 4, 8, 2),
        "digits": Figures(3, 3),
        "signs": Figures(1, 1),
    }
    assert report.kinds == {".txt": report.total}
    # Of 256 bytes and 5 merges, the ten different ones above were used.
    assert (report.unused, report.changed) == (261 - 10, 0)


def test_figures_of_bytes_need_no_tokenizer_to_be_counted() -> None:
    found = audit({"bytes": Bytes(("<|end|>",))}, [("the cat é\n", "a.py"), ("Да 12!", "b.md"), ("x", "c.py")])
    report = found.reports["bytes"]
    assert (found.documents, found.bytes) == (3, 11 + 8 + 1)
    assert (report.size, report.changed, report.refused) == (257, 0, 0)
    assert report.total == Figures(20, 20, words=5, word_tokens=3 + 4 + 3 + 4 + 1, whole_words=1)
    assert list(report.scripts) == ["Latin", "Cyrillic", "digits", "signs", "white space"]
    assert report.scripts["Latin"] == Figures(11, 11, 4, 11, 1)
    assert report.scripts["Cyrillic"] == Figures(4, 4, 1, 4, 0)
    assert report.scripts["digits"] == Figures(3, 3)
    assert report.kinds == {".py": Figures(12, 12, 4, 11, 1), ".md": Figures(8, 8, 1, 4, 0)}
    assert list(report.kinds) == [".py", ".md"]
    assert report.unused == 256 - len(set("the cat é\nДа 12!x".encode()))
    assert report.total.bytes_per_token == 1
    assert report.total.tokens_per_word == 3
    assert report.total.whole_share == 0.2


def test_what_words_lose() -> None:
    tokenizer = Words(("the", " cat", " the", "\n"), "<|end|>", "<|unknown|>")
    report = audit({"words": tokenizer}, [("the cat the dog\n", "a"), ("the cat", "b")]).reports["words"]
    assert (report.changed, report.refused, report.unused) == (1, 0, 0)
    assert report.total == Figures(23, 7, words=6, word_tokens=6, whole_words=5, lost_bytes=len(" dog"))
    assert report.total.lost_share == 4 / 23
    assert report.total.bytes_per_token == 19 / 7
    assert report.total.whole_share == 5 / 6


@pytest.mark.parametrize(("unknown", "tokens", "refused"), [("<|unknown|>", 10, 0), (None, 8, 1)])
def test_what_characters_lose_or_refuse(unknown, tokens, refused) -> None:
    tokenizer = Characters.train(["the cat"], unknown=unknown)
    report = audit({"characters": tokenizer}, [("the cât €", ""), ("a", "")]).reports["characters"]
    assert (report.changed, report.refused, report.unused) == (1, refused, 0)
    assert (report.total.bytes, report.total.tokens) == (1 + 3 + 2 + 4 + 3, tokens)
    assert report.total.lost_bytes == len("â€".encode())
    assert report.scripts["Latin"].lost_bytes == 2
    assert (report.total.words, report.total.whole_words) == (3, 1)


def test_of_a_refused_text_what_can_be_encoded_is() -> None:
    report = audit({"words": Words(("the", " cat", " "))}, [("the dog cat", "")]).reports["words"]
    assert (report.refused, report.changed, report.unused) == (1, 1, 0)
    # Of " dog", which is no word, the space is one.
    assert report.total == Figures(11, 3, words=3, word_tokens=3, whole_words=2, lost_bytes=len("dog"))


def test_a_tokenizer_that_rewrites_text_loses_what_it_changes() -> None:
    """As BERT's: capitals and newlines go; the space between words comes back in decoding."""
    model = tokenizers.Tokenizer(
        models.WordPiece({"[UNK]": 0, "the": 1, "cat": 2, "##s": 3}, unk_token="[UNK]")  # pyright: ignore[reportCallIssue]
    )
    model.normalizer = normalizers.Lowercase()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    model.add_special_tokens(["[UNK]"])
    tokenizer = Pretrained(model, unknown=0)
    texts = [("The cats\n", ""), ("the cats", ""), ("the dog", "")]
    report = audit({"words": tokenizer}, texts).reports["words"]
    assert report.changed == 2
    assert report.total.tokens == 3 + 3 + 2
    assert report.scripts["Latin"].lost_bytes == len("T") + len(" dog")
    assert report.scripts["white space"].lost_bytes == 1
    assert (report.total.words, report.total.whole_words, report.total.word_tokens) == (6, 3, 8)


def test_several_tokenizers_see_the_same_text_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublayer.text.audit.BATCH", 10)
    texts = [("the cat\n" * 3, "a.py"), ("hat", "b.py"), ("", "c.py"), ("the hat?", "d")]
    told: list[int] = []
    found = audit({"pairs": PAIRS, "bytes": Bytes()}, iter(texts), told.append)
    assert told == [24, 35]
    assert found.documents == 4
    for name, tokenizer in {"pairs": PAIRS, "bytes": Bytes()}.items():
        total = found.reports[name].total
        assert total.tokens == sum(len(tokenizer.encode(text)) for text, _ in texts)
        used = np.unique(np.concatenate(tokenizer.encode_batch([text for text, _ in texts])))
        assert found.reports[name].unused == tokenizer.size - len(tokenizer.eos) - len(used)
    assert {kind: figures.bytes for kind, figures in found.reports["bytes"].kinds.items()} == {".py": 27, "": 8}


@given(st.text())
def test_the_pieces_are_the_text(text: str) -> None:
    pieces = _pieces()(text)
    assert "".join(pieces) == text
    assert {classify(piece) for piece in pieces} <= set(SCRIPTS)


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("naïve Ελλάδα привет", ["Latin", "Greek", "Cyrillic"]),
        ("e\u0301te\u0301", ["Latin"]),
        ("שלום مرحبا हिन्दी বাংলা", ["Hebrew", "Arabic", "Devanagari", "Bengali"]),
        ("漢字かなカナー ไทย 한국", ["Han", "Kana", "Thai", "Hangul"]),
        ("ᚠᚢᚦ", ["other letters"]),
        ("12 ३४", ["digits", "digits"]),
        ("👩‍👩‍👧 👍🏽🇩🇪 © ❤️", ["emoji", "emoji", "signs", "emoji"]),
        ("x_y -> (z)", ["Latin", "signs", "Latin", "signs", "signs", "Latin", "signs"]),
        ("a\n    b  \t", ["Latin", "white space", "Latin", "white space"]),
        ("\x00\x01", ["control"]),
    ],
)
def test_scripts_and_signs(text: str, kinds: list[str]) -> None:
    assert [classify(piece) for piece in _pieces()(text)] == kinds


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("a/b.py", ".py"),
        ("stdlib:json/tool.py", ".py"),
        ("b.PY#2", ".py"),
        ("c.jsonl.gz:17", ".jsonl"),
        ("c.jsonl:17#3", ".jsonl"),
        ("d.tar.zst", ".tar"),
        ("Makefile", ""),
        ("folder.d/README", ""),
    ],
)
def test_kinds_of_file(source: str, kind: str) -> None:
    assert kind_of(source) == kind


@pytest.mark.parametrize("documents", [[], [("", "a.py")]])
def test_nothing_to_audit_is_refused(documents) -> None:
    with pytest.raises(InputError, match="no text to audit"):
        audit({"bytes": Bytes()}, documents)
