"""A GGUF file under Hugging Face's names: what `load` reads as if it were a folder of theirs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from ...errors import WeightsError
from ...names import SAME, Row, matches
from .table import Architecture, Config, Source

Tensors = list[Tensor]


class GgufCheckpoint:
    """One tensor of theirs at a time, with what the format changes in values undone."""

    def __init__(self, source: Source, table: Architecture, config: Config) -> None:
        """Raises WeightsError for a tensor that is not all there (one half of what theirs holds in one)."""
        self._tensors = source.tensors
        self._patterns = table.rows(config)
        self._where: dict[str, tuple[Row, int]] = {}
        left = set(self._tensors.names) - source.consumed
        left = {name for name in left if not matches(table.ignored, name)}
        if config.get("tie_word_embeddings"):
            left.discard("output.weight")  # the embedding's table again, if it is there
        for row in concrete(self._patterns, left):
            missing = next((name for name in row.our_names if name not in self._tensors.names), None)
            if missing is not None:
                first = row.our_names[0]
                raise WeightsError(f"{self._tensors.file(first)}: tensor {missing} is missing beside {first}")
            left -= set(row.our_names)
            self._where |= {name: (row, i) for i, name in enumerate(row.their_names)}
        self.names = {*self._where, *left}  # what no row names stays under its own name, and has no place in the model
        self._shapes: dict[str, list[int]] = {}
        self._last: tuple[Row, Tensors] | None = None
        blocks = self._tensors.blocks
        if blocks:
            warnings.warn(f"{source.path.name}: {', '.join(blocks)} are dequantised", stacklevel=4)

    def read(self, name: str) -> Tensor:
        row, i = self._where[name]
        if self._last is None or self._last[0] is not row:
            found = row.change.back([self._tensors.read(ours) for ours in row.our_names])
            self._last = (row, found) if len(found) > 1 else None  # the experts of one tensor are asked for in turn
            return found[i]
        return self._last[1][i]

    def read_into(self, name: str, whole: Tensor) -> None:
        """Fills a contiguous tensor; a large table takes little memory beside it."""
        row, _ = self._where[name]
        if row.change is SAME:
            self._tensors.read_into(row.our_names[0], whole)
        else:
            whole.copy_(self.read(name))

    def shape(self, name: str) -> list[int]:
        if name not in self._where:
            return self._tensors.shape(name)
        if name not in self._shapes:
            row, _ = self._where[name]
            given = [self._tensors.shape(ours) for ours in row.our_names]
            try:
                found = row.change.back([torch.empty(shape, device="meta") for shape in given])
                self._shapes |= {theirs: list(one.shape) for theirs, one in zip(row.their_names, found, strict=True)}
            except (RuntimeError, IndexError, ValueError):
                raise WeightsError(
                    f"{self.file(name)}: tensor {row.our_names[0]} {given[0]} is not {len(row.their_names)} of the "
                    f"model's, such as {row.their_names[0]}"
                ) from None
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return self._tensors.dtype(self._where[name][0].our_names[0] if name in self._where else name)

    def file(self, name: str) -> Path:
        return self._tensors.file(self._where[name][0].our_names[0] if name in self._where else name)

    def called(self, name: str) -> str:
        """What the file calls a tensor of theirs, there or not."""
        for row in self._patterns:
            for theirs in row.their_names:
                match = _pattern(theirs).fullmatch(name)
                if match:
                    return row.our_names[0].format(*match.groups())
        return name


def concrete(patterns: Iterable[Row], names: Iterable[str], *, side: Literal["theirs", "ours"] = "ours") -> list[Row]:
    """The rows of the layers that occur among names, which are GGUF's ("ours") or Hugging Face's ("theirs")."""
    by_first = [(row, _pattern((row.our_names if side == "ours" else row.their_names)[0])) for row in patterns]
    found = [(row, match) for name in names for row, pattern in by_first if (match := pattern.fullmatch(name))]
    return [row.at([int(number) for number in match.groups()]) for row, match in found]


def _pattern(name: str) -> re.Pattern[str]:
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)"))
