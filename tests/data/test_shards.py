"""Writing documents anew, holding some out, and using again what is there."""

import os
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from sublayer.data import shards, writer
from sublayer.data.readers import Document
from sublayer.data.shards import Tokens, prepare, write
from sublayer.errors import InputError, SublayerError, UsageError
from tests.data.corpora import Counting, files, held_texts, many, named
from tests.data.tokenizer import END

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


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, disk: list[float]) -> None:
    write(named(["old"]), END, tmp_path / "data")
    before = files(tmp_path)
    disk[0] = 7
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
    writer.put(cast(Any, file), np.arange(5, dtype="<u4"))
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
        prepare(cast(Any, [*named(["a"]), "b.txt"]), END, tmp_path)


# Used again


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
