"""Batch: the call of one forward pass, and what it is to answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..step import Step


@dataclass(frozen=True)
class Batch:
    """What one forward pass of an objective reads. Every tensor in it has the rows first."""

    inputs: Any
    """ids [B, L] int64, or what the model's front end takes."""
    labels: Any
    """What is to be answered: for token objectives [B, L] int64, -100 where nothing counts."""
    step: Step = field(default_factory=Step)
    """The geometry of the rows."""
    source: Any = None
    """The encoder's input, for an encoder-decoder."""

    @property
    def rows(self) -> int:
        """B, as the labels have it."""
        return len(pytree.tree_leaves(self.labels)[0])

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def split(self, rows: int) -> list[Batch]:
        """These rows in parts of at most so many."""
        starts = range(0, self.rows, rows)
        return [self._each(lambda tensor, at=start: tensor[at : at + rows]) for start in starts]

    def _each(self, change: Any) -> Batch:
        values = (self.inputs, self.labels, self.step, self.source)
        return Batch(*pytree.tree_map_only(Tensor, change, values))
