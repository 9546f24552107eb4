"""The header of a GGUF file: its metadata, and where its tensors lie. Read from the front, bounded before anything in
it is believed; the tensors themselves are not touched.

A model may lie in several files, as llama.cpp's gguf-split cuts it: PREFIX-00001-of-00003.gguf and so on, each of them
GGUF with split.no and split.count in its metadata; the first says all else. Whichever is named, they are one header.

Layout: "GGUF", version, number of tensors, number of keys, the keys with their values, a record for each tensor (name,
sizes with the fastest first, type, offset), and, after a gap up to a multiple of the alignment, their data.
Source: the GGUF specification of ggml.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from .errors import WeightsError
from .files import open_regular

# Value types by number: struct's letter for it.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
LENGTH = struct.Struct("<Q")

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
NUMBER, COUNT, TOTAL = (
    "split.no",
    "split.count",
    "split.tensors.count",
)  # from 0 on; of parts; of tensors in all of them
TOGETHER = "take all parts from one place"

MAX_HEADER = 256 << 20  # bytes; the largest vocabularies and their merges take some 30 MB
MAX_ITEMS = 1 << 23  # of one array
MAX_TENSORS = 1 << 20
MAX_DIMS = 4  # ggml's own


@dataclass(frozen=True)
class Place:
    """Where a tensor lies, and how its values are stored there."""

    path: Path
    """The file."""
    shape: tuple[int, ...]
    """As torch has it, the slowest first."""
    kind: str
    """ggml's name for the type: "F32", "Q4_K"."""
    offset: int
    """From the beginning of the file, in bytes."""
    size: int
    """In bytes."""


@dataclass(frozen=True)
class Header:
    paths: tuple[Path, ...]
    """The files of the model, in order; what is read of the first alone has that one."""
    metadata: Mapping[str, Any]
    """Key → a number, a bool, a string, or a list of one of these kinds."""
    tensors: Mapping[str, Place]

    @property
    def path(self) -> Path:
        """The file that errors name."""
        return self.paths[0]


def read_header(path: Path | str, *, tensors: bool = True) -> Header:
    """The header of a GGUF file of version 2 or 3, little-endian, or of all the parts of which it is one; tensors: with
    the records of its tensors, else of the first part alone.

    Raises WeightsError, naming the file, the byte or the tensor, for a file that is none or is cut short, for numbers
    of items that it has no room for, and for tensors of an unknown type, out of place or over one another; for a part
    that is missing or another model's, and for a tensor in two of them.
    """
    path = Path(path)
    count = part_count(path)
    first = _read_part(part(path, 1), 1, count, tensors)
    if count == 1 or not tensors:
        return first
    paths, found = [first.path], dict(first.tensors)
    for number in range(2, count + 1):
        one = _read_part(part(path, number), number, count, tensors)
        for key in one.metadata:
            if key != NUMBER and first.metadata.get(key, one.metadata[key]) != one.metadata[key]:
                raise WeightsError(f"{one.path}: its {key} is another than that of {first.path.name}; {TOGETHER}")
        for name in one.tensors:
            if name in found:
                raise WeightsError(f"{one.path}: tensor {name} is also in {found[name].path.name}; {TOGETHER}")
        paths.append(one.path)
        found |= one.tensors
    said = first.metadata.get(TOTAL)
    if said != len(found):
        parts = f"{len(found)} are in its {count} parts"
        raise WeightsError(f"{first.path}: {TOTAL}={_short(said)}, but {parts}; {TOGETHER}")
    return Header(tuple(paths), first.metadata, found)


def part_count(path: Path) -> int:
    """Of how many parts a file is one, by its name."""
    match = PART.fullmatch(path.name)
    return int(match[3]) if match and 1 <= int(match[2]) <= int(match[3]) else 1


def model_name(path: Path) -> str:
    """A file's name without its ending, and of a part without its number."""
    match = PART.fullmatch(path.name)
    return match[1] if match and part_count(path) > 1 else path.name.removesuffix(".gguf")


def part(path: Path, number: int, count: int | None = None) -> Path:
    """A part, from 1 on, of the model that a file is all or one part of. count: of parts, other than its name says."""
    count = count or part_count(path)
    return path if count == 1 else path.with_name(f"{model_name(path)}-{number:05d}-of-{count:05d}.gguf")


def models_in(folder: Path) -> list[Path]:
    """The GGUF files of a folder; of a model in parts the first, which may be missing."""
    return sorted({part(path, 1) for path in folder.glob("*.gguf")})


def _read_part(path: Path, number: int, count: int, tensors: bool) -> Header:
    """The header of one file. Raises WeightsError where it is not the part that its name says."""
    if count > 1 and not path.exists():
        raise WeightsError(f"{path}: part {number} of {count} is missing; put all of them into one folder")
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(path, data)
            size, metadata = reader.metadata()
            found = Header((path,), metadata, reader.tensors(size, metadata) if tensors else {})
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        reason = getattr(error, "strerror", None) or error
        raise WeightsError(f"{path}: cannot be read as GGUF: {reason}") from None
    said = metadata.get(NUMBER, 0), metadata.get(COUNT, 1) or 1
    if said != (number - 1, count):
        raise WeightsError(
            f"{path}: part {number} of {count} by its name, but {NUMBER}={_short(said[0])}, {COUNT}={_short(said[1])} "
            "within; parts are named NAME-00001-of-00003.gguf and so on, and lie in one folder"
        )
    return found


def _short(value: Any) -> str:
    return "a list" if isinstance(value, list) else repr(value)[:40]


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def metadata(self) -> tuple[int, dict[str, Any]]:
        """(number of tensors, key → value)"""
        if self._bytes(4) != b"GGUF":
            raise WeightsError(f"{self._path}: not a GGUF file: it does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            kind = " of a big-endian machine" if version >> 16 and not version & 0xFFFF else ""
            raise WeightsError(
                f"{self._path}: GGUF version {version}{kind}; versions 2 and 3, little-endian, can be read"
            )
        tensors = self._scalar("Q")
        found: dict[str, Any] = {}
        for _ in range(self._count(13, MAX_ITEMS)):  # a key's length, a type and a value of one byte at least
            key = self._string()
            if key in found:
                raise self._fault(f"the key {key} stands twice")
            found[key] = self._value(self._scalar("I"))
        return tensors, found

    def tensors(self, count: int, metadata: Mapping[str, Any]) -> dict[str, Place]:
        self._fits(count, 24, MAX_TENSORS)  # a name's length, a number of sizes, a type and an offset
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 8 <= alignment <= 1 << 20 or alignment & (alignment - 1):
            raise WeightsError(f"{self._path}: general.alignment={alignment!r} is not a power of two from 8 on")
        records: dict[str, tuple[tuple[int, ...], str, int, int]] = {}
        for _ in range(count):
            name, record = self._record()
            if name in records:
                raise self._fault(f"tensor {name} stands twice")
            records[name] = record
        begin = -(-self._at // alignment) * alignment
        places: dict[str, Place] = {}
        last, end = "", begin
        for name, (shape, kind, offset, size) in sorted(records.items(), key=lambda one: one[1][2]):
            where = f"{self._path}: tensor {name} at byte {begin + offset}"
            if offset % alignment:
                raise WeightsError(f"{where}: not a multiple of {alignment} bytes into the data")
            if begin + offset + size > len(self._data):
                raise WeightsError(f"{where}: its {size} bytes reach beyond the file's {len(self._data)}")
            if begin + offset < end and size:
                raise WeightsError(f"{where}: lies over tensor {last}, which ends at byte {end}")
            places[name] = Place(self._path, shape, kind, begin + offset, size)
            last, end = (name, begin + offset + size) if size else (last, end)
        return {name: places[name] for name in records}

    def _record(self) -> tuple[str, tuple[tuple[int, ...], str, int, int]]:
        """(name, (shape, kind, offset into the data, bytes))"""
        name = self._string()
        dims = self._scalar("I")
        if dims > MAX_DIMS:
            raise self._fault(f"tensor {name} has {dims} dimensions, more than {MAX_DIMS}")
        shape = tuple(self._scalar("Q") for _ in range(dims))[::-1]
        number, offset = self._scalar("I"), self._scalar("Q")
        kinds = _kinds()
        if number not in kinds:
            raise self._fault(f"tensor {name} is of type {number}, which is not known")
        kind, block, size = kinds[number]
        if (shape[-1] if shape else 1) % block:
            raise self._fault(f"tensor {name} {list(shape)}: its rows are not whole blocks of {block} values ({kind})")
        return name, (shape, kind, offset, prod(shape) // block * size)

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._fault(f"type {kind} is none of GGUF's")
        inner = self._scalar("I")
        if inner == STRING:
            return self._strings(self._count(8, MAX_ITEMS))
        if inner not in SCALARS:
            raise self._fault(f"an array of type {inner} is not supported")
        size = struct.calcsize(SCALARS[inner])
        count = self._count(size, MAX_ITEMS)
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", self._bytes(size * count)))

    def _strings(self, count: int) -> list[str]:
        """A vocabulary and its merges are hundreds of thousands, so this loop is tight."""
        found: list[str] = []
        data, at, end = self._data, self._at, self._at + self._left()
        with suppress(struct.error, UnicodeDecodeError):
            while len(found) < count:
                stop = at + 8 + LENGTH.unpack_from(data, at)[0]
                if stop > end:
                    break
                found.append(data[at + 8 : stop].decode("utf-8"))
                at = stop
        self._at = at
        while len(found) < count:  # tells what is wrong with the next one
            found.append(self._string())
        return found

    def _count(self, least: int, most: int) -> int:
        """A number of items, each of `least` bytes at least."""
        count = self._scalar("Q")
        self._fits(count, least, most)
        return count

    def _fits(self, count: int, least: int, most: int) -> None:
        if count * least > self._left():
            raise self._fault(f"{count} items are announced, more than the file has room for")
        if count > most:
            raise self._fault(f"{count} items are announced, more than {most}")

    def _string(self) -> str:
        length = self._scalar("Q")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault("a string that is not UTF-8") from None

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize(letter)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > self._left():
            if self._left() < len(self._data) - self._at:
                raise self._fault(f"{count} bytes are announced, beyond the {MAX_HEADER} that a header may have")
            raise self._fault(f"{count} bytes are announced, but the file ends after {self._left()} more")
        self._at += count
        return self._data[self._at - count : self._at]

    def _left(self) -> int:
        return min(len(self._data), MAX_HEADER) - self._at

    def _fault(self, what: str) -> WeightsError:
        return WeightsError(f"{self._path}: at byte {self._at}: {what}")


def _kinds() -> dict[int, tuple[str, int, int]]:
    """ggml's number of a type: (its name, values in a block, bytes of a block)."""
    from gguf.constants import GGML_QUANT_SIZES  # a second to import, which a tokenizer's metadata need not wait for

    return {kind.value: (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}
