"""Feed-forward layers against their formulas."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn.feed_forward import ACTIVATIONS, FeedForward, FeedForwardOp
from sublayer.nn.op import Context

FORMULAS = {
    "relu": lambda x: (x + x.abs()) / 2,
    "gelu": lambda x: x / 2 * (1 + torch.special.erf(x / math.sqrt(2))),
    "gelu_tanh": lambda x: x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: 1 - 2 / (1 + torch.exp(2 * x)),
}


def drawn(spec: FeedForward, dim: int = 5) -> FeedForwardOp:
    op = spec.build(dim, Context()).double().eval()
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_()
    return op


def linear(layer: nn.Linear, x: Tensor) -> Tensor:
    y = torch.einsum("...i,oi->...o", x, layer.weight)
    return y if layer.bias is None else y + layer.bias


@pytest.mark.parametrize("name", FORMULAS)
def test_activations_are_their_formulas(name: str) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    assert_close(ACTIVATIONS[name](x), FORMULAS[name](x), rtol=0, atol=1e-14)


def test_every_activation_is_tested() -> None:
    assert FORMULAS.keys() == ACTIVATIONS.keys()
    assert_close(FORMULAS["gelu"](torch.tensor(1.0)), torch.tensor(0.8413447))  # x · Φ(x)


@pytest.mark.parametrize("activation", FORMULAS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_values_are_those_of_the_formula(activation, bias: bool, gated: bool) -> None:
    op = drawn(FeedForward(7, activation, gated=gated, bias=bias))
    x = torch.randn(2, 3, 5, dtype=torch.float64)
    f = FORMULAS[activation]
    inner = f(linear(op.gate, x)) * linear(op.up, x) if op.gate is not None else f(linear(op.up, x))
    assert_close(op(x), linear(op.down, inner), rtol=0, atol=1e-12)
    assert sorted(dict(op.named_parameters())) == sorted(
        f"{layer}.{kind}" for layer in (["gate"] * gated + ["up", "down"]) for kind in (["bias"] * bias + ["weight"])
    )


def test_dropout_acts_in_training_only_on_the_inner_layer() -> None:
    op = drawn(FeedForward(1000, "relu", dropout=0.25))
    x = torch.randn(4, 5, dtype=torch.float64)
    assert torch.equal(op(x), op(x))
    op.train()
    assert not torch.equal(op(x), op(x))
    kept: list[Tensor] = []
    op.down.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0]))
    op(x)
    before = torch.relu(op.up(x))
    positive = before > 0
    share = (kept[0][positive] == 0).double().mean().item()
    assert abs(share - 0.25) < 0.05
    survivors = positive & (kept[0] != 0)
    assert_close(kept[0][survivors], before[survivors] / 0.75)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"hidden": 0}, "hidden must be above 0, got 0"),
        ({"hidden": 4, "dropout": 1.0}, "dropout is a share from 0 to below 1, got 1.0"),
        ({"hidden": 4, "dropout": -0.1}, "dropout is a share"),
        ({"hidden": 4, "activation": "swish"}, "expected 'relu' or 'gelu' or .*, got 'swish'"),
        ({"hidden": 4.5}, "hidden: expected int, got 4.5"),
    ],
)
def test_what_describes_no_layer_is_refused(values: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        FeedForward(**values)
