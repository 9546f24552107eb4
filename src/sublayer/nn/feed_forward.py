"""Position-wise feed-forward layers, plain (Vaswani et al. 2017, eq. 2) and gated (GLU variants, arXiv 2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..state import State
from ..step import Step
from .op import Context, Op, Part, bounded
from .projection import Projection

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "tanh"]

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "tanh": torch.tanh,
}


class FeedForward(Part):
    """down(activation(up(x))), or gated: down(activation(gate(x)) · up(x)).

    Gated with "silu" it is SwiGLU, with "gelu" GeGLU, with "relu" ReGLU.
    """

    hidden: int
    """F, the inner width."""
    activation: Activation = "gelu"
    """"gelu" is exact, "gelu_tanh" its tanh approximation (GPT-2)."""
    gated: bool = False
    """Whether a third matrix gates the inner layer."""
    bias: bool = False
    """Whether the matrices have biases."""
    dropout: float = 0.0
    """Share of inner activations zeroed while training."""

    def check(self) -> None:
        self.require(self.hidden > 0, f"hidden must be above 0, got {self.hidden}")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def inner(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """What stands between the matrices: activation(up), or activation(gate) · up."""
        activation = ACTIVATIONS[self.activation]
        return activation(up) if gate is None else activation(gate) * up

    def build(self, dim: int, context: Context) -> FeedForwardOp:
        return FeedForwardOp(self, dim)


class FeedForwardOp(Op):
    """[…, D] → […, D]."""

    residual_outputs = ("down",)

    def __init__(self, spec: FeedForward, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Projection(dim, spec.hidden, spec.bias) if spec.gated else None
        self.up = Projection(dim, spec.hidden, spec.bias)
        self.down = Projection(spec.hidden, dim, spec.bias)

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        gate = None if self.gate is None else self.gate(x)
        inner = self.spec.inner(self.up(x), gate)
        return self.down(F.dropout(bounded(inner), self.spec.dropout, self.training))
