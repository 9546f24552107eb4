"""The metadata of a GGUF file, read without its tensors."""

import mmap
import struct
from pathlib import Path
from typing import Any

from ..errors import InputError

# Value types by number: struct's letter for it.
SCALARS = dict(enumerate("BbHhIif?"))| {10: "Q", 11: "q", 12: "d"}  # fmt: skip
STRING, ARRAY = 8, 9


def read_metadata(path: Path | str) -> dict[str, Any]:
    """Key → value: a number, a bool, a string, or a list of one of these kinds.

    Raises InputError, with the byte, for a file that is not GGUF (version 2 or 3, little-endian) or is cut short.
    Source: the GGUF specification of ggml.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(path, data).metadata()
    except (OSError, ValueError) as error:  # mmap refuses an empty file with ValueError
        raise InputError(f"{path}: cannot be read as GGUF: {error}") from None


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def metadata(self) -> dict[str, Any]:
        if self._bytes(4) != b"GGUF":
            raise InputError(f"{self._path}: not a GGUF file: it does not begin with GGUF")
        version = self._scalar("I")
        if version not in (2, 3):
            raise InputError(f"{self._path}: GGUF version {version}; versions 2 and 3, little-endian, can be read")
        self._scalar("Q")  # number of tensors
        found: dict[str, Any] = {}
        for _ in range(self._count(13)):  # a key's length, a type and a value of one byte at least
            key = self._string()
            found[key] = self._value(self._scalar("I"))
        return found

    def _value(self, kind: int) -> Any:
        if kind == STRING:
            return self._string()
        if kind in SCALARS:
            return self._scalar(SCALARS[kind])
        if kind != ARRAY:
            raise self._fault(f"type {kind} is none of GGUF's")
        inner = self._scalar("I")
        if inner == STRING:
            return [self._string() for _ in range(self._count(8))]
        if inner not in SCALARS:
            raise self._fault(f"an array of type {inner} is not supported")
        size = struct.calcsize(SCALARS[inner])
        count = self._count(size)
        return list(struct.unpack(f"<{count}{SCALARS[inner]}", self._bytes(size * count)))

    def _count(self, least: int) -> int:
        """A number of items, each of `least` bytes at least."""
        count = self._scalar("Q")
        if count * least > len(self._data) - self._at:
            raise self._fault(f"{count} items are announced, more than the file has room for")
        return count

    def _string(self) -> str:
        length = self._scalar("Q")
        try:
            return self._bytes(length).decode("utf-8")
        except UnicodeDecodeError:
            raise self._fault("a string that is not UTF-8") from None

    def _scalar(self, letter: str) -> Any:
        return struct.unpack("<" + letter, self._bytes(struct.calcsize(letter)))[0]

    def _bytes(self, count: int) -> bytes:
        if count > len(self._data) - self._at:
            raise self._fault(f"{count} bytes are announced, but the file ends after {len(self._data) - self._at} more")
        self._at += count
        return self._data[self._at - count : self._at]

    def _fault(self, what: str) -> InputError:
        return InputError(f"{self._path}: at byte {self._at}: {what}")
