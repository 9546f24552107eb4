"""Gated convolutions over positions, all channels mixed.

B batch, L new tokens, D model width, K kernel.
Source: gated linear units, Dauphin et al. 2017 (arXiv 1612.08083, eq. 1), as blocks of ConvS2S (arXiv 1705.03122,
section 3.2); dilation, ByteNet (arXiv 1610.10099, section 3.2).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import StateError
from ..state import Leaf, PerSlot, State
from ..step import Step
from .convolution import Gathered, neighbour
from .initialise import Init, normal
from .op import Context, Growth, Op, Part
from .scan import keep, resume


class GatedConvolution(Part):
    """a · sigmoid(b), where [a, b]_t = bias + Σ_j W_j x_{t + (j − J) · dilation}, j from 0 to K − 1.

    J = K − 1 where it is causal, else (K − 1) / 2. A document sees itself alone: what lies outside of it counts as 0,
    and padding is skipped.
    """

    kernel: int = 3
    """K, how many inputs an output sees."""
    dilation: int = 1
    """How far apart they are."""
    causal: bool = True
    """Whether they end with the output's own place, or have it in their middle."""
    bias: bool = True
    """Whether both halves have one."""
    dropout: float = 0.0
    """Share of inputs zeroed while training."""

    def check(self) -> None:
        self.require(self.kernel > 1, f"kernel={self.kernel} mixes no positions: give 2 or more")
        self.require(self.dilation > 0, f"dilation is at least 1, got {self.dilation}")
        self.require(self.causal or self.kernel % 2 == 1, f"kernel={self.kernel} has no middle: give an odd one")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    @property
    def growth(self) -> Growth:
        return Growth("k n d²", "1", "n/k")

    def build(self, dim: int, context: Context) -> GatedConvolutionOp:
        return GatedConvolutionOp(self, dim)


class GatedConvolutionOp(Op):
    """[B, L, D] → [B, L, D]; its state is the last (K − 1) · dilation inputs of a slot. The weight is [2D, K · D].

    Raises StateError where a convolution that sees both ways has a state.
    """

    matrices = ("weight",)

    def __init__(self, spec: GatedConvolution, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(2 * dim, spec.kernel * dim))
        self.bias = nn.Parameter(torch.empty(2 * dim)) if spec.bias else None
        reach = (spec.kernel - 1) * spec.dilation
        self.before, self.after = (reach, 0) if spec.causal else (reach // 2, reach // 2)
        self.leaves: dict[str, Leaf] = {"inputs": PerSlot((reach, dim))} if spec.causal else {}

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """Weights of variance 4 (1 − dropout) / (K · D): gated units keep a quarter (ConvS2S, section 3.5)."""
        normal(self.weight, 2 * ((1 - self.spec.dropout) / self.weight.shape[1]) ** 0.5, generator)
        if self.bias is not None:
            self.bias.zero_()

    def state(self) -> dict[str, Leaf]:
        return self.leaves

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        if state is not None and not self.spec.causal:
            raise StateError("a convolution that sees both ways cannot be continued: call the model without a state")
        x = F.dropout(x, self.spec.dropout, self.training)
        row = None if step.segment is None else Gathered.read(step, step.segment, self.before)
        if row is not None:
            x = row.gathered(x)
        past = x.new_zeros(len(x), self.before, x.shape[2]) if state is None else resume(self.leaves, x, step, state)[0]
        known = torch.cat([past, x], 1)
        spots = range(-self.before, self.after + 1, self.spec.dilation)
        taps = [neighbour(known, x, row, spot) for spot in spots]
        a, b = F.linear(torch.cat(taps, -1), self.weight, self.bias).chunk(2, -1)
        y = a * torch.sigmoid(b)
        if state is not None:
            newest = known[:, -self.before :] if row is None else row.newest(known, self.before)
            keep(self.leaves, (newest,), step, state)
        return y if row is None else row.scattered(y)
