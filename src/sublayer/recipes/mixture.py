"""Adaptive mixtures of local experts (Jacobs, Jordan, Nowlan and Hinton 1991): the dense mixture of experts.

A gate's softmax weighs all experts, and every one of them computes: nothing is left out, so nothing has to be
balanced. Here it stands where a Transformer has its feed-forward layer. `competition` is the paper's own loss for a
mixture that predicts vectors, under which experts specialise; `cooperation` the one it replaces.

>>> mixture(64, 2, 4, hidden=128, experts=4, vocab=256).parameters()
199296
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.experts import ExpertsOp
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.op import Context, Op, Part
from ..nn.projection import Projection
from ..nn.rope import Rope
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from ..state import State
from ..step import Step
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "mixture", "to_hf"]

ROPE = Rope(theta=10000.0)


class Mixture(Part):
    """Σ p expert(x) over all experts, p = softmax(W x)."""

    experts: int
    """E."""
    expert: FeedForward
    """The shape of each."""

    def check(self) -> None:
        self.require(self.experts > 0, f"experts must be above 0, got {self.experts}")

    def build(self, dim: int, context: Context) -> MixtureOp:
        return MixtureOp(self, dim)


class MixtureOp(Op):
    """[…, D] → […, D]."""

    def __init__(self, spec: Mixture, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.watch: Callable[[Tensor], None] | None = None  # is told the shares of each call, […, E]
        self.gate = Projection(dim, spec.experts, bias=False)
        self.experts = ExpertsOp(spec.expert, spec.experts, dim)

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        shares, outputs = self.parts(x)
        if self.watch is not None:
            self.watch(shares)
        return (shares[..., None] * outputs).sum(-2)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(shares […, E], what each expert says […, E, D]): what the paper's losses are taken of."""
        E, rows = self.spec.experts, x.flatten(0, -2)
        ends = len(rows) * torch.arange(1, E + 1, device=x.device)
        outputs = self.experts(rows.repeat(E, 1), ends).view(E, *x.shape)
        return self.gate(x).softmax(-1), outputs.movedim(0, -2)


def cooperation(shares: Tensor, outputs: Tensor, target: Tensor) -> Tensor:
    """‖d − Σ p o‖², a case: experts that must together cancel the error (eq. 1.1).

    shares […, E], outputs […, E, D], target […, D] → […].
    """
    return (target - (shares[..., None] * outputs).sum(-2)).square().sum(-1)


def localisation(shares: Tensor, outputs: Tensor, target: Tensor) -> Tensor:
    """Σ p ‖d − o‖², a case: each expert is to answer alone, as if one were drawn by its share (eq. 1.2)."""
    return (shares * (target[..., None, :] - outputs).square().sum(-1)).sum(-1)


def competition(shares: Tensor, outputs: Tensor, target: Tensor) -> Tensor:
    """−log Σ p exp(−½ ‖d − o‖²), a case: the likelihood under a mixture of Gaussians (eq. 1.3).

    Its gradient weighs an expert by how well it does beside the others, so the best one learns most.
    """
    errors = (target[..., None, :] - outputs).square().sum(-1)
    return -torch.logsumexp(shares.log() - errors / 2, -1)


def likelihood(shares: Tensor, outputs: Tensor, target: Tensor) -> Tensor:
    """The log-density of target, a case, under the mixture of Gaussians of variance 1 that `competition` stands for."""
    return -competition(shares, outputs, target) - target.shape[-1] / 2 * math.log(2 * math.pi)


def mixture(dim: int, layers: int, heads: int, hidden: int, experts: int, vocab: int, rope: Rope = ROPE) -> Model:
    """A pre-norm decoder whose feed-forward layers are mixtures of experts of one hidden layer each."""
    norm = LayerNorm()
    dense = Mixture(experts, FeedForward(hidden, "relu", bias=True))
    block = Block((pre_norm("attn", Attention(heads, position=rope), norm), pre_norm("ffn", dense, norm)))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), norm), init=Init(0.02, residual="depth"))


SIZES: dict[str, dict[str, Any]] = {
    "mixture-small": {"dim": 256, "layers": 6, "heads": 8, "hidden": 256, "experts": 4, "vocab": 256},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "hidden": 16, "experts": 3, "vocab": 97}
EXEMPT: dict[str, str] = {}
