"""The tensors of a GGUF header under their own names: memory-mapped, and dequantised a few blocks at a time."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from torch import Tensor

from ...errors import WeightsError
from ...files import mapped, open_regular
from ...gguf_header import Header
from .blocks import dequantise

CHUNK = 1 << 17  # values dequantised at once: with all it takes, that fits a processor's cache

PLAIN = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip
UNREADABLE = ("Q8_1", "Q8_K", "Q1_0")  # of ggml's inner workings, but the last, which is new
"""What the gguf package cannot dequantise."""


class Tensors:
    """Reads one tensor at a time. What it gives of a plain type is a view of the file, of blocks a float32 copy."""

    def __init__(self, header: Header) -> None:
        """Raises WeightsError for a tensor of a type that cannot be dequantised."""
        self.header = header
        self.names = header.tensors.keys()
        for name, place in header.tensors.items():
            if place.kind in UNREADABLE:
                raise WeightsError(
                    f"{place.path}: tensor {name} at byte {place.offset}: {place.kind} cannot be dequantised"
                )
        self._data: dict[Path, mmap.mmap] = {}
        for path in header.paths:
            try:
                with open_regular(path) as file:
                    # Private pages, for torch warns of memory that it may not write to; none is written.
                    self._data[path] = mapped(file)
            except (OSError, ValueError) as error:
                raise WeightsError(f"{path}: cannot be read: {error}") from None

    @property
    def blocks(self) -> list[str]:
        """The quantised types that occur."""
        return sorted({place.kind for place in self.header.tensors.values()} - PLAIN.keys())

    def read(self, name: str) -> Tensor:
        place = self.header.tensors[name]
        if place.kind in PLAIN or not place.size:
            return self._plain(name, PLAIN.get(place.kind, torch.float32))
        whole = torch.empty(place.shape)
        self.read_into(name, whole)
        return whole

    @torch.no_grad()
    def read_into(self, name: str, whole: Tensor) -> None:
        """Fills a contiguous tensor of the same shape, of any floating dtype, on any device."""
        place = self.header.tensors[name]
        if place.kind in PLAIN or not place.size:
            whole.copy_(self.read(name))
            return
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[place.kind]]
        data = np.frombuffer(self._data[place.path], np.uint8, place.size, place.offset)
        step = CHUNK // block
        for at, values in zip(range(0, place.size, step * size), whole.view(-1).split(step * block), strict=True):
            dequantise(data[at : at + step * size], place.kind, values)

    def shape(self, name: str) -> list[int]:
        return list(self.header.tensors[name].shape)

    def dtype(self, name: str) -> str:
        """Of what `read` gives, as safetensors writes it: "F32", "BF16", "I64"."""
        kind = self.header.tensors[name].kind
        return kind if kind in PLAIN else "F32"

    def file(self, name: str) -> Path:
        return self.header.tensors[name].path

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors hold the same values in the same way."""
        a, b = (self.header.tensors[name] for name in (one, other))
        if (a.shape, a.kind) != (b.shape, b.kind):
            return False
        one_view, other_view = (memoryview(self._data[place.path])[place.offset :][: place.size] for place in (a, b))
        return all(one_view[at : at + CHUNK] == other_view[at : at + CHUNK] for at in range(0, a.size, CHUNK))

    def _plain(self, name: str, dtype: torch.dtype) -> Tensor:
        place = self.header.tensors[name]
        if not place.size:
            return torch.empty(place.shape, dtype=dtype)
        flat = torch.frombuffer(
            self._data[place.path], dtype=dtype, count=place.size // dtype.itemsize, offset=place.offset
        )
        return flat.view(place.shape)
