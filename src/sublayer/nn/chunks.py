"""What recurrences with a matrix for a state need to be computed chunk by chunk: matrix products inside a chunk, and
one step of the recurrence from chunk to chunk, so that memory and work are linear in the length.

B batch, N heads, L length, C chunk size, n chunks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..step import Shared, Step


@dataclass(frozen=True)
class Chunks:
    """Rows of L tokens cut into n chunks of C, and which tokens meet in them; without several documents all do."""

    size: int  # C
    seen: Tensor  # [B|1, 1, n|1, C, C] bool: j is not after i, and of its document
    carried: Tensor | None  # [B, 1, n, C, 1] bool: tokens of the document that the chunk before ended in
    leaving: Tensor | None  # [B, 1, n, C, 1] bool: tokens of the document that the chunk ends in
    kept: Tensor | None  # [B, 1, n, 1, 1] bool: the chunk starts and ends in the same document

    @classmethod
    def of(cls, step: Step, length: int, size: int, device: torch.device) -> Chunks:
        """The first token of a call continues its slot; padding belongs to the document before it."""
        size = min(size, length)
        causal = torch.ones(size, size, dtype=torch.bool, device=device).tril()[None, None, None]
        starts = (step.shared or Shared()).starts
        if starts is None:
            return cls(size, causal, None, None, None)
        document = starts.long().cumsum(1)
        ends = document[:, -1:].expand(-1, -length % size)
        document = torch.cat([document, ends], 1).view(len(document), -1, size)
        last = document[:, :, -1:]
        before = F.pad(last[:, :-1], (0, 0, 1, 0))
        seen = causal & (document[:, None, :, :, None] == document[:, None, :, None, :])
        carried, leaving = (document == before)[:, None, ..., None], (document == last)[:, None, ..., None]
        return cls(size, seen, carried, leaving, (last == before)[:, None, ..., None])

    def cut(self, x: Tensor) -> Tensor:
        """[B, N, L, …] → [B, N, n, C, …], zeros at the end."""
        short = -x.shape[2] % self.size
        if short:
            x = F.pad(x, (0, 0) * (x.dim() - 3) + (0, short))
        return x.reshape(*x.shape[:2], -1, self.size, *x.shape[3:])


def only(x: Tensor, where: Tensor | None) -> Tensor:
    """x where a mask allows it, else 0."""
    return x if where is None else x.masked_fill(~where, 0)


def faded(logs: Tensor, dtype: torch.dtype) -> Tensor:
    """exp of logs (≤ 0) as dtype, and 0 below the square root of the smallest normal number of fp32 (of fp64, in it).

    Beside shares near 1 that is lost in rounding anyway, while products with it would be denormal, which CPUs multiply
    several times slower.
    """
    return F.threshold(logs.exp().to(dtype), torch.finfo(wide(dtype)).tiny ** 0.5, 0.0)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums over a whole document are kept in: fp32, or fp64 in an fp64 model."""
    return torch.float64 if dtype == torch.float64 else torch.float32
