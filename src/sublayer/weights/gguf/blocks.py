"""Quantised blocks as numbers. The commonest types are unpacked here, to the bit what the gguf package makes of them
and in a fifth to six tenths of its time; all others by it.

A value is scale · code + offset; neighbouring codes share a scale. Types differ in how they pack the three.
Source: the structs of ggml-common.h and dequantize_row_* of ggml-quants.c.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor


class Unpacked(NamedTuple):
    scales: np.ndarray
    """[N, S] of float32, for N blocks."""
    codes: np.ndarray
    """Of uint8 or int8, in the order of the values."""
    offsets: np.ndarray | None = None
    """[N, S] of float32."""


def dequantise(data: np.ndarray, kind: str, out: Tensor) -> None:
    """data: the bytes of whole blocks. out: as many values, in one dimension, of any floating dtype, on any device."""
    with np.errstate(all="ignore"):  # a scale may be no number; that shows in what the model answers
        if kind not in UNPACKING:
            out.copy_(torch.from_numpy(dequantize(data[None], GGMLQuantizationType[kind])[0]))
            return
        layout, unpack = UNPACKING[kind]
        scales, codes, offsets = unpack(data.view(np.dtype(layout)))
    whole = out if out.dtype == torch.float32 and out.is_cpu else torch.empty(out.shape)
    values = whole.view(*scales.shape, -1)
    values.copy_(torch.from_numpy(codes).view(values.shape)).mul_(torch.from_numpy(scales)[..., None])
    if offsets is not None:
        values.add_(torch.from_numpy(offsets)[..., None])
    if whole is not out:
        out.copy_(whole)


def _q4_0(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _signed(_nibbles(block["low"]), 8))


def _q4_1(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _nibbles(block["low"]), _column(block["m"]))


def _q5_0(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _signed(_nibbles(block["low"]) | _fifth(block["high"]), 16))


def _q5_1(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _nibbles(block["low"]) | _fifth(block["high"]), _column(block["m"]))


def _q8_0(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _bytes(block["q"]).view(np.int8))


def _q4_k(block: np.ndarray) -> Unpacked:
    scales, offsets = _k_scales(block)
    return Unpacked(scales, _nibbles(block["low"]), offsets)


def _q5_k(block: np.ndarray) -> Unpacked:
    """Of the high bits' 32 bytes, the lowest bits belong to the first 32 codes."""
    scales, offsets = _k_scales(block)
    high = _bytes(block["high"])
    return Unpacked(
        scales, _nibbles(block["low"]) | _runs([high >> i & 1 for i in range(8)], block["high"]) << 4, offsets
    )


def _q6_k(block: np.ndarray) -> Unpacked:
    high = _bytes(block["high"])
    upper = _runs([high << 4 & 48, high << 2 & 48, high & 48, high >> 2 & 48], block["high"])
    scales = _column(block["d"]) * block["scales"].astype(np.float32)
    return Unpacked(scales, _signed(_nibbles(block["low"]) | upper, 32))


def _mxfp4(block: np.ndarray) -> Unpacked:
    scales = np.ldexp(np.float32(1), block["e"].astype(np.int32) - 128)  # a power of two, halved for the doubled codes
    return Unpacked(scales[:, None], _looked_up(block["low"], E2M1))


def _iq4_nl(block: np.ndarray) -> Unpacked:
    return Unpacked(_column(block["d"]), _looked_up(block["low"], CURVE))


# What four bits stand for: the floats of OCP's MX formats, doubled; ggml's kvalues_iq4nl.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
CURVE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

# Bytes that stay neighbours are one item of numpy's (V16 is one of 16 bytes), which it moves at once.
UNPACKING: dict[str, tuple[list[Any], Callable[[np.ndarray], Unpacked]]] = {
    "Q4_0": ([("d", "<f2"), ("low", "V16")], _q4_0),
    "Q4_1": ([("d", "<f2"), ("m", "<f2"), ("low", "V16")], _q4_1),
    "Q5_0": ([("d", "<f2"), ("high", "V4"), ("low", "V16")], _q5_0),
    "Q5_1": ([("d", "<f2"), ("m", "<f2"), ("high", "V4"), ("low", "V16")], _q5_1),
    "Q8_0": ([("d", "<f2"), ("q", "V32")], _q8_0),
    "Q4_K": ([("d", "<f2"), ("m", "<f2"), ("scales", "V4", 3), ("low", "V32", 4)], _q4_k),
    "Q5_K": ([("d", "<f2"), ("m", "<f2"), ("scales", "V4", 3), ("high", "V32"), ("low", "V32", 4)], _q5_k),
    "Q6_K": ([("low", "V64", 2), ("high", "V32", 2), ("scales", "i1", 16), ("d", "<f2")], _q6_k),
    "MXFP4": ([("e", "u1"), ("low", "V16")], _mxfp4),
    "IQ4_NL": ([("d", "<f2"), ("low", "V16")], _iq4_nl),
}


def _column(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32)[:, None]


def _bytes(items: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(items).reshape(-1).view(np.uint8)


def _runs(parts: list[np.ndarray], items: np.ndarray) -> np.ndarray:
    """Bytes, of each of the items one from each part in turn."""
    found = np.empty((items.size, len(parts)), items.dtype)
    for i, part in enumerate(parts):
        found[:, i] = part.view(items.dtype)
    return found.reshape(-1).view(np.uint8)


def _nibbles(items: np.ndarray) -> np.ndarray:
    """Of each item the lower four bits of all its bytes, then the upper four."""
    data = _bytes(items)
    return _runs([data & 15, data >> 4], items)


def _looked_up(items: np.ndarray, numbers: tuple[int, ...]) -> np.ndarray:
    """The same, each four bits as one of 16 numbers."""
    data = _bytes(items).tobytes()
    return _runs([np.frombuffer(data.translate(table), np.int8) for table in _tables(numbers)], items).view(np.int8)


@cache
def _tables(numbers: tuple[int, ...]) -> list[bytes]:
    """From a byte to the number of its lower four bits, and of its upper."""
    return [bytes(numbers[i >> shift & 15] & 255 for i in range(256)) for shift in (0, 4)]


def _fifth(items: np.ndarray) -> np.ndarray:
    """Each bit, the lowest first, as 16 or 0."""
    return np.unpackbits(_bytes(items), bitorder="little") << 4


def _signed(codes: np.ndarray, middle: int) -> np.ndarray:
    return (codes - np.uint8(middle)).view(np.int8)


def _k_scales(block: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(scales, offsets), [N, 8] each: codes of six bits, of which the last four have their upper two elsewhere."""
    scales, least, more = (_bytes(block["scales"][:, i]).reshape(-1, 4) for i in range(3))
    scales = np.concatenate([scales & 63, more & 15 | scales >> 2 & 48], axis=1)
    least = np.concatenate([least & 63, more >> 4 | least >> 2 & 48], axis=1)
    return _column(block["d"]) * scales.astype(np.float32), -(_column(block["m"]) * least.astype(np.float32))
