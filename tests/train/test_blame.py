"""The module that first made a number that is not finite is named."""

from typing import Any

import pytest
import torch

import sublayer
from sublayer.train.batch import Batch
from sublayer.train.blame import blame
from sublayer.train.language import next_token

BATCH = Batch(torch.arange(6).view(1, 6), torch.arange(1, 7).view(1, 6))


def model(dtype: torch.dtype = torch.float32) -> Any:
    return sublayer.recipes.llama(16, 2, 2, 1, hidden=24, vocab=11).build(seed=0, dtype=dtype)


def test_a_finite_run_blames_nothing() -> None:
    built = model()
    assert blame(built, [BATCH], next_token) == ("nothing that a second run shows", None)
    assert all(p.grad is None for p in built.parameters())


def test_a_weight_is_named() -> None:
    built = model()
    with torch.no_grad():
        built.get_parameter("decoder.blocks.1.ffn.op.up.weight")[3, 2] = torch.nan
    said = "the weight decoder.blocks.1.ffn.op.up.weight is not finite itself"
    assert blame(built, [BATCH], next_token) == (said, None)


@pytest.mark.parametrize("name", ["decoder.blocks.0.ffn.pre", "decoder.blocks.1.attn.op.v", "decoder.norm"])
def test_the_first_module_of_the_forward_pass_is_named(name: str) -> None:
    """It overflows; what follows is not finite either, and what contains it neither."""
    built = model()
    with torch.no_grad():
        built.get_submodule(name).weight.fill_(3e38)
    said, which = blame(built, [BATCH], next_token)
    assert said.startswith(f"the output of {name} (")
    assert which == 0


class Cliff(torch.autograd.Function):
    """The identity, with a gradient that is not finite."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad * torch.inf


class Steep(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *given: Any) -> Any:
        return Cliff.apply(self.inner(*given))


def test_the_first_module_of_the_backward_pass_is_named() -> None:
    built = model()
    block = built.decoder.blocks["1"].ffn
    block.op.up = Steep(block.op.up)
    said, _ = blame(built, [BATCH], next_token)
    assert said.startswith("the gradient through decoder.blocks.1.ffn.op.up")
    assert all(p.grad is None for p in built.parameters())


def test_the_hooks_are_gone_afterwards() -> None:
    built = model()
    blame(built, [BATCH], next_token)
    assert all(not m._forward_hooks and not m._backward_hooks for m in built.modules())
