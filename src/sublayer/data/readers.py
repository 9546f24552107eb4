"""Documents from files, folders, globs, JSONL fields and Parquet columns, plain or compressed; in bounded memory.

A document is the text of one plain file, of one JSON line's field or of one row's column. Longer ones than LONGEST
characters are cut into several, at a paragraph, else at a line, else at a space; nothing is lost where they are cut.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import io
import json
import os
import shutil
import stat
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple, cast, get_args

from ..errors import InputError, UsageError, nearest

if TYPE_CHECKING:
    import pyarrow as pa

LONGEST = 2**23
"""Characters of the longest document."""

LONGEST_LINE = 2**26
"""Bytes of the longest line of JSONL."""

LIBRARY = "stdlib:"

BadBytes = Literal["error", "replace", "skip"]
Name = str | os.PathLike[str]

CHUNK = 2**20
PEEK = 2**13
JSON_LINES = (".jsonl", ".ndjson")
PACKED = (".gz", ".zst")
NOT_READ = ("pyvenv.cfg", ".sublayer-run")  # a folder with such a file is an environment, or what a run has written
NOT_TEXT = {"__pycache__", "node_modules"}
NOT_LIBRARY = NOT_TEXT | {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
CONTROL = bytes({*range(1, 32), 127} - {*b"\b\t\n\v\f\r\x1b"})  # what text has none of, and compressed data a tenth

# UTF-32's mark begins as UTF-16's does, so it is looked for first.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

# Stands for bytes that are no text, until the policy decides: a lone surrogate, which no decoder yields by itself.
BAD = "\udcff"
codecs.register_error("sublayer.bad", lambda error: (BAD, cast(UnicodeDecodeError, error).end))


class Document(NamedTuple):
    """A text, and where it came from: "path", "path:line", "path:row"; a "#2" after that is its second piece."""

    text: str
    source: str


class Record(NamedTuple):
    """Some values of one JSON line or row, and where it came from."""

    values: tuple[Any, ...]
    source: str


class Size(NamedTuple):
    """How many files, and their bytes on disk; the stamp is another one when any name, size or date has changed."""

    files: int
    bytes: int
    stamp: str


@dataclass
class Seen:
    """What a reading has met so far; `documents` keeps it up to date."""

    bytes: int = 0
    """Of files on disk: bytes / measure(paths).bytes is how far the reading has come."""
    documents: int = 0
    binary: int = 0
    """Files left out because they are not text."""
    empty: int = 0
    """Files, lines and rows left out because their text is empty or null."""
    bad: int = 0
    """Places where bytes were no text: replaced, or their documents left out."""
    left_out: int = 0
    """Documents left out for such places."""


def documents(
    paths: Name | Iterable[Name],
    *,
    field: str | None = "text",
    bad_bytes: BadBytes = "error",
    without: Name | Iterable[Name] = (),
    seen: Seen | None = None,
) -> Iterator[Document]:
    """The documents of files, folders and globs, in the order given; inside folders and globs in the order of names.

    A name's end says how it is read: .jsonl and .ndjson by `field` of each line, .parquet by the column `field`
    ("meta.text" looks inside "meta"), all else as text; each may also end in .gz or .zst. With field=None, JSON lines
    are text like any other. Folders are read to the bottom, without hidden files, __pycache__, node_modules, virtual
    environments, binary files and the folders named in `without`, such as one that is being written meanwhile.
    "stdlib:" is Python's own library, without its tests.

    Text is UTF-8, or what a byte order mark says; the mark is dropped, newlines stay as they are. Where bytes are no
    text: an error with the place ("error"), U+FFFD ("replace"), or the document is left out ("skip").

    Raises InputError for a path without any text, a named file that is empty or binary, a missing field, and for
    damage, each with its place; UsageError for an unknown policy.
    """
    if bad_bytes not in get_args(BadBytes):
        raise UsageError(f"bad_bytes={bad_bytes!r}: no such policy{nearest(str(bad_bytes), get_args(BadBytes))}")
    seen = Seen() if seen is None else seen
    return chain.from_iterable(_Reader(place, field, bad_bytes, seen).documents() for place in _places(paths, without))


def records(
    paths: Name | Iterable[Name],
    fields: Sequence[str],
    *,
    bad_bytes: BadBytes = "error",
    without: Name | Iterable[Name] = (),
    seen: Seen | None = None,
) -> Iterator[Record]:
    """The values of some fields of each JSON line and Parquet row, in order, whatever their types.

    Paths, packing and bad_bytes are as in `documents`; a line in which one of the fields is null is passed over.
    Raises InputError for files of other kinds, a missing field, bytes that are not UTF-8, and damage, with the place.
    """
    seen = Seen() if seen is None else seen
    for place in _places(paths, without):
        for document in _Records(place, fields, bad_bytes, seen).documents():
            yield Record(tuple(json.loads(document.text)), document.source)


def measure(paths: Name | Iterable[Name], without: Name | Iterable[Name] = ()) -> Size:
    """The files that `documents` would open, and their bytes on disk: a total for `Seen.bytes`. Opens none of them."""
    files = size = 0
    stamp = blake2b(digest_size=16)
    for place in _places(paths, without):
        for path in place.files():
            with _reading(_shown(path)):
                status = path.stat()
            files += 1
            size += status.st_size
            stamp.update(f"{_shown(path)}\n{status.st_size} {status.st_mtime_ns}\n".encode())
    return Size(files, size, stamp.hexdigest())


class _Place(NamedTuple):
    """What one of the paths names."""

    name: str
    files: Callable[[], Iterator[Path]]
    named: bool = False  # a file that the user named: what it lacks is an error, not something to pass over
    library: Path | None = None


def _places(paths: Name | Iterable[Name], without: Name | Iterable[Name]) -> list[_Place]:
    several = listed(paths)
    if not several:
        raise InputError("nothing to read: the list of paths is empty")
    left_out = frozenset(os.path.realpath(path) for path in listed(without))
    return [_place(name, left_out) for name in several]


def listed(paths: Name | Iterable[Name]) -> list[str]:
    return [os.fspath(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _place(name: str, without: frozenset[str]) -> _Place:
    if name == LIBRARY:
        library = Path(sysconfig.get_path("stdlib"))
        return _Place(name, partial(_library, library), library=library)
    path = Path(os.path.expanduser(name))
    with _reading(_shown(name)):
        if path.is_dir():
            return _Place(name, partial(_folder, path, without))
        if path.is_file():
            return _Place(name, lambda: iter([path]), named=True)
        if path.exists():
            raise InputError(
                f"{_shown(name)}: not a regular file; a pipe is read once only, so save it to a file first"
            )
        if not glob.has_magic(name):
            raise InputError(f"{_shown(name)}: no such file or folder")
        matches = [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise InputError(f"{_shown(name)}: nothing matches")
        return _Place(name, partial(_matched, matches, without, folders="**" not in path.parts))


def _matched(matches: list[Path], without: frozenset[str], folders: bool) -> Iterator[Path]:
    """As a shell would pass them on: a folder stands for what is in it; but ** has matched that as well."""
    for path in matches:
        if without and not without.isdisjoint(map(str, (real := path.resolve(), *real.parents))):
            continue
        if path.is_file():
            yield path
        elif folders and path.is_dir():
            yield from _folder(path, without)


def _folder(folder: Path, without: frozenset[str], not_text: set[str] = NOT_TEXT) -> Iterator[Path]:
    if without and os.path.realpath(folder) in without:
        return
    with _reading(_shown(folder)):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = folder / entry.name
        if entry.name.startswith(".") or entry.name in not_text:
            continue
        if entry.is_dir(follow_symlinks=False):
            if not any((path / mark).exists() for mark in NOT_READ):
                yield from _folder(path, without, not_text)
        elif entry.is_file():  # neither a link to nowhere nor a pipe, which would block
            yield path


def _library(library: Path) -> Iterator[Path]:
    for path in _folder(library, frozenset(), NOT_LIBRARY) if library.is_dir() else ():
        if path.suffix == ".py" and not path.name.startswith("_sysconfigdata"):  # how this one Python was built
            yield path


class _Text(NamedTuple):
    """A text in parts, in which BAD stands for what is none."""

    parts: Iterable[str]
    source: str


class _Reader:
    """Reads what one of the paths names."""

    def __init__(self, place: _Place, field: str | None, bad_bytes: BadBytes, seen: Seen) -> None:
        self.place = place
        self.field = field
        # The library holds, here and there, a file that tests other encodings.
        self.bad_bytes = bad_bytes if place.library is None else "skip"
        self.errors = "strict" if self.bad_bytes == "error" else "sublayer.bad"
        self.seen = seen

    def documents(self) -> Iterator[Document]:
        start = Seen(**vars(self.seen))
        for path in self.place.files():
            yield from self.file(path)
        if self.seen.documents == start.documents:
            raise InputError(f"{_shown(self.place.name)}: no text there{self.reasons(start)}")

    def reasons(self, start: Seen) -> str:
        if self.place.library is not None:
            return "; this Python was installed without its sources"
        counts = {
            "binary": self.seen.binary - start.binary,
            "empty": self.seen.empty - start.empty,
            "with bytes that are no text": self.seen.left_out - start.left_out,
        }
        found = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
        return f" ({found})" if found else ""

    def file(self, path: Path) -> Iterator[Document]:
        library = self.place.library
        source = _shown(path) if library is None else LIBRARY + path.relative_to(library).as_posix()
        start = self.seen.bytes
        with _reading(source), open(path, "rb") as raw:
            size = os.fstat(raw.fileno()).st_size
            if not stat.S_ISREG(os.fstat(raw.fileno()).st_mode):
                raise InputError(f"{source}: not a regular file")
            if self.place.named and not size:
                raise InputError(f"{source}: the file is empty")
            for document in self.whole(self.texts(path, raw, source)):
                self.seen.bytes = start + min(raw.tell(), size)
                self.seen.documents += 1
                yield document
            self.seen.bytes = start + size

    def texts(self, path: Path, raw: IO[bytes], source: str) -> Iterator[_Text]:
        packing = path.suffix.lower() if path.suffix.lower() in PACKED else ""
        kind = Path(path.stem if packing else path).suffix.lower()
        stream = _unpacked(raw, packing)
        if kind == ".parquet" and self.field is not None:
            with _on_disk(stream) if packing else nullcontext(raw) as file:
                yield from self.parquet(file, source, self.field)
            return
        head = stream.peek(PEEK)[:PEEK]
        mark, encoding = next((each for each in MARKS if head.startswith(each[0])), (b"", "utf-8"))
        stream.read(len(mark))
        if encoding == "utf-8" and _binary(head):
            if self.place.named:
                raise InputError(
                    f"{source}: a binary file; text, JSON lines and Parquet are read, also as .gz and .zst"
                )
            self.seen.binary += 1
        elif kind in JSON_LINES and self.field is not None:
            if encoding != "utf-8":
                raise InputError(f"{source}: {encoding.upper()}, but JSON lines are UTF-8")
            yield from self.json_lines(stream, len(mark), source, self.field)
        else:
            yield _Text(self.decoded(stream, len(mark), encoding, source), source)

    def decoded(self, stream: IO[bytes], offset: int, encoding: str, source: str) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(encoding)(self.errors)
        while True:
            chunk = stream.read(CHUNK)
            offset += len(chunk)
            try:
                yield decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                # error.object begins with what waited in the decoder from the chunk before.
                raise _bad_byte(source, offset - len(error.object), error) from None
            if not chunk:
                return

    def json_lines(self, stream: IO[bytes], offset: int, source: str, field: str) -> Iterator[_Text]:
        number = 0
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            place = f"{source}:{number}"
            if len(line) > LONGEST_LINE:
                raise InputError(f"{place}: a line of more than {LONGEST_LINE:,} bytes; are these JSON lines?")
            if not line.isspace():
                yield _Text((self.value(self.text(line, place, offset), field, place),), place)
            offset += len(line)

    def value(self, line: str, field: str, place: str) -> str:
        value = _member(_parsed(line, place), field, place)
        if value is None:
            return ""
        if not isinstance(value, str):
            raise InputError(f"{place}: field {field!r} is not a string but of type {type(value).__name__}")
        return self.text_of(value, field, place) if "\\u" in line else value

    def text_of(self, value: str, field: str, place: str) -> str:
        """The value, with BAD for what no encoding of text can express: half of a surrogate pair, from an escape."""
        if not any("\ud800" <= c <= "\udfff" for c in value):
            return value
        if self.bad_bytes == "error":
            raise InputError(f"{place}: field {field!r} holds a lone surrogate, which is no text")
        return "".join(BAD if "\ud800" <= c <= "\udfff" else c for c in value)

    def parquet(self, file: IO[bytes], source: str, field: str) -> Iterator[_Text]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table = pq.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False)
            name, *inner = _column(table.schema_arrow, field, source)
            row = 0
            for batch in table.iter_batches(batch_size=64, columns=[".".join((name, *inner))]):
                column = batch.column(0)
                for _ in inner:
                    column = column.flatten()[0]  # of the struct, only what was asked for has been read
                # As bytes, for nobody checks that a column of strings holds text.
                for data in column.cast(pa.large_binary()).to_pylist():
                    row += 1
                    place = f"{source}:{row}"
                    yield _Text((self.text(data or b"", place),), place)
        except pa.ArrowException as error:
            raise InputError(f"{source}: not Parquet that can be read: {error}") from None

    def text(self, data: bytes, place: str, offset: int = 0) -> str:
        try:
            return data.decode("utf-8", self.errors)
        except UnicodeDecodeError as error:
            raise _bad_byte(place, offset, error) from None

    def whole(self, texts: Iterable[_Text]) -> Iterator[Document]:
        """The documents of texts: none longer than LONGEST, none with BAD."""
        for text in texts:
            number = 0
            waiting: list[str] = []
            size = 0
            for part in text.parts:
                waiting.append(part)
                size += len(part)
                if size <= LONGEST:
                    continue
                rest = "".join(waiting)
                while len(rest) > LONGEST:
                    number += 1
                    end = _cut(rest)
                    yield from self.mended(rest[:end], f"{text.source}#{number}")
                    rest = rest[end:]
                waiting, size = [rest], len(rest)
            if size:
                yield from self.mended("".join(waiting), f"{text.source}#{number + 1}" if number else text.source)
            else:
                self.seen.empty += 1

    def mended(self, text: str, source: str) -> Iterator[Document]:
        bad = 0 if self.bad_bytes == "error" else text.count(BAD)
        self.seen.bad += bad
        if bad and self.bad_bytes == "skip":
            self.seen.left_out += 1
        else:
            yield Document(text.replace(BAD, "\ufffd") if bad else text, source)


class _Records(_Reader):
    """Reads several fields at once: its documents are JSON lists of their values, "" where one is null."""

    def __init__(self, place: _Place, fields: Sequence[str], bad_bytes: BadBytes, seen: Seen) -> None:
        super().__init__(place, fields[0], bad_bytes, seen)
        self.fields = fields

    def texts(self, path: Path, raw: IO[bytes], source: str) -> Iterator[_Text]:
        kind = Path(path.stem if path.suffix.lower() in PACKED else path).suffix.lower()
        if kind not in (*JSON_LINES, ".parquet"):
            raise InputError(f"{source}: examples are read from JSON lines and Parquet, also as .gz and .zst")
        yield from super().texts(path, raw, source)

    def value(self, line: str, field: str, place: str) -> str:
        data = _parsed(line, place)
        values = [_member(data, name, place) for name in self.fields]
        return "" if None in values else self.text_of(json.dumps(values, ensure_ascii=False), field, place)

    def parquet(self, file: IO[bytes], source: str, field: str) -> Iterator[_Text]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            table, row = pq.ParquetFile(file, buffer_size=CHUNK, pre_buffer=False), 0
            names = table.schema_arrow.names
            columns = [name if name in names else name.partition(".")[0] for name in self.fields]
            missing = next((name for name in columns if name not in names), None)
            if missing is not None:
                raise InputError(f"{source}: no column {missing!r}{nearest(missing, names)}")
            for batch in table.iter_batches(batch_size=64, columns=list(dict.fromkeys(columns))):
                for found in batch.to_pylist():
                    row += 1
                    place = f"{source}:{row}"
                    full = all(found[column] is not None for column in columns)
                    values = [_member(found, name, place) for name in self.fields] if full else [None]
                    yield _Text(("" if None in values else json.dumps(values),), place)
        except (pa.ArrowException, UnicodeDecodeError, TypeError) as error:
            raise InputError(f"{source}: not Parquet that can be read: {error}") from None

    def whole(self, texts: Iterable[_Text]) -> Iterator[Document]:
        for document in super().whole(texts):
            if "#" in document.source.rpartition(":")[2]:
                raise InputError(f"{document.source}: an example of more than {LONGEST:,} characters")
            yield document


@contextmanager
def _reading(source: str) -> Iterator[None]:
    """What the system and the decompressors raise, as one line with the file's name."""
    try:
        yield
    except (OSError, EOFError, zlib.error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"{source}: {reason}") from None


def _unpacked(raw: IO[bytes], packing: str) -> io.BufferedReader:
    if packing == ".gz":
        return io.BufferedReader(_Raw(gzip.GzipFile(fileobj=raw)), CHUNK)
    if packing == ".zst":
        import pyarrow as pa  # unlike zstandard's, its reader tells where a file was cut off

        return io.BufferedReader(_Raw(pa.CompressedInputStream(pa.PythonFile(raw), "zstd")), CHUNK)
    return cast(io.BufferedReader, raw)


class _Raw(io.RawIOBase):
    """A decompressor as io.BufferedReader wants it; `read` gives all that was asked for, until the end."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self.stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def _on_disk(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Parquet is read from its end, which a compressed stream cannot."""
    with tempfile.TemporaryFile() as file:
        shutil.copyfileobj(stream, file, CHUNK)
        file.seek(0)
        yield file


def _binary(head: bytes) -> bool:
    control = len(head) - len(head.translate(None, CONTROL))
    return b"\0" in head or head.startswith(b"%PDF-") or 100 * control > len(head)


def _cut(text: str) -> int:
    """Where a text that is too long ends its first piece: as late as it may, in the second half."""
    for end in ("\n\n", "\n", " "):
        at = text.rfind(end, LONGEST // 2, LONGEST)
        if at >= 0:
            return at + len(end)
    return LONGEST


def _parsed(line: str, place: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise InputError(f"{place}: not JSON: {what} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: JSON that cannot be read: {error}") from None


def _member(data: Any, field: str, place: str) -> Any:
    if isinstance(data, dict) and field in data:  # a name may hold dots itself
        return data[field]
    for step in field.split("."):
        if not isinstance(data, dict):
            raise InputError(f"{place}: expected a JSON object with the field {field!r}, found {type(data).__name__}")
        if step not in data:
            raise InputError(f"{place}: no field {field!r}{nearest(step, data)}")
        data = data[step]
    return data


def _column(schema: pa.Schema, field: str, source: str) -> list[str]:
    """The steps from the file's columns down to the one of that name. Raises InputError where it is none of text."""
    import pyarrow as pa

    steps = [field] if field in schema.names else field.split(".")
    found: Any = schema
    for step in steps:
        names = found.names if isinstance(found, pa.Schema) else [each.name for each in _fields(found)]
        if names.count(step) != 1:
            raise InputError(f"{source}: no column {field!r}{nearest(step, names)}")
        found = found.field(step).type
    kind = found.value_type if pa.types.is_dictionary(found) else found
    if not any(test(kind) for test in (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary,
                                       pa.types.is_large_binary, pa.types.is_null)):  # fmt: skip
        raise InputError(f"{source}: column {field!r} is not of strings but of {found}")
    return steps


def _fields(kind: Any) -> list[Any]:
    import pyarrow as pa

    return [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []


def _bad_byte(source: str, start: int, error: UnicodeDecodeError) -> InputError:
    byte, place = error.object[error.start], start + error.start
    return InputError(
        f"{source}: byte 0x{byte:02X} at offset {place:,} is not {error.encoding.upper()} ({error.reason});"
        ' bad_bytes="replace" reads it as U+FFFD, "skip" leaves the document out'
    )


def _shown(path: Name) -> str:
    """The path as text that can be written anywhere: a name on disk may be any bytes."""
    return os.fsencode(path).decode("utf-8", "replace")
