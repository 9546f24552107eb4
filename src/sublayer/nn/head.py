"""Heads: from the residual stream to what a model answers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SpecError
from ..step import Step
from .initialise import Init, normal
from .op import Context, Part


class Head(Part):
    """Logits: scale · (x Wᵀ) + bias, then softly capped. Tied, it has no weight and is handed the embedding's."""

    bias: bool = False
    """Whether a bias is learned."""
    scale: float = 1.0
    """What x is multiplied by first (D^−1/2 in T5 when tied)."""
    softcap: float | None = None
    """c in c · tanh(logits / c); None: no cap (Gemma 2 uses 30)."""

    def check(self) -> None:
        self.require(self.softcap is None or self.softcap > 0, f"softcap must be above 0, got {self.softcap}")

    def build(self, dim: int, context: Context) -> HeadOp:
        if context.vocab is None:
            raise SpecError("Head: logits over tokens need a token embedding (Embed); give another head, or None")
        return HeadOp(self, dim, context.vocab, context.tied)


class HeadOp(nn.Module):
    """x […, D], table: the embedding's [V, D] when tied → […, V] in x's dtype."""

    def __init__(self, spec: Head, dim: int, vocab: int, tied: bool) -> None:
        super().__init__()
        self.spec = spec
        self.weight = None if tied else nn.Parameter(torch.empty(vocab, dim))
        self.bias = nn.Parameter(torch.empty(vocab)) if spec.bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        if self.weight is not None:
            normal(self.weight, init.matrix(self.weight.shape[1]), generator)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        weight = self.weight if self.weight is not None else table
        assert weight is not None
        logits = F.linear(x * self.spec.scale if self.spec.scale != 1.0 else x, weight, self.bias)
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits
