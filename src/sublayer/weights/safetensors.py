"""One safetensors file: its header is checked whole, before any tensor is read; tensors are views of its memory map.

The format (huggingface/safetensors): eight bytes that say how long the header is, little-endian; the header, a JSON
object from names to {dtype, shape, data_offsets}, with __metadata__ from strings to strings; then the data, which the
tensors' ranges cover without a gap or an overlap.
"""

from __future__ import annotations

import gc
import json
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from ..errors import WeightsError, nearest
from ..files import mapped, open_regular

MAX_HEADER = 16 << 20  # bytes; one file of 100,000 tensors needs about as many
MAX_AXES = 32
MAX_SIZE = 1 << 48  # of an axis: what torch multiplies without overflowing, for a shape with an empty axis may say more
DTYPES: dict[str, tuple[int, torch.dtype | None]] = {  # bits of an element, and what torch calls it
    "F64": (64, torch.float64), "F32": (32, torch.float32), "F16": (16, torch.float16), "BF16": (16, torch.bfloat16),
    "I64": (64, torch.int64), "I32": (32, torch.int32), "I16": (16, torch.int16), "I8": (8, torch.int8),
    "U64": (64, torch.uint64), "U32": (32, torch.uint32), "U16": (16, torch.uint16), "U8": (8, torch.uint8),
    "BOOL": (8, torch.bool), "C64": (64, torch.complex64), "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E5M2": (8, torch.float8_e5m2), "F8_E8M0": (8, torch.float8_e8m0fnu), "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz), "F6_E2M3": (6, None), "F6_E3M2": (6, None), "F4": (4, None),
}  # fmt: skip
SCALED = {"F4"} | {name for name in DTYPES if name.startswith(("F8_", "F6_"))}
"""Elements that mean nothing without the scales beside them."""


class Entry(NamedTuple):
    dtype: str
    shape: tuple[int, ...]
    start: int
    """The file's byte at which it begins."""
    end: int


class SafeTensors:
    """An opened file: `names`, and of each its `shape`, `dtype` and, from `read`, its values.

    Raises WeightsError, naming the file, the tensor and the byte, for a file cut short, a header that is none or too
    large, an entry that is not what the format says, a range outside the file, and ranges that overlap or leave gaps.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                size = file.seek(0, 2)
                with _without_collection():
                    header, begin = _header(path, file, size)
                    self.entries = _entries(path, header, begin, size)
                # Copy on write, so that no one can write to the file; what is only read stays in the page cache.
                self._map = mapped(file)
        except OSError as error:
            raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from None

    @property
    def names(self) -> list[str]:
        return list(self.entries)

    def shape(self, name: str) -> list[int]:
        return list(self.entries[name].shape)

    def dtype(self, name: str) -> str:
        """As safetensors writes it: "F32", "BF16", "I64"."""
        return self.entries[name].dtype

    def read(self, name: str) -> Tensor:
        """A view of the memory map, in the file's dtype; it is valid for as long as it is held."""
        entry = self.entries[name]
        _, dtype = DTYPES[entry.dtype]
        if dtype is None:
            raise WeightsError(f"{self.path}: tensor {name}: torch has no elements of {entry.dtype}")
        if entry.start == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=entry.end - entry.start, offset=entry.start)
        if entry.start % dtype.itemsize:  # files of older writers, whose header has any length
            raw = raw.clone()
        return raw.view(dtype).view(entry.shape)

    def release(self, name: str) -> None:
        """Lets go of the pages that hold a tensor: they come back from the file if it is read again."""
        entry = self.entries[name]
        start = entry.start - entry.start % mmap.PAGESIZE
        if entry.end > start:
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.end - start)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Python's search for cycles would look through what grows here again and again, for most of the time."""
    running = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if running:
            gc.enable()


def _header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, Any], int]:
    """(what the header says, the byte after it)"""
    if size < 8:
        raise WeightsError(f"{path}: not a whole safetensors file: {size} bytes, fewer than the 8 of a header's length")
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if length > size - 8:
        raise WeightsError(
            f"{path}: not a whole safetensors file: byte 0 says that the header has {length} bytes; {size - 8} follow"
        )
    if length > MAX_HEADER:
        raise WeightsError(f"{path}: byte 0 says that the header has {length} bytes, more than {MAX_HEADER}")
    raw = file.read(length)
    if not raw.startswith(b"{"):
        raise WeightsError(f"{path}: not a safetensors file: byte 8, where its header begins, is no '{{'")
    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=_once), 8 + length
    except _Twice as error:
        raise WeightsError(f"{path}: the header says {error} twice") from None
    except UnicodeDecodeError as error:
        raise WeightsError(f"{path}: byte {8 + error.start}, in the header, is not UTF-8") from None
    except json.JSONDecodeError as error:
        byte = 8 + len(error.doc[: error.pos].encode())
        raise WeightsError(f"{path}: the header is not JSON from byte {byte} on: {error.msg}") from None
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: the header, from byte 8 on, is no JSON that can be read: {error}") from None


class _Twice(ValueError):
    """A name that stands twice in one object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        seen = set[str]()
        raise _Twice(next(name for name, _ in pairs if name in seen or seen.add(name)))
    return found


def _entries(path: Path, header: dict[str, Any], begin: int, size: int) -> dict[str, Entry]:
    """What the header says of each tensor, in the order of their data, which begins and ends at these bytes."""
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise WeightsError(f"{path}: __metadata__ of the header is not an object of strings")
    found = dict[str, Entry]()
    try:
        for name, said in header.items():
            entry, needed = _entry(said, begin)
            if entry.end > size:
                end = _short(entry.end)
                raise WeightsError(
                    f"{path}: not a whole safetensors file: tensor {name} ends at byte {end}, the file at byte {size}"
                )
            if needed != entry.end - entry.start:
                raise _Wrong(
                    f"{entry.dtype} {list(entry.shape)} needs {_short(needed)} bytes, "
                    f"its range from byte {entry.start} on has {entry.end - entry.start}"
                )
            found[name] = entry
    except _Wrong as error:
        raise WeightsError(f"{path}: tensor {name}: {error}") from None
    found = dict(sorted(found.items(), key=lambda item: item[1][2:]))
    reached, before = begin, "the header"
    for name, entry in found.items():
        if entry.start < reached:
            raise WeightsError(
                f"{path}: tensor {name} begins at byte {entry.start}, before {before} ends at byte {reached}"
            )
        if entry.start > reached:
            raise WeightsError(
                f"{path}: tensor {name} begins at byte {entry.start}, but {before} ends at byte {reached}: "
                "no tensor holds what lies between"
            )
        reached, before = entry.end, f"tensor {name}"
    if reached < size:
        raise WeightsError(
            f"{path}: {before} ends at byte {reached}, the file at byte {size}: no tensor holds the rest"
        )
    return found


class _Wrong(ValueError):
    """What the format, or torch, does not have."""


def _entry(said: Any, begin: int) -> tuple[Entry, float]:
    """(what the header says of one tensor, the bytes that its shape needs); there may be 100,000. Raises _Wrong."""
    if not isinstance(said, dict) or not said.keys() >= {"dtype", "shape", "data_offsets"}:
        raise _Wrong("its entry in the header is not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = said["dtype"], said["shape"], said["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Wrong(f"unknown dtype {_short(dtype)}{nearest(str(dtype), DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_AXES:
        raise _Wrong(f"shape {_short(shape)} is not a list of at most {MAX_AXES} sizes")
    count = 1
    for axis in shape:
        if type(axis) is not int or not 0 <= axis <= MAX_SIZE:
            raise _Wrong(f"shape {_short(shape)}: {_short(axis)} is not a whole number from 0 to {MAX_SIZE}")
        count *= axis
    if not isinstance(offsets, list) or len(offsets) != 2 or not type(offsets[0]) is type(offsets[1]) is int:
        raise _Wrong(f"data_offsets {_short(offsets)} are not two whole numbers")
    start, end = begin + offsets[0], begin + offsets[1]
    if not begin <= start <= end:
        raise _Wrong(f"data_offsets {_short(offsets)} do not lie one after the other from 0 on")
    bits = count * DTYPES[dtype][0]
    return Entry(dtype, tuple(shape), start, end), bits // 8 if bits % 8 == 0 else bits / 8


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "…"
