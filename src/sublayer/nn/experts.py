"""Experts: E feed-forward layers of one shape as one weight a matrix, each multiplied with the rows sent to it.

S rows (a token once for each expert it is sent to) in the order of their experts, E experts, D width, F hidden.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .feed_forward import FeedForward
from .initialise import Init, normal
from .op import Op


class ExpertsOp(Op):
    """rows [S, D], ordered by expert; ends [E]: where each expert's rows end → [S, D]; no meaning after the last end.

    An expert without rows costs nothing; its gradient is zero.
    """

    matrices = ("gate", "up", "down")
    residual_outputs = ("down",)

    def __init__(self, spec: FeedForward, experts: int, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = nn.Parameter(torch.empty(experts, spec.hidden, dim)) if spec.gated else None
        self.up = nn.Parameter(torch.empty(experts, spec.hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, spec.hidden))
        self.gate_bias = nn.Parameter(torch.empty(experts, spec.hidden)) if spec.gated and spec.bias else None
        self.up_bias = nn.Parameter(torch.empty(experts, spec.hidden)) if spec.bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, dim)) if spec.bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        for matrix in (self.gate, self.up):  # `down` is set with all that writes into the residual stream
            if matrix is not None:
                normal(matrix, init.matrix(matrix.shape[-1]), generator)
        for bias in (self.gate_bias, self.up_bias, self.down_bias):
            if bias is not None:
                bias.zero_()

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        gate = None if self.gate is None else grouped(rows, self.gate, ends, self.gate_bias)
        inner = self.spec.inner(grouped(rows, self.up, ends, self.up_bias), gate)
        inner = F.dropout(inner, self.spec.dropout, self.training)
        return grouped(inner, self.down, ends, self.down_bias)


def grouped(x: Tensor, weight: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """x[i] W[e]ᵀ + b[e] for each row of each expert: x [S, in], weight [E, out, in], ends [E] int64 → [S, out].

    Expert e has the rows from ends[e − 1] to ends[e]; rows after the last give zeros (and the last bias).
    """
    if torch.is_autocast_enabled(x.device.type) and weight.dtype != torch.float64:
        weight = weight.to(torch.get_autocast_dtype(x.device.type))
    x = x.to(weight.dtype)
    if _has_kernel(x, weight):
        # The kernel leaves rows after the last end as they were, in y and in x's gradient: they are not multiplied
        # by 0, which NaN survives, but replaced.
        real = torch.arange(len(x), device=x.device)[:, None] < ends[-1]
        x = torch.where(real, x, 0)
        y = torch.where(real, F.grouped_mm(x, weight.mT, offs=ends.int()), 0)
    elif torch.compiler.is_compiling():
        y = _compiled(x, weight, ends)
    else:
        y = cast(Tensor, cast(Any, _Grouped).apply(x, weight, ends))
    if bias is None:
        return y
    expert = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
    return y + bias.to(y.dtype)[expert.clamp(max=len(bias) - 1)]


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a kernel for all experts at once, which no CPU has; rows must be multiples of 16 bytes."""
    return (
        x.device.type == "cuda"
        and x.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and all(size * x.element_size() % 16 == 0 for size in weight.shape[1:])
    )


def _slices(ends: Tensor) -> list[tuple[int, slice]]:
    """The experts that have rows, and where."""
    stops = cast("list[int]", cast(Any, ends).tolist())
    starts = [0, *stops[:-1]]
    return [(e, slice(a, b)) for e, (a, b) in enumerate(zip(starts, stops, strict=True)) if b > a]


def _forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    y = x.new_zeros(len(x), weight.shape[1])
    for expert, rows in _slices(ends):
        torch.mm(x[rows], weight[expert].t(), out=y[rows])
    return y


def _backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    d_x, d_weight = torch.zeros_like(x), torch.zeros_like(weight)
    for expert, rows in _slices(ends):
        torch.mm(grad[rows], weight[expert], out=d_x[rows])
        torch.mm(grad[rows].t(), x[rows], out=d_weight[expert])
    return d_x, d_weight


class _Grouped(torch.autograd.Function):
    """Slicing [E, out, in] expert by expert would have autograd add up E gradients of that size."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:  # pyright: ignore
        return _forward(x, weight, ends)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        return *_backward(grad, *ctx.saved_tensors), None


# The same as operations that a compiler takes as they are: how many rows each expert has is known only when they run.
# Calling them imports the compiler, which takes a second.
_compiled: Any = torch.library.custom_op("sublayer::grouped", _forward, mutates_args=())
_compiled_backward: Any = torch.library.custom_op("sublayer::grouped_backward", _backward, mutates_args=())


@_compiled.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_compiled_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _gradients(ctx: Any, grad: Tensor) -> Any:
    return *_compiled_backward(grad, *ctx.saved_tensors), None


_compiled.register_autograd(_gradients, setup_context=_context)
