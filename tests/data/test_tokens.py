"""Documents' tokens on disk: what is written is what is read, and what is damaged is told."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.data import shards
from sublayer.data.readers import Document
from sublayer.data.shards import Tokens, write
from sublayer.data.tokens import fingerprint
from sublayer.errors import InputError
from sublayer.text import Bytes, load_tokenizer
from tests.data.corpora import ABC, MARKED, files, held_texts, naive, named
from tests.data.tokenizer import END, Letters

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
