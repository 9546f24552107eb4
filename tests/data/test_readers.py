"""Documents from what lies on disk."""

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from sublayer.data import readers
from sublayer.data.readers import Document, Seen, documents, measure
from sublayer.errors import InputError, UsageError


def texts(*paths: Path | str, **options) -> list[str]:
    return [document.text for document in documents(paths, **options)]


def sources(*paths: Path | str, **options) -> list[str]:
    return [document.source for document in documents(paths, **options)]


def lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def filled(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


# Folders, files and globs


def test_a_folder_is_read_in_the_order_of_names_without_what_is_no_text(tmp_path: Path) -> None:
    filled(tmp_path, {
        "b.txt": b"b", "a/z.py": b"az", "a/b/c.md": b"abc", "c": b"c", "B.txt": b"B",
        ".git/config": b"git", ".hidden": b"hidden", "a/__pycache__/m.txt": b"cache", "node_modules/m.js": b"module",
        "env/pyvenv.cfg": b"home", "env/lib/m.py": b"environment", "picture.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR",
        "page.pdf": b"%PDF-1.7\n1 0 obj", "packed": bytes(range(1, 256)), "empty.txt": b"",
    })  # fmt: skip
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    (tmp_path / "circle").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    seen = Seen()
    found = list(documents(tmp_path, seen=seen))
    assert found == [
        Document("B", f"{tmp_path}/B.txt"), Document("abc", f"{tmp_path}/a/b/c.md"),
        Document("az", f"{tmp_path}/a/z.py"), Document("b", f"{tmp_path}/b.txt"), Document("c", f"{tmp_path}/c"),
    ]  # fmt: skip
    assert (seen.documents, seen.binary, seen.empty) == (5, 3, 1)


def test_a_hidden_folder_is_read_where_it_is_named(tmp_path: Path) -> None:
    filled(tmp_path, {".notes/a.txt": b"a"})
    assert texts(tmp_path / ".notes") == ["a"]


def test_paths_are_read_in_the_order_given_and_as_often(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a", "b.txt": b"b"})
    assert texts(tmp_path / "b.txt", tmp_path, str(tmp_path / "b.txt")) == ["b", "a", "b", "b"]
    assert [document.text for document in documents(tmp_path / "b.txt")] == ["b"]


def test_globs(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a", "b.md": b"b", "x/c.txt": b"c", "x/y/d.txt": b"d", ".e.txt": b"e"})
    assert texts(f"{tmp_path}/*.txt") == ["a"]
    assert texts(f"{tmp_path}/**/*.txt") == ["a", "c", "d"]
    assert texts(f"{tmp_path}/**") == ["a", "b", "c", "d"]  # each once, though folders match too
    assert texts(f"{tmp_path}/*") == ["a", "b", "c", "d"]  # folders are read to the bottom
    assert texts(f"{tmp_path}/x/?.txt") == ["c"]
    filled(tmp_path, {"[z].txt": b"z"})
    assert texts(f"{tmp_path}/[z].txt") == ["z"]  # a file of that very name comes first


def test_folders_can_be_left_out(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a", "run/b.txt": b"b", "x/run/c.txt": b"c"})
    assert texts(tmp_path, without=tmp_path / "run") == ["a", "c"]
    assert texts(f"{tmp_path}/**", without=[tmp_path / "x", tmp_path / "run"]) == ["a"]
    assert texts(f"{tmp_path}/*", without=str(tmp_path / "x" / "run")) == ["a", "b"]
    assert measure(tmp_path, without=tmp_path / "run").files == 2


@pytest.mark.parametrize(
    ("files", "name", "line"),
    [
        ({}, "", "no text there$"),
        ({"a": b"", "b": b"\0", "c": b"\0"}, "", r"no text there \(2 binary, 1 empty\)"),
        ({}, "a.txt", "a.txt: no such file or folder"),
        ({}, "*.txt", r"\*.txt: nothing matches"),
        ({"a.txt": b""}, "a.txt", "a.txt: the file is empty"),
        ({"a.txt": b""}, "*.txt", r"\*.txt: no text there \(1 empty\)"),
        ({"a.txt": b"\xef\xbb\xbf"}, "a.txt", r"a.txt: no text there \(1 empty\)"),
        ({"a.bin": b"GIF89a\1\0\1\0"}, "a.bin", "a.bin: a binary file; text, JSON lines and Parquet"),
        ({"a.gz": gzip.compress(b"")}, "a.gz", r"a.gz: no text there \(1 empty\)"),
        ({"a.gz": b"no gzip"}, "a.gz", "a.gz: Not a gzipped file"),
        ({"a.gz": gzip.compress(b"text" * 99)[:-9]}, "a.gz", "a.gz: Compressed file ended"),
        ({"a.gz": gzip.compress(os.urandom(3000))[:-1500]}, "a.gz", "a.gz: Compressed file ended"),
        ({"a.gz": gzip.compress(b"t" * 9)[:-5] + b"wrong"}, "a.gz", "a.gz: (CRC|Incorrect length|Not a gzipped)"),
        ({"a.zst": b"no zstd"}, "a.zst", "a.zst: ZSTD decompress failed"),
        ({"a.zst": zstandard.compress(b"text" * 99)[:-2]}, "a.zst", "a.zst: Truncated compressed stream"),
        ({"a.parquet": b"no parquet"}, "a.parquet", "a.parquet: not Parquet that can be read"),
        ({"a.jsonl": b"\n\n"}, "a.jsonl", "a.jsonl: no text there"),
    ],
)
def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path, files: dict[str, bytes], name: str, line: str) -> None:
    filled(tmp_path, files)
    with pytest.raises(InputError, match=line):
        texts(tmp_path / name)


def test_paths_are_looked_up_before_anything_is_read(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a"})
    with pytest.raises(InputError, match="no such file"):
        documents([tmp_path / "a.txt", tmp_path / "b.txt"])
    with pytest.raises(InputError, match="the list of paths is empty"):
        documents([])
    with pytest.raises(UsageError, match=r"bad_bytes='ignore': no such policy \(known: error, replace, skip\)"):
        documents(tmp_path, bad_bytes=cast(Any, "ignore"))


def test_a_pipe_is_refused_and_does_not_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: not a regular file"):
        documents(tmp_path / "pipe")


def test_a_file_that_vanishes_in_between_is_named(tmp_path: Path) -> None:
    found = documents(filled(tmp_path, {"a.txt": b"a"}) / "a.txt")
    (tmp_path / "a.txt").unlink()
    with pytest.raises(InputError, match="a.txt: No such file or directory"):
        next(found)


def test_a_name_that_is_not_utf8_can_be_written_down(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff.txt")).write_text("a")
    assert sources(tmp_path) == [f"{tmp_path}/\ufffd.txt"]


def test_the_standard_library() -> None:
    found = list(documents("stdlib:"))
    names = [document.source for document in found]
    assert {"stdlib:json/decoder.py", "stdlib:os.py"} <= set(names)
    assert not [name for name in names if "/test" in name or "site-packages" in name or "_sysconfigdata" in name]
    assert all(name.startswith("stdlib:") and name.endswith(".py") for name in names)
    assert sum(len(document.text) for document in found) > 5_000_000
    assert measure("stdlib:").files >= len(found)


def test_files_of_the_library_that_test_other_encodings_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path, {"a.py": b"a", "b.py": b"b = '\xff'", "c.txt": b"c", "test/d.py": b"d", "e/f.py": b"f"})
    monkeypatch.setattr(readers.sysconfig, "get_path", lambda name: str(tmp_path))
    assert list(documents("stdlib:")) == [Document("a", "stdlib:a.py"), Document("f", "stdlib:e/f.py")]


def test_an_installation_without_sources_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers.sysconfig, "get_path", lambda name: str(tmp_path / "missing"))
    with pytest.raises(InputError, match="stdlib:: no text there; this Python was installed without its sources"):
        texts("stdlib:")


# Text


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_a_byte_order_mark_says_the_encoding_and_joins_no_text(tmp_path: Path, encoding: str) -> None:
    text = "\u20ac\U0001f600 a\r\nb\n" * 5000
    data = (
        text.encode(encoding) if encoding in ("utf-8-sig", "utf-16", "utf-32") else ("\ufeff" + text).encode(encoding)
    )
    (tmp_path / "a.txt").write_bytes(data)
    assert texts(tmp_path / "a.txt") == texts(tmp_path) == [text]


def test_only_the_first_mark_is_one(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf\xef\xbb\xbfa\xef\xbb\xbf")
    assert texts(tmp_path) == ["\ufeffa\ufeff"]


def test_newlines_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n\x0c\x85\n".replace(b"\x85", "\u2028".encode()))
    assert texts(tmp_path) == ["a\r\nb\rc\n\x0c\u2028\n"]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 2**20])
@pytest.mark.parametrize(
    ("data", "byte", "offset"),
    [
        (b"abc\xffdef", "FF", 3),
        ("é€😀".encode() + b"\xc3(", "C3", 9),
        (b"\xef\xbb\xbfab\x80", "80", 5),
        ("é".encode() * 3 + b"\xe2\x82", "E2", 6),  # cut off at the end
        (b"\xff\xfea\0b\0\0\xd8c\0", "00", 6),  # half a surrogate pair in UTF-16
    ],
)
def test_a_bad_byte_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, data: bytes, byte: str, offset: int
) -> None:
    monkeypatch.setattr(readers, "CHUNK", chunk)
    (tmp_path / "a.txt").write_bytes(data)
    with pytest.raises(
        InputError, match=rf"a.txt: byte 0x{byte} at offset {offset} is not UTF-.* bad_bytes=\"replace\""
    ):
        texts(tmp_path)


def test_a_bad_byte_far_into_a_packed_file_has_its_offset_in_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"x" * 3_000_000 + b"\xff" + b"y" * 3_000_000))
    with pytest.raises(InputError, match="offset 3,000,000 "):
        texts(tmp_path)


@given(
    st.lists(st.sampled_from([b"a", b"\n", "é".encode(), "€".encode(), "😀".encode(), b"\xff", b"\xe2\x82", b"\xc3"]))
)
def test_bad_bytes_are_replaced_as_python_replaces_them(tmp_path_factory, parts: list[bytes]) -> None:
    data = b"start" + b"".join(parts)
    path = tmp_path_factory.mktemp("bad") / "a.txt"
    path.write_bytes(data)
    whole = data.decode("utf-8", "replace")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "CHUNK", 2)
        seen = Seen()
        assert texts(path, bad_bytes="replace", seen=seen) == [whole]
        assert seen.bad == whole.count("\ufffd")
        assert seen.left_out == 0
        if not seen.bad:
            assert texts(path, bad_bytes="skip") == texts(path) == [whole]


def test_documents_with_bad_bytes_are_left_out_and_counted(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a\xff\xff", "b.txt": b"b", "c.txt": b"\xffc"})
    seen = Seen()
    assert texts(tmp_path, bad_bytes="skip", seen=seen) == ["b"]
    assert (seen.bad, seen.left_out, seen.documents) == (3, 2, 1)
    with pytest.raises(InputError, match=r"a.txt: no text there \(1 with bytes that are no text\)"):
        texts(tmp_path / "a.txt", bad_bytes="skip")


def test_text_of_another_encoding_is_a_bad_byte_not_a_binary_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Привет, мир\n".encode("koi8-r") * 50)
    with pytest.raises(InputError, match="byte 0xF0 at offset 0 is not UTF-8"):
        texts(tmp_path)


# Long documents


def test_a_long_text_is_cut_at_paragraphs_lines_or_words_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "LONGEST", 20)
    monkeypatch.setattr(readers, "CHUNK", 7)
    (tmp_path / "a.txt").write_text("one two three\n\nfour\nfive six seven eight nine\nten" + "x" * 45, newline="")
    found = list(documents(tmp_path / "a.txt"))
    assert [document.text for document in found] == [
        "one two three\n\n",
        "four\nfive six seven ",
        "eight nine\n",
        "ten" + "x" * 17,
        "x" * 20,
        "x" * 8,
    ]
    assert [document.source for document in found] == [f"{tmp_path}/a.txt#{number}" for number in range(1, 7)]
    (tmp_path / "a.txt").write_text("x" * 20)
    assert sources(tmp_path) == [f"{tmp_path}/a.txt"]  # as long as it may be


@given(st.text(st.sampled_from("ab \n€"), min_size=1, max_size=200), st.integers(1, 9))
def test_pieces_joined_are_the_text(tmp_path_factory, text: str, chunk: int) -> None:
    path = tmp_path_factory.mktemp("long") / "a.txt"
    path.write_text(text, encoding="utf-8", newline="")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(readers, "LONGEST", 16)
        patch.setattr(readers, "CHUNK", chunk)
        found = texts(path)
    assert "".join(found) == text
    assert max(map(len, found)) <= 16


def test_bad_bytes_leave_out_only_their_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST", 8)
    (tmp_path / "a.txt").write_bytes(b"aaa bbb ccc \xff dddd")
    assert texts(tmp_path, bad_bytes="skip") == ["aaa bbb ", "dddd"]


def test_a_long_field_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LONGEST", 8)
    lines(tmp_path / "a.jsonl", [{"text": "short"}, {"text": "a line\nand another"}])
    assert sources(tmp_path / "a.jsonl") == [f"{tmp_path}/a.jsonl:1", *(f"{tmp_path}/a.jsonl:2#{n}" for n in (1, 2, 3))]


# JSON lines


def test_fields_of_json_lines(tmp_path: Path) -> None:
    rows = [{"text": "é\n", "meta": {"body": "b1"}, "a.b": "c1"}, {"text": None, "meta": {"body": "b2"}, "a.b": "c2"},
            {"text": "", "meta": {"body": "b3"}, "a.b": "c3"}]  # fmt: skip
    path = lines(tmp_path / "a.jsonl", rows)
    seen = Seen()
    assert list(documents(path, seen=seen)) == [Document("é\n", f"{path}:1")]
    assert seen.empty == 2
    assert texts(path, field="meta.body") == ["b1", "b2", "b3"]
    assert texts(path, field="a.b") == ["c1", "c2", "c3"]
    assert texts(path, field=None) == [path.read_text(encoding="utf-8")]


def test_json_lines_as_they_come(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"text": "a"}\r\n\n  \n{"text": "\\ud83d\\ude00\xe2\x80\xa8"}\n{"text": "c"}'
    (tmp_path / "a.NDJSON").write_bytes(data)
    assert list(documents(tmp_path / "a.NDJSON")) == [
        Document("a", f"{tmp_path}/a.NDJSON:1"), Document("\U0001f600\u2028", f"{tmp_path}/a.NDJSON:4"),
        Document("c", f"{tmp_path}/a.NDJSON:5"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{'text': 1}", "a.jsonl:2: not JSON: Expecting property name enclosed in double quotes at column 2"),
        (b'{"text": "a', "a.jsonl:2: not JSON: Invalid control character at column 12"),
        (b'["text"]', "a.jsonl:2: expected a JSON object with the field 'text', found list"),
        (b'{"txt": "a", "id": 3}', r"a.jsonl:2: no field 'text' \(did you mean 'txt'\?\)"),
        (b'{"text": 3}', "a.jsonl:2: field 'text' is not a string but of type int"),
        (b'{"text": "\\ud83d"}', "a.jsonl:2: field 'text' holds a lone surrogate"),
        (b'{"text": "a\xff"}', "a.jsonl:2: byte 0xFF at offset 25 is not UTF-8"),
        (b"[" * 100_000, "a.jsonl:2: JSON that cannot be read"),
        (b'{"text": ' + b"1" * 5000 + b"}", "a.jsonl:2: JSON that cannot be read: Exceeds the limit"),
        (b'{"text": "' + b"x" * 300_000 + b'"}', "a.jsonl:2: a line of more than 200,000 bytes; are these JSON lines?"),
    ],
)
def test_a_bad_line_is_told_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: bytes, says: str
) -> None:
    monkeypatch.setattr(readers, "LONGEST_LINE", 200_000)
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n' + line + b"\n")
    found = documents(tmp_path)
    assert next(found).text == "a"
    with pytest.raises(InputError, match=says):
        next(found)


def test_a_dotted_field_that_is_missing_is_told(tmp_path: Path) -> None:
    lines(tmp_path / "a.jsonl", [{"meta": {"bdy": "a"}}])
    with pytest.raises(InputError, match=r"no field 'meta.body' \(did you mean 'bdy'\?\)"):
        texts(tmp_path, field="meta.body")


def test_what_is_no_text_in_json_lines_is_replaced_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\xff"}\n{"text": "b\\udcff\\ud83d"}\n{"text": "c"}\n')
    seen = Seen()
    assert texts(tmp_path, bad_bytes="replace", seen=seen) == ["a\ufffd", "b\ufffd\ufffd", "c"]
    assert seen.bad == 3
    assert texts(tmp_path, bad_bytes="skip") == ["c"]


def test_json_lines_in_utf16_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes('{"text": "a"}'.encode("utf-16"))
    with pytest.raises(InputError, match="a.jsonl: UTF-16-LE, but JSON lines are UTF-8"):
        texts(tmp_path)


# Parquet


@pytest.fixture
def table() -> pa.Table:
    return pa.table({
        "text": ["a", None, "", "d\n"],
        "large": pa.array(["la", "lb", "lc", "ld"], pa.large_string()),
        "choice": pa.array(["x", "y", "x", "x"]).dictionary_encode(),
        "bytes": [b"p", "é".encode(), b"\xff", b"s"],
        "meta": [{"lang": "en", "body": "m1"}, None, {"lang": "de", "body": None}, {"lang": "fr", "body": "m4"}],
        "number": [1, 2, 3, 4],
    })  # fmt: skip


def test_columns_of_parquet(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    path = tmp_path / "a.parquet"
    assert list(documents(path)) == [Document("a", f"{path}:1"), Document("d\n", f"{path}:4")]
    assert texts(path, field="large") == ["la", "lb", "lc", "ld"]
    assert texts(path, field="choice") == ["x", "y", "x", "x"]
    assert list(documents(path, field="meta.body")) == [Document("m1", f"{path}:1"), Document("m4", f"{path}:4")]
    assert texts(path, field="bytes", bad_bytes="replace") == ["p", "é", "\ufffd", "s"]
    with pytest.raises(InputError, match="a.parquet:3: byte 0xFF at offset 0 is not UTF-8"):
        texts(path, field="bytes")


@pytest.mark.parametrize(
    ("field", "line"),
    [
        ("txt", r"a.parquet: no column 'txt' \(did you mean 'text'\?\)"),
        ("meta.bdy", r"a.parquet: no column 'meta.bdy' \(did you mean 'body'\?\)"),
        ("text.body", "a.parquet: no column 'text.body'"),
        ("number", "a.parquet: column 'number' is not of strings but of int64"),
        ("meta", "a.parquet: column 'meta' is not of strings but of struct"),
    ],
)
def test_a_column_that_is_not_there_or_not_of_text(tmp_path: Path, table: pa.Table, field: str, line: str) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match=line):
        texts(tmp_path, field=field)


def test_parquet_without_a_field_is_a_binary_file(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(InputError, match="a binary file"):
        texts(tmp_path / "a.parquet", field=None)


def test_damaged_parquet_gives_one_line(tmp_path: Path, table: pa.Table) -> None:
    pq.write_table(table, tmp_path / "a.parquet")
    data = (tmp_path / "a.parquet").read_bytes()
    failures = []
    for at in range(0, len(data), 11):
        (tmp_path / "a.parquet").write_bytes(data[:at] + bytes([data[at] ^ 0x55]) + data[at + 1 :])
        try:
            texts(tmp_path / "a.parquet")
        except InputError as error:
            failures.append(str(error))
    assert len(failures) > 10
    assert [line for line in failures if "a.parquet" not in line] == []


# Packed files


@pytest.mark.parametrize("ending", [".gz", ".zst"])
def test_packed_files_are_read_as_what_they_hold(tmp_path: Path, table: pa.Table, ending: str) -> None:
    pack = gzip.compress if ending == ".gz" else zstandard.compress
    pq.write_table(table, tmp_path / "table")
    filled(tmp_path / "in", {
        f"a.txt{ending}": pack(b"a\n" * 9) + pack("€".encode() * 3),  # two members, as `cat` makes them
        f"b.jsonl{ending}": pack(b'{"text": "b"}\n{"text": "c"}\n'),
        f"c.parquet{ending}": pack((tmp_path / "table").read_bytes()),
        f"d.tar{ending}": pack(b"name" + bytes(508)),
        f"e{ending.upper()}": pack(b"e"),
    })  # fmt: skip
    seen = Seen()
    found = list(documents(tmp_path / "in", seen=seen))
    assert [document.text for document in found] == ["a\n" * 9 + "€€€", "b", "c", "a", "d\n", "e"]
    assert [document.source.rpartition("/")[2] for document in found] == [
        f"a.txt{ending}", f"b.jsonl{ending}:1", f"b.jsonl{ending}:2",
        f"c.parquet{ending}:1", f"c.parquet{ending}:4", f"e{ending.upper()}",
    ]  # fmt: skip
    assert seen.binary == 1


# What was read, and how much there is


def test_what_was_read_goes_up_to_what_was_measured(tmp_path: Path, table: pa.Table) -> None:
    filled(tmp_path, {"a.txt": b"a" * 5000, "b.txt.gz": gzip.compress(b"b" * 5000), "c.bin": bytes(100), "d.txt": b""})
    lines(tmp_path / "e.jsonl", [{"text": "e" * 100}] * 2000)
    pq.write_table(pa.table({"text": [str(n) * 100 for n in range(2000)]}), tmp_path / "f.parquet", row_group_size=100)
    total = measure(tmp_path)
    assert total.files == 6
    assert total.bytes == sum(path.stat().st_size for path in tmp_path.iterdir())
    seen = Seen()
    steps = [seen.bytes for _ in documents(tmp_path, seen=seen)]
    assert steps == sorted(steps)
    assert len({step for step in steps if step > total.bytes // 10}) > 10  # long files count bit by bit
    assert seen.bytes == total.bytes
    assert seen.documents == len(steps) == 4002


def test_the_stamp_changes_with_any_file(tmp_path: Path) -> None:
    filled(tmp_path, {"a.txt": b"a", "b.txt": b"b"})
    os.utime(tmp_path / "a.txt", (1, 1))
    before = measure(tmp_path)
    assert measure(tmp_path) == before
    os.utime(tmp_path / "a.txt", (2, 2))
    touched = measure(tmp_path)
    (tmp_path / "b.txt").rename(tmp_path / "c.txt")
    renamed = measure(tmp_path)
    assert len({before.stamp, touched.stamp, renamed.stamp}) == 3
    assert before[:2] == touched[:2] == renamed[:2]


# Memory

READ = """
import resource, sys
from sublayer.data.readers import documents
import pyarrow.parquet, json, gzip
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
size = sum(len(document.text) for document in documents(sys.argv[1]))
print(size, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def read_alone(path: Path) -> tuple[int, int]:
    """(characters, bytes that memory grew by) of a process that reads path."""
    done = subprocess.run([sys.executable, "-c", READ, path], capture_output=True, text=True, check=True)
    size, grown = map(int, done.stdout.split())
    return size, grown


def test_a_bomb_does_not_fill_memory(tmp_path: Path) -> None:
    packer = zstandard.ZstdCompressor().compressobj()
    with open(tmp_path / "a.txt.zst", "wb") as file:
        for _ in range(200):
            file.write(packer.compress(b"aaaaaaa\n" * 2**17))
        file.write(packer.flush())
    assert (tmp_path / "a.txt.zst").stat().st_size < 100_000
    size, grown = read_alone(tmp_path / "a.txt.zst")
    assert size == 200 * 2**20
    assert grown < 100e6


def test_a_line_that_is_a_bomb_is_refused_before_it_fills_memory(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"[" * 2**20, 1) * 300)
    code = READ.replace("size = ", "size = 0\ntry: ").replace(
        "\nprint", "\nexcept Exception as error: text = str(error)\nprint"
    )
    done = subprocess.run(
        [sys.executable, "-c", code + "\nprint(text)", tmp_path / "a.jsonl.gz"],
        capture_output=True,
        text=True,
        check=True,
    )
    numbers, message = done.stdout.splitlines()
    assert "a.jsonl.gz:1: a line of more than 67,108,864 bytes" in message
    assert int(numbers.split()[1]) < 250e6


@pytest.mark.slow
def test_large_files_of_every_kind_take_little_memory(tmp_path: Path) -> None:
    paragraph = ("A line of some text, number {} of many.\n" * 200).encode()
    with open(tmp_path / "a.txt", "wb") as text, gzip.open(tmp_path / "b.jsonl.gz", "wb", 1) as packed:
        writer = pq.ParquetWriter(tmp_path / "c.parquet", pa.schema({"text": pa.string()}))
        for _ in range(10):
            rows = [paragraph.decode()] * 2500
            text.write(paragraph * 2500)
            packed.write((json.dumps({"text": rows[0]}) + "\n").encode() * 2500)
            writer.write_table(pa.table({"text": rows}))
        writer.close()
    for name in ("a.txt", "b.jsonl.gz", "c.parquet"):
        size, grown = read_alone(tmp_path / name)
        assert size == 25000 * len(paragraph)  # 200 MB
        assert grown < 120e6, name
