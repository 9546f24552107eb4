"""Normalisation over the last dimension: LayerNorm (arXiv 1607.06450) and RMSNorm (arXiv 1910.07467)."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import State
from ..step import Step
from .initialise import Init
from .op import Context, Op, Part


class LayerNorm(Part):
    """(x − mean) / sqrt(variance + eps) · weight + bias."""

    eps: float = 1e-5
    """Added to the variance."""
    bias: bool = True
    """Whether a bias is learned beside the weight."""

    def check(self) -> None:
        self.require(self.eps >= 0, f"eps must be at least 0, got {self.eps}")

    def build(self, dim: int, context: Context) -> LayerNormOp:
        return LayerNormOp(self, dim)


class LayerNormOp(Op):
    """[…, D] → […, D] in x's dtype; the statistics are taken in fp32 at least."""

    def __init__(self, spec: LayerNorm, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if spec.bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.fill_(1)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.spec.eps)


class RMSNorm(Part):
    """x / sqrt(mean(x²) + eps) · weight, or · (1 + weight)."""

    eps: float = 1e-6
    """Added to the mean square."""
    plus_one: bool = False
    """Gemma's form: the stored weight is the distance from 1, and is applied before rounding to x's dtype."""

    groups: int = 1
    """Equal parts of the vector that are each normalised alone (Mamba-2)."""
    weight: bool = True
    """Whether a weight is learned."""

    def check(self) -> None:
        self.require(self.eps >= 0, f"eps must be at least 0, got {self.eps}")
        self.require(self.groups > 0, f"groups must be above 0, got {self.groups}")
        self.require(self.weight or not self.plus_one, "plus_one says how a weight is stored, and there is none")

    def build(self, dim: int, context: Context) -> RMSNormOp:
        self.require(dim % self.groups == 0, f"groups={self.groups} do not divide the width {dim}")
        return RMSNormOp(self, dim)


class RMSNormOp(Op):
    """[…, D] → […, D] in x's dtype; the mean square is taken in fp32 at least."""

    def __init__(self, spec: RMSNorm, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(dim)) if spec.weight else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        if self.weight is not None:
            self.weight.fill_(0 if self.spec.plus_one else 1)

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        if x.dtype in (torch.float32, torch.float64) and self.spec.groups == 1:
            weight = self.weight
            if weight is not None and self.spec.plus_one:
                weight = 1 + weight.to(x.dtype)
            fast = weight is not None and x.dtype == weight.dtype and not torch.compiler.is_compiling()
            if fast and torch.is_grad_enabled():
                return cast(Any, _Normed).apply(x, weight, self.spec.eps)
            return F.rms_norm(x, x.shape[-1:], weight, self.spec.eps)
        wide = x if x.dtype == torch.float64 else x.float()
        parts = wide.reshape(*wide.shape[:-1], self.spec.groups, -1)
        wide = (parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + self.spec.eps)).flatten(-2)
        if self.weight is None:
            return wide.to(x.dtype)
        if self.spec.plus_one:
            return (wide * (1 + self.weight.to(wide.dtype))).to(x.dtype)
        return (self.weight * wide.to(x.dtype)).to(x.dtype)


class _Normed(torch.autograd.Function):
    """RMSNorm for training: torch's own gradient is a dozen operations on a CPU, each over the whole of x."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:  # pyright: ignore
        return (x * _inverse(x, eps)).mul_(weight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, ctx.eps = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        inverse = _inverse(x, ctx.eps)
        normed, scaled = x * inverse, grad * weight
        d_x = torch.addcmul(scaled, normed, (scaled * normed).mean(-1, keepdim=True), value=-1) * inverse
        return d_x, (grad * normed).reshape(-1, len(weight)).sum(0), None


def _inverse(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x²) + eps), […, 1]."""
    return (x.square().mean(-1, keepdim=True) + eps).rsqrt()
