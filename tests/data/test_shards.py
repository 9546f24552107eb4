"""Documents' tokens on disk: what is written is what is read, and no interruption leaves less."""

import errno
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.data import shards, writer
from sublayer.data.readers import Document
from sublayer.data.shards import Progress, Tokens, prepare, write
from sublayer.data.tokens import fingerprint
from sublayer.errors import InputError, SublayerError, UsageError
from sublayer.text import Bytes, load_tokenizer
from tests.data.tokenizer import END, Letters

ABC = Letters("abc", 3)
MARKED = Letters("abc", 4, eos=(3,))


def named(texts: Sequence[str]) -> list[Document]:
    return [Document(text, f"docs/é{number}.txt") for number, text in enumerate(texts)]


def naive(texts: Sequence[str]) -> list[int]:
    return list(chain.from_iterable([256, *text.encode()] for text in texts))


def held_texts(tokens: Tokens) -> list[str]:
    """The documents, read back from their bytes."""
    return [END.decode(tokens.document(number).tolist()) for number in range(tokens.documents)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def many(count: int, size: int = 40) -> list[Document]:
    """Documents no two of which are alike."""
    return [Document(f"document {number}\n" * (size // 12), f"{number}") for number in range(count)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of progress as if twenty documents were a large corpus."""
    monkeypatch.setattr(shards, "GROUP", 200)
    monkeypatch.setattr(shards, "RECORD", 1000)


# On disk


def test_the_files_to_the_byte(tmp_path: Path) -> None:
    documents = [Document("abca", "x"), Document("", "nothing"), Document("cc", "é.txt")]
    tokens = write(documents, MARKED, tmp_path, shard_tokens=3)
    index = json.loads((tmp_path / "index.json").read_text())
    assert index == {
        "spec": "TokensIndex", "build": index["build"], "tokens": 8, "documents": 2, "bytes": 6, "vocab": 4, "eos": [3],
        "tokenizer": fingerprint(MARKED), "shard_tokens": 3, "sources": "", "split": "", "format": 1,
    }  # fmt: skip
    found = files(tmp_path / index["build"])
    assert found == {
        "tokens-00000.bin": bytes([3, 0, 0, 0, 1, 0]),
        "tokens-00001.bin": bytes([2, 0, 0, 0, 3, 0]),
        "tokens-00002.bin": bytes([2, 0, 2, 0]),
        "starts.bin": np.array([0, 5, 8], "<i8").tobytes(),
        "bytes.bin": np.array([0, 4, 6], "<i8").tobytes(),
        "names.bin": np.array([0, 1, 7], "<i8").tobytes(),
        "sources.txt": "xé.txt".encode(),
    }
    assert {path.name for path in tmp_path.iterdir()} == {"index.json", index["build"]}
    assert (len(tokens), tokens.documents, tokens.bytes) == (8, 2, 6)
    assert tokens.where(6) == "é.txt, token 1 of 3"
    assert [tokens.bytes_before(position) for position in (0, 4, 5, 8)] == [0, 3, 4, 6]


@settings(max_examples=25)
@given(
    st.lists(st.text("aé€\n", min_size=1, max_size=9), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 30)
)
def test_what_is_written_is_read(tmp_path_factory, texts: list[str], shard: int, group: int) -> None:
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shards, "GROUP", group)
        write(iter(named(texts)), END, folder, shard_tokens=shard)
    tokens, expected = Tokens.open(folder), naive(texts)
    starts = [at for at, token in enumerate(expected) if token == 256]
    assert len(tokens) == len(expected)
    for start in range(len(expected)):
        for stop in (start + 1, start + 5, len(expected)):
            if stop <= len(expected):
                assert tokens.read(start, stop).tolist() == expected[start:stop]
                assert tokens.begins(start, stop).tolist() == [at - start for at in starts if start < at < stop]
        number = sum(at <= start for at in starts) - 1
        assert tokens.number(start) == number
        size = len(texts[number].encode()) + 1
        assert tokens.where(start) == f"docs/é{number}.txt, token {start - starts[number]} of {size}"
    assert held_texts(tokens) == texts
    assert np.diff(tokens.offsets).tolist() == [len(text.encode()) for text in texts]
    assert tokens.bytes == tokens.bytes_before(len(tokens)) == len("".join(texts).encode())
    assert [tokens.bytes_before(at) for at in starts] == tokens.offsets[:-1].tolist()


def test_ids_take_two_bytes_up_to_65536_and_four_beyond(tmp_path: Path) -> None:
    for size, width in ((65_536, 2), (65_537, 4)):
        tokenizer = Letters("ab", size, step=size - 1)
        tokens = write([Document("abb", "x")], tokenizer, tmp_path / str(size))
        assert tokens.read(0, 3).tolist() == [0, size - 1, size - 1]
        data = (tokens.files / "tokens-00000.bin").read_bytes()
        assert data == b"".join(id.to_bytes(width, "little") for id in (0, size - 1, size - 1))


def test_only_the_first_of_several_ends_is_written(tmp_path: Path) -> None:
    tokens = write(named(["ab", "c"]), Letters("abc", 5, eos=(4, 3)), tmp_path)
    assert tokens.read(0, 5).tolist() == [4, 0, 1, 4, 2]


def test_without_an_end_documents_are_told_apart_by_where_they_start(tmp_path: Path) -> None:
    tokens = write(named(["ab", "c", "ba"]), ABC, tmp_path)
    assert tokens.read(0, 5).tolist() == [0, 1, 2, 1, 0]
    assert tokens.starts.tolist() == [0, 2, 3, 5]
    assert [tokens.number(position) for position in range(5)] == [0, 0, 1, 2, 2]
    assert tokens.begins(1, 5).tolist() == [1, 2]
    assert tokens.begins(0, 2).tolist() == tokens.begins(2, 3).tolist() == []


def test_reading_outside_is_refused(tmp_path: Path) -> None:
    tokens = write(named(["ab"]), ABC, tmp_path)
    assert tokens.read(1, 1).tolist() == tokens.read(2, 2).tolist() == []
    for start, stop in ((-1, 1), (1, 3), (2, 1)):
        with pytest.raises(IndexError):
            tokens.read(start, stop)
    assert tokens.document(-1).tolist() == [0, 1]
    with pytest.raises(IndexError):
        tokens.document(1)


@pytest.mark.parametrize("size", [2, 1])
def test_a_tokenizer_that_makes_ids_it_does_not_have_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(InputError, match=f"made the id 2, and its ids are 0 to {size - 1}"):
        write(named(["abc"]), Letters("abc", size), tmp_path)
    with pytest.raises(InputError, match="made the id -1"):
        write(named(["ab"]), Letters("ab", 3, step=-1), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_there_have_to_be_documents(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there are no documents to write"):
        write([], END, tmp_path)
    with pytest.raises(InputError, match="there are no documents to write"):
        write([Document("", "empty")], END, tmp_path)


def test_a_name_that_is_no_text_is_written_all_the_same(tmp_path: Path) -> None:
    assert write([Document("a", "\udcff")], END, tmp_path).source(0) == "?"


# Opening


@pytest.fixture
def written(tmp_path: Path) -> Tokens:
    return write(named(["ab", "cab"]), MARKED, tmp_path / "data", shard_tokens=5)


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        (
            "tokens-00001.bin",
            b"\0\0",
            "tokens-00001.bin: damaged: 2 bytes, and its index says 4; write the documents again",
        ),
        ("tokens-00000.bin", bytes(12), "tokens-00000.bin: damaged: 12 bytes, and its index says 10"),
        ("tokens-00001.bin", None, "tokens-00001.bin: missing; write the documents again"),
        ("starts.bin", bytes(23), "starts.bin: damaged: 23 bytes, and its index says 24"),
        ("starts.bin", bytes(24), "starts.bin: damaged: it runs from 0 to 0, not from 0 to 7"),
        ("bytes.bin", np.array([0, 2, 6], "<i8").tobytes(), "bytes.bin: damaged: it runs from 0 to 6, not from 0 to 5"),
        ("sources.txt", b"", "names.bin: damaged: it runs from 0 to 24, not from 0 to 0"),
        ("sources.txt", None, "names.bin: damaged"),
    ],
)
def test_damaged_files_are_named(written: Tokens, name: str, data: bytes | None, line: str) -> None:
    if data is None:
        (written.files / name).unlink()
    else:
        (written.files / name).write_bytes(data)
    with pytest.raises(InputError, match=line):
        Tokens.open(written.folder)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"tokens": 8}, "damaged"),
        ({"tokens": 2**59, "shard_tokens": 1}, "starts.bin: damaged"),
        ({"tokens": -1}, "tokens and documents do not fit together"),
        ({"documents": 0}, "tokens and documents do not fit together"),
        ({"documents": 2.0}, "TokensIndex.documents: expected"),
        ({"vocab": 0}, "vocab is not a number of ids"),
        ({"vocab": 2**16 + 1}, "tokens-00000.bin: damaged"),
        ({"eos": [4]}, "eos is not in the vocabulary"),
        ({"shard_tokens": 0}, "shard_tokens is not a length"),
        ({"bytes": -1}, "bytes is negative"),
        ({"format": 2}, "format 2, this version reads 1"),
        ({"build": "../../etc"}, "build is not the name of one"),
        ({"build": "0" * 16}, "missing"),
        ({"sise": 1}, "sise: unknown key"),
    ],
)
def test_an_index_that_is_wrong_is_refused(written: Tokens, change: dict[str, Any], line: str) -> None:
    path = written.folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match=line):
        Tokens.open(written.folder)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b"\xff", b"[" * 10_000])
def test_an_index_that_is_none_is_refused(written: Tokens, data: bytes) -> None:
    (written.folder / "index.json").write_bytes(data)
    with pytest.raises(InputError, match="index.json: not an index of documents' tokens"):
        Tokens.open(written.folder)


def test_an_index_is_not_read_without_end(written: Tokens) -> None:
    path = written.folder / "index.json"
    path.write_bytes(path.read_bytes() + b" " * 2**20)
    with open(path, "ab") as file:
        file.write(b"!")
    assert len(Tokens.open(written.folder)) == 7  # what stands that far behind is never seen


def test_a_folder_without_tokens_says_whether_there_was_a_beginning(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no documents' tokens: there is no index.json"):
        Tokens.open(tmp_path)
    (tmp_path / "partial.json").touch()
    for folder in (tmp_path, tmp_path / "train"):
        with pytest.raises(InputError, match="only half written; write them again to go on: there is no index.json"):
            Tokens.open(folder)


def test_ids_outside_the_vocabulary_are_told_with_their_place(written: Tokens) -> None:
    (written.files / "tokens-00001.bin").write_bytes(bytes([1, 0, 4, 0]))
    tokens = Tokens.open(written.folder)
    assert tokens.read(0, 6).tolist() == [3, 0, 1, 3, 2, 1]
    for start in (0, 3, 6):
        with pytest.raises(InputError, match="token 6 is 4, and the vocabulary has 4 ids"):
            tokens.read(start, 7)


def test_starts_that_are_out_of_order_are_told(written: Tokens) -> None:
    (written.files / "starts.bin").write_bytes(np.array([0, 900, 7], "<i8").tobytes())
    with pytest.raises(InputError, match="starts.bin: damaged: documents are not one after the other"):
        Tokens.open(written.folder).begins(0, 1000)


# Which tokenizer


def test_the_fingerprint_is_that_of_the_ids(tmp_path: Path) -> None:
    Bytes(("<|end|>",)).save(tmp_path)
    assert fingerprint(load_tokenizer(tmp_path)) == fingerprint(END) == fingerprint(Bytes(("another name",)))
    others = [Bytes(), Bytes(("<|end|>", "<|more|>")), ABC, MARKED, Letters("acb", 3), Letters("abc", 4, eos=(2,))]
    assert len({fingerprint(other) for other in [END, *others]}) == 7


def test_tokenizers_of_one_vocabulary_differ_by_what_they_encode() -> None:
    class Lower(Bytes):
        def encode(self, text: str, **options: Any) -> list[int]:
            return super().encode(text.lower(), **options)

    assert fingerprint(Lower()) != fingerprint(Bytes())


def test_the_wrong_tokenizer_is_told(written: Tokens) -> None:
    written.check(Letters("abc", 4, eos=(3,)))
    with pytest.raises(InputError, match="written with a tokenizer of 4 ids, and this one is 257 ids"):
        written.check(END)
    with pytest.raises(
        InputError, match="written with a tokenizer of 4 ids, and this one is another one of the same size"
    ):
        written.check(Letters("acb", 4, eos=(3,)))


# Writing anew


def test_what_was_there_is_readable_until_all_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "GROUP", 1)
    old = write(named(["old", "older"]), END, tmp_path)
    during: list[list[str]] = []
    write(
        named(["new", "newer", "newest"]),
        END,
        tmp_path,
        progress=lambda _: during.append(held_texts(Tokens.open(tmp_path))),
    )
    assert during == [["old", "older"]] * 3
    assert held_texts(Tokens.open(tmp_path)) == ["new", "newer", "newest"]
    assert old.read(0, 4).tolist() == [256, *b"old"]  # its files are gone, but not for who has them open
    assert len(list(tmp_path.iterdir())) == 2


def test_a_writing_that_fails_leaves_what_was_there_and_nothing_else(tmp_path: Path) -> None:
    write(named(["old"]), END, tmp_path)
    before = files(tmp_path)

    def damaged():
        yield from named(["new"] * 5000)
        raise InputError("a bad byte")

    with pytest.raises(InputError, match="a bad byte"):
        write(damaged(), END, tmp_path)
    assert files(tmp_path) == before


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(named(["old"]), END, tmp_path / "data")
    before = files(tmp_path)
    real, room = writer.put, [7]

    def put(file: Any, values: np.ndarray) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, values)

    monkeypatch.setattr(writer, "put", put)
    with pytest.raises(SublayerError, match="data: No space left on device; what was written before is kept"):
        write(named(["new"]), END, tmp_path / "data")
    assert files(tmp_path) == before


def test_a_folder_that_cannot_be_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SublayerError, match="file: File exists"):
        write(named(["a"]), END, tmp_path / "file")
    with pytest.raises(SublayerError, match="below: Not a directory"):
        prepare(named(["a"]), END, tmp_path / "file" / "below")


def test_a_write_that_takes_less_than_all_goes_on() -> None:
    class Slow:
        data = b""

        def write(self, data: memoryview) -> int:
            self.data += bytes(data[:3])
            return min(len(data), 3)

    file = Slow()
    writer.put(file, np.arange(5, dtype="<u4"))  # type: ignore[arg-type]
    assert file.data == np.arange(5, dtype="<u4").tobytes()


# Held out


@pytest.mark.usefixtures("small")
def test_the_text_alone_decides_which_side_a_document_is_on(tmp_path: Path) -> None:
    documents = many(400)
    train, held = prepare(documents, END, tmp_path / "a", held=0.2)
    sides = {**dict.fromkeys(held_texts(train), 0), **dict.fromkeys(held_texts(held), 1)}
    assert train.documents + held.documents == len(sides) == 400
    assert 56 < held.documents < 104  # 80 is expected, with a deviation of 8
    assert train.index.split == held.index.split == "documents"
    again, held_again = prepare(
        [*many(600)[::-1], *documents], END, tmp_path / "b", held=0.2
    )  # others, copies, reversed
    assert all(sides.get(text, 0) == 0 for text in held_texts(again))
    assert all(sides.get(text, 1) == 1 for text in held_texts(held_again))
    more = set(held_texts(prepare(documents, END, tmp_path / "c", held=0.3)[1]))
    assert set(held_texts(held)) < more  # a larger share only adds


def test_both_sides_keep_the_order_and_the_names(tmp_path: Path) -> None:
    documents = many(300)
    order = {document.text: number for number, document in enumerate(documents)}
    for tokens in prepare(documents, END, tmp_path, held=0.1):
        numbers = [order[text] for text in held_texts(tokens)]
        assert numbers == sorted(numbers)
        assert [tokens.source(number) for number in range(tokens.documents)] == [str(number) for number in numbers]
        assert tokens.bytes == sum(map(len, held_texts(tokens)))


def test_a_single_document_is_cut_at_the_beginning_of_a_line(tmp_path: Path) -> None:
    text = "".join(f"line {number:04}\n" for number in range(1000))  # of 10 characters
    lines: list[str] = []
    train, held = prepare([Document(text, "a.txt")], END, tmp_path, held=0.0996, say=lines.append)
    assert held_texts(train) + held_texts(held) == [text[:9000], text[9000:]]  # the line in which character 9,004 is
    assert train.source(0) == "a.txt[:9000]"
    assert held.source(0) == "a.txt[9000:]"
    assert (train.bytes, held.bytes, held.index.split) == (9000, 1000, "cut")
    assert "too few documents to hold some out whole, so the last 0.0996 of the text is held out" in lines[0]


def test_text_in_one_line_is_cut_to_the_character(tmp_path: Path) -> None:
    train, held = prepare([Document("é" * 1000, "a")], END, tmp_path, held=0.1)
    assert held_texts(train) + held_texts(held) == ["é" * 900, "é" * 100]
    assert (train.bytes, held.bytes) == (1800, 200)


def test_a_few_documents_are_cut_where_the_share_begins(tmp_path: Path) -> None:
    text = "ab\n" * 20  # copies, all of which would be on one side
    train, held = prepare(named([text] * 5), END, tmp_path, held=0.3)
    assert held_texts(train) == [text, text, text, text[:30]]
    assert held_texts(held) == [text[30:], text]
    assert [held.source(number) for number in range(2)] == ["docs/é3.txt[30:]", "docs/é4.txt"]
    train, held = prepare(named([text] * 5), END, tmp_path, held=0.2)
    assert (train.documents, held.documents) == (4, 1)


@pytest.mark.parametrize("held", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(tmp_path: Path, held: float) -> None:
    with pytest.raises(UsageError, match="the share to hold out is more than 0 and less than 1"):
        prepare(named(["a"]), END, tmp_path, held=held)


def test_too_little_text_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="too little text to hold out a share of 0.05: 1 characters"):
        prepare(named(["a"]), END, tmp_path)
    with pytest.raises(UsageError, match="documents and paths in one list"):
        prepare([*named(["a"]), "b.txt"], END, tmp_path)  # type: ignore[list-item]


# Used again


class Counting(Bytes):
    """Counts the texts that it is asked to encode."""

    count = 0

    def encode_batch(self, texts: Sequence[str], **options: Any) -> list[Any]:
        Counting.count += len(texts)
        return super().encode_batch(texts, **options)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(Counting, "count", 0)
    return Counting(("<|end|>",))


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for document in many(200):
        (folder / f"{document.source}.txt").write_text(document.text)
    return folder


def test_what_is_there_is_used_again(tmp_path: Path, corpus: Path, counting: Counting) -> None:
    lines: list[str] = []
    first = prepare(corpus, counting, tmp_path / "data", say=lines.append)
    before = files(tmp_path / "data")
    again = prepare(corpus, counting, tmp_path / "data", say=lines.append)
    assert counting.count == 200
    assert files(tmp_path / "data") == before
    assert [len(tokens) for tokens in again] == [len(tokens) for tokens in first]
    counts = f"{len(first[0]):,} tokens of {first[0].documents} documents to train on, {len(first[1]):,} of "
    assert [line.split(": ")[1] for line in lines] == [
        f"{counts}{first[1].documents} held out", f"used again, {counts}{first[1].documents} held out"
    ]  # fmt: skip
    for left in (".partial.json.999999999.partial", "held/.index.json.999999999.partial", "partial.json"):
        (tmp_path / "data" / left).touch()
    (tmp_path / "data" / "train" / ("0" * 16)).mkdir()
    prepare(corpus, counting, tmp_path / "data")
    assert files(tmp_path / "data") == before  # what a kill at the very end has left is removed
    assert len(list((tmp_path / "data" / "train").iterdir())) == 2


def test_a_cut_is_used_again_too(tmp_path: Path, counting: Counting) -> None:
    for _ in range(2):
        prepare([Document("line\n" * 100, "a")], counting, tmp_path)
    assert counting.count == 3  # once whole, then its two parts


@pytest.mark.parametrize("change", ["content", "date", "name", "another", "held", "tokenizer", "shard"])
def test_any_change_writes_anew(tmp_path: Path, corpus: Path, counting: Counting, change: str) -> None:
    prepare(corpus, counting, tmp_path / "data")
    options: dict[str, Any] = {}
    if change == "content":
        (corpus / "7.txt").write_text("new")
    elif change == "date":
        os.utime(corpus / "7.txt", (7, 7))
    elif change == "name":
        (corpus / "7.txt").rename(corpus / "x.txt")
    elif change == "another":
        (corpus / "x.txt").write_text("new")
    elif change == "held":
        options["held"] = 0.3
    elif change == "tokenizer":
        counting = Counting(("<|end|>", "<|more|>"))
    else:
        options["shard_tokens"] = 1000
    train, held = prepare(corpus, counting, tmp_path / "data", **options)
    assert counting.count == 400 + (change == "another")
    assert sorted(held_texts(train) + held_texts(held)) == sorted(path.read_text() for path in corpus.iterdir())
    assert {path.name for path in (tmp_path / "data" / "train").iterdir()} == {"index.json", train.index.build}


def test_the_folder_that_is_written_is_no_part_of_the_corpus(tmp_path: Path, corpus: Path, counting: Counting) -> None:
    for _ in range(2):
        prepare(tmp_path, counting, corpus / "data")
    assert counting.count == 200


def test_damaged_tokens_are_written_again(tmp_path: Path, corpus: Path) -> None:
    train, _ = prepare(corpus, END, tmp_path / "data")
    before = files(tmp_path / "data")
    (train.files / "starts.bin").write_bytes(b"")
    there = []
    prepare(corpus, END, tmp_path / "data", progress=lambda _: there.append((train.folder / "index.json").exists()))
    assert files(tmp_path / "data") == before
    assert set(there) == {False}  # nothing names files that are about to change


def test_sides_of_two_writings_are_not_taken_for_one(tmp_path: Path, corpus: Path) -> None:
    for held in (0.1, 0.3):
        prepare(corpus, END, tmp_path / str(held), held=held)
    shutil.copytree(tmp_path / "0.3", tmp_path / "data")
    for side in ("train", "held"):
        shutil.rmtree(tmp_path / "data" / side)
        shutil.copytree(tmp_path / "0.1" / side, tmp_path / "data" / side)
        prepare(corpus, END, tmp_path / "data", held=0.3)
        assert files(tmp_path / "data") == files(tmp_path / "0.3")


# Interrupted


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("documents", [many(200), [Document("same\n" * 20, "a")] * 100], ids=["many", "same"])
def test_an_interrupted_writing_is_gone_on_with(tmp_path: Path, counting: Counting, documents: list[Document]) -> None:
    prepare(documents, END, tmp_path / "whole", shard_tokens=500)
    whole, calls = files(tmp_path / "whole"), 0
    seen: list[Progress] = []
    lines: list[str] = []

    class Interrupted(Counting):
        def encode_batch(self, texts: Sequence[str], **options: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls % 9 == 0:
                raise KeyboardInterrupt
            return super().encode_batch(texts, **options)

    def attempt() -> bool:
        try:
            prepare(
                documents, Interrupted(("<|end|>",)), tmp_path / "data", shard_tokens=500, progress=seen.append,
                say=lines.append,
            )  # fmt: skip
        except KeyboardInterrupt:
            return False
        return True

    while not attempt():
        assert calls < 1000
        with pytest.raises(InputError, match="there is no index.json"):
            Tokens.open(tmp_path / "data" / "train")
    assert files(tmp_path / "data") == whole
    assert calls > 9
    if len(documents) == 200:
        assert 200 < counting.count < 400  # only what came after the last record is encoded again
        assert any("goes on after " in line for line in lines)
        assert seen[-1] == Progress(200, seen[-1].tokens, sum(len(document.text) for document in documents), 1.0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"build": 1}', "sides", "negative", "another", "files", "shard", "sources"]
)
def test_a_record_that_is_not_true_begins_anew(tmp_path: Path, damage: str) -> None:
    documents = many(100)
    prepare(documents, END, tmp_path / "whole", shard_tokens=500)

    def stop(made: Progress) -> None:
        if made.documents > 60:
            raise KeyboardInterrupt

    held = 0.3 if damage == "another" else 0.05
    with pytest.raises(KeyboardInterrupt):
        prepare(documents, END, tmp_path / "data", held=held, shard_tokens=500, progress=stop)
    path = tmp_path / "data" / "partial.json"
    record = json.loads(path.read_text())
    build = tmp_path / "data" / "train" / record["build"]
    if damage == "sides":
        record["sides"].pop()
    elif damage == "negative":
        record["sides"][0]["tokens"] = -1
    elif damage == "files":
        (build / "starts.bin").write_bytes(b"")
    elif damage == "shard":
        (build / "tokens-00000.bin").unlink()
    elif damage == "sources":
        record["read"] = 1000
    path.write_text(json.dumps(record) if damage.isalpha() else damage)
    prepare(documents, END, tmp_path / "data", shard_tokens=500)
    assert files(tmp_path / "data") == files(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_leftovers_of_another_writing_are_removed(tmp_path: Path) -> None:
    def stop(made: Progress) -> None:
        raise KeyboardInterrupt

    for held in (0.1, 0.2):
        with pytest.raises(KeyboardInterrupt):
            prepare(many(100), END, tmp_path, held=held, progress=stop)
    (tmp_path / "train" / "notes").mkdir()  # not ours: it stays
    for left in (".partial.json.999999999.partial", "train/.index.json.999999999.partial"):
        (tmp_path / left).touch()
    train, _ = prepare(many(100), END, tmp_path, held=0.3)
    assert {path.name for path in (tmp_path / "train").iterdir()} == {"index.json", "notes", train.index.build}
    assert {path.name for path in tmp_path.iterdir()} == {"train", "held"}


@pytest.mark.usefixtures("small")
def test_a_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(many(200), END, tmp_path / "whole")
    real, room = writer.put, [0]

    def put(file: Any, values: np.ndarray) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, values)

    monkeypatch.setattr(writer, "put", put)
    failures = 0
    while failures < 100:
        room[0] = 60
        try:
            prepare(many(200), END, tmp_path / "data")
            break
        except SublayerError as error:
            failures += "No space left on device" in str(error)
    assert 2 <= failures < 100
    assert files(tmp_path / "data") == files(tmp_path / "whole")


KILL = Path(__file__).with_name("kill.py")


def killed(folder: Path, first: int, stride: int) -> None:
    command = [sys.executable, str(KILL), str(folder), str(first), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=KILL.parent.parent.parent)
    assert (done.returncode, done.stderr) == (0, "")
    deaths, finished = map(int, done.stdout.split())
    assert deaths > 3  # the test has tested something
    assert finished == 1  # and its last try outlived the writing


def test_a_kill_leaves_the_old_or_the_new_and_the_next_call_finishes(tmp_path: Path) -> None:
    killed(tmp_path, 5, 37)


@pytest.mark.slow
def test_a_kill_at_any_write_or_rename(tmp_path: Path) -> None:
    killed(tmp_path, 1, 1)


@pytest.mark.usefixtures("small")
def test_two_that_prepare_one_folder_wait_for_each_other(tmp_path: Path, counting: Counting) -> None:
    started, go = threading.Event(), threading.Event()
    lines: list[str] = []

    def progress(made: Progress) -> None:
        started.set()
        assert go.wait(30)

    def say(line: str) -> None:
        lines.append(line)
        if "waits" in line:
            go.set()

    first = threading.Thread(target=prepare, args=(many(100), counting, tmp_path), kwargs={"progress": progress})
    first.start()
    assert started.wait(30)
    train, _ = prepare(many(100), counting, tmp_path, say=say)
    first.join()
    assert counting.count == 100
    assert train.documents > 50
    assert "waits for another process that writes there" in lines[0]
    assert "used again" in lines[1]


# Memory

MEMORY = """
import sys
import numpy as np
from sublayer.data import shards
from sublayer.data.shards import prepare
from sublayer.text import Bytes

def private():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

before, most = private(), 0
def progress(made):
    global most
    most = max(most, private())
train, held = prepare(sys.argv[1], Bytes(("<|end|>",)), sys.argv[2], progress=progress)
rng = np.random.default_rng(0)
for at in rng.integers(0, len(train) - 1000, 2000):
    train.read(at, at + 1000), train.where(int(at)), train.begins(at, at + 1000)
print(train.documents + held.documents, train.bytes + held.bytes, max(most, private()) - before)
"""


def memory(source: Path, folder: Path) -> tuple[int, int, int]:
    """(documents, bytes, bytes of its own that a process took to prepare and read them)."""
    done = subprocess.run([sys.executable, "-c", MEMORY, source, folder], capture_output=True, text=True, check=True)
    documents, size, grown = map(int, done.stdout.split())
    return documents, size, grown


def test_a_corpus_larger_than_the_memory_it_takes(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(50_000):
            file.write('{"text": "' + f"line {number} of text; " * 21 + '"}\n')
    documents, size, grown = memory(tmp_path / "a.jsonl", tmp_path / "data")
    assert documents == 50_000
    assert size > 20e6
    assert grown < 50e6


@pytest.mark.slow
def test_neither_many_documents_nor_large_files_take_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(600_000):
            file.write('{"text": "' + str(number) + '"}\n')
    documents, _, few = memory(tmp_path / "a.jsonl", tmp_path / "many")
    assert documents == 600_000
    assert few < 50e6
    (tmp_path / "a.jsonl").unlink()
    with open(tmp_path / "b.txt", "w") as file:
        for number in range(6_000_000):
            file.write(f"a line of text, number {number}\n")
    _, size, large = memory(tmp_path / "b.txt", tmp_path / "large")
    assert size > 180e6
    assert large < 120e6
