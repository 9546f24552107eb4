"""Mixture of experts against its formulas, token by token and expert by expert."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.nn.feed_forward import ACTIVATIONS, FeedForward
from sublayer.nn.moe import MoE, MoEOp, Router
from sublayer.nn.op import Context
from sublayer.step import Step

EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-11}


def drawn(spec: MoE, dim: int = 8, seed: int = 0) -> MoEOp:
    op = spec.build(dim, Context()).double().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_(generator=generator)
    return op


def moe(hidden: int = 5, number: int = 6, *, bias: bool = False, gated: bool = True, **router: Any) -> MoE:
    return MoE(number, FeedForward(hidden, "silu", gated=gated, bias=bias), Router(**router))


def tokens(*shape: int, dim: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(*shape, dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


def expert(op: MoEOp, e: int, x: Tensor) -> Tensor:
    """One expert on one vector."""
    inner = op.experts

    def product(matrix: Tensor, bias: Tensor | None, v: Tensor) -> Tensor:
        return matrix[e] @ v if bias is None else matrix[e] @ v + bias[e]

    up, activation = product(inner.up, inner.up_bias, x), ACTIVATIONS[op.spec.expert.activation]
    hidden = activation(up) if inner.gate is None else activation(product(inner.gate, inner.gate_bias, x)) * up
    return product(inner.down, inner.down_bias, hidden)


def naive(op: MoEOp, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """[B, L, D]: the sum over a token's experts, one after the other."""
    rows = [
        torch.stack([w * expert(op, int(e), v) for e, w in zip(es, ws, strict=True)]).sum(0)
        for v, es, ws in zip(x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1), strict=True)
    ]
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("active", [1, 2, 6])
def test_values_and_gradients_are_those_of_the_sum_over_experts(active: int, gated: bool, bias: bool) -> None:
    spec = MoE(6, FeedForward(5, "silu", gated=gated, bias=bias), Router(active, renormalise=False, bias=bias))
    op = drawn(spec)
    x = tokens(2, 5).requires_grad_()
    logits = F.linear(x, op.router.weight, op.router.bias)
    weights, chosen = logits.softmax(-1).topk(active, -1)
    found, expected = op(x, Step()), naive(op, x, chosen, weights)
    assert_close(found, expected, **EXACT)
    inputs = [x, *op.parameters()]
    for one, other in zip(*(torch.autograd.grad(y.square().sum(), inputs) for y in (found, expected)), strict=True):
        assert_close(one, other, rtol=0, atol=1e-11 * max(1.0, float(other.abs().max())))
