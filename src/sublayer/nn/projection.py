"""Matrices and tables without values. `initialise` or a checkpoint sets them.

torch's own modules draw values as they are made: wasted, and on meta it imports the compiler, which takes a second.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGE = 2**24  # multiplications from which on oneDNN was faster than MKL, at every width measured (64 to 4096)
_ONEDNN = "_linear_pointwise"  # the operation that torch's compiler uses; torch's own `linear` asks MKL


class Projection(nn.Linear):
    """x Wᵀ + b: […, in] → […, out]; a torch.nn.Linear in every respect but that nothing is drawn.

    On a CPU, large products in fp32 are oneDNN's: 8 to 30% faster than MKL's on a CPU that is not Intel's, with the
    rounding of another order of sums.
    """

    def reset_parameters(self) -> None:
        pass

    def forward(self, input: Tensor) -> Tensor:
        if _suits_onednn(input, self.weight):
            return cast(Any, _Product).apply(input, self.weight, self.bias)
        return F.linear(input, self.weight, self.bias)


def _suits_onednn(x: Tensor, weight: Tensor) -> bool:
    return (
        x.numel() * len(weight) >= LARGE
        and x.dtype == weight.dtype == torch.float32
        and x.device.type == weight.device.type == "cpu"
        and type(x) is Tensor
        and type(weight) in (Tensor, nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, _ONEDNN)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return getattr(torch.ops.mkldnn, _ONEDNN)(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """x [.., in], weight [out, in] → [.., out]. The weight's gradient, which is added up over rows, stays MKL's."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:  # pyright: ignore
        return _product(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        d_x = cast(Any, _Product).apply(grad, weight.t(), None) if of_x else None
        rows = grad.reshape(-1, grad.shape[-1])
        d_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if of_weight else None
        return d_x, d_weight, rows.sum(0) if of_bias else None


def table(rows: int, dim: int) -> nn.Embedding:
    """A table of vectors, looked up by id."""
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim))
