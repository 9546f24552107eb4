"""Weights of few bits with scales beside them, in folders of Hugging Face's: MXFP4 as gpt-oss is published, and FP8 in
blocks as DeepSeek V3 is. Read as if the release were in full precision: one tensor at a time is dequantised."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import SpecError, WeightsError

if TYPE_CHECKING:
    from .load import Checkpoint

# The 16 values of four bits, E2M1: a sign, two bits of exponent, one of mantissa (OCP Microscaling Formats 1.0).
FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
READ = ("mxfp4", "fp8")
BLOCK = 128  # rows, and columns, of eight-bit weights that share a scale


def quantisation(config: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """(the config without quantization_config, the method where it is one that can be read here).

    Any other is left in the config, so that the recipe refuses it. Raises SpecError for a variant of a method that is
    not the published one.
    """
    about = config.get("quantization_config")
    method = about.get("quant_method") if isinstance(about, dict) else None
    if method not in READ or not isinstance(about, dict):
        return dict(config), None
    if method == "fp8" and (about.get("fmt", "e4m3"), about.get("weight_block_size")) != ("e4m3", [BLOCK, BLOCK]):
        raise SpecError(f"quantization_config: of fp8, only e4m3 in weight_block_size=[{BLOCK}, {BLOCK}] is read")
    return {key: value for key, value in config.items() if key != "quantization_config"}, method


class Scaled:
    """A checkpoint's tensors under the names of the release in full precision."""

    def __init__(self, files: Checkpoint, method: str) -> None:
        """Raises WeightsError for a weight without its scales, or scales without their weight."""
        self._files = files
        ends = ("_blocks", "_scales") if method == "mxfp4" else ("", "_scale_inv")
        self._dequantised = _four_bits if method == "mxfp4" else _eight_bits
        self._pairs: dict[str, tuple[str, str]] = {}
        for name in files.names:
            if name.endswith(ends[1]):
                stem = name.removesuffix(ends[1])
                self._pairs[stem] = (stem + ends[0], name)
        alone = next((pair for pair in self._pairs.values() if pair[0] not in files.names), None)
        if alone is not None:
            raise WeightsError(f"{files.file(alone[1])}: {alone[1]} are scales of {alone[0]}, which is missing")
        hidden = {name for pair in self._pairs.values() for name in pair}
        self.names = {name for name in files.names if name not in hidden} | self._pairs.keys()

    def read(self, name: str) -> Tensor:
        if name not in self._pairs:
            return self._files.read(name)
        weight, scales = self._pairs[name]
        return self._dequantised(self._files.read(weight), self._files.read(scales))

    def read_into(self, name: str, whole: Tensor) -> None:
        if name not in self._pairs:
            self._files.read_into(name, whole)
        else:
            whole.copy_(self.read(name))

    def shape(self, name: str) -> list[int]:
        if name not in self._pairs:
            return self._files.shape(name)
        weight, scales = (self._files.shape(one) for one in self._pairs[name])
        try:
            return list(_shape(weight, scales, packed=self._dequantised is _four_bits))
        except ValueError:
            raise WeightsError(
                f"{self.file(name)}: the scales of {name} are {scales}, which do not fit {weight}"
            ) from None

    def dtype(self, name: str) -> str:
        """Of what `read` gives. Raises WeightsError for elements that the method does not have."""
        if name not in self._pairs:
            return self._files.dtype(name)
        given = tuple(map(self._files.dtype, self._pairs[name]))
        four = self._dequantised is _four_bits
        if given not in ([("U8", "U8")] if four else [("F8_E4M3", "F32"), ("F8_E4M3", "BF16")]):
            raise WeightsError(f"{self.file(name)}: {name} holds {given[0]} with scales in {given[1]}: not read")
        return "BF16" if four else "F32"

    def file(self, name: str) -> Path:
        return self._files.file(self._pairs[name][0] if name in self._pairs else name)

    def called(self, name: str) -> str:
        return name


def _shape(weight: list[int], scales: list[int], *, packed: bool) -> tuple[int, ...]:
    if packed:
        *outer, rows, groups, half = weight
        if [*outer, rows, groups] != scales or half != 16:
            raise ValueError
        return (*outer, groups * 32, rows)
    if len(weight) != 2 or [-(-size // BLOCK) for size in weight] != scales:
        raise ValueError
    return tuple(weight)


def _four_bits(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks: [E, R, G, 16] bytes, two values each, the lower first; scales: [E, R, G] exponents beyond 127. Returns
    [E, G · 32, R] in bfloat16, which holds every one of them."""
    values = torch.tensor([*FOUR_BITS, *(-value for value in FOUR_BITS)], dtype=torch.bfloat16)
    experts, rows, groups, _ = blocks.shape
    whole = torch.empty(experts, groups * 32, rows, dtype=torch.bfloat16)
    for one, block, scale in zip(whole, blocks, scales, strict=True):
        pairs = torch.stack((values[(block & 15).int()], values[(block >> 4).int()]), -1).flatten(-2)
        exponents = scale.int().sub_(127).unsqueeze(-1)
        one.copy_(torch.ldexp(pairs, exponents).flatten(1).T)
    return whole


def _eight_bits(weight: Tensor, scales: Tensor) -> Tensor:
    """weight: [R, C] float8; scales: [R / 128, C / 128], rounded up. Returns [R, C] in float32."""
    whole = torch.empty(weight.shape)
    for at, scale in zip(range(0, len(weight), BLOCK), scales.float(), strict=True):
        columns = scale.repeat_interleave(BLOCK)[: weight.shape[1]]
        whole[at : at + BLOCK] = weight[at : at + BLOCK].float() * columns
    return whole
