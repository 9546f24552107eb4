"""Products by oneDNN against torch's own: values, gradients, and when they are taken."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

import sublayer.nn.projection
from sublayer.nn.projection import LARGE, Projection

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch was built without oneDNN")


class Asked(TorchDispatchMode):
    """How often oneDNN was."""

    def __init__(self) -> None:
        super().__init__()
        self.times = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.times += func.namespace == "mkldnn"
        return func(*args, **(kwargs or {}))


def drawn(inner: int, outer: int, bias: bool = True, dtype: torch.dtype = torch.float32) -> Projection:
    projection = Projection(inner, outer, bias, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in projection.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return projection


def given(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def derived(projection: Projection, x: Tensor) -> list[Tensor]:
    """The value, the gradients of its cube, and the gradients of their squares."""
    inputs = [x.requires_grad_(), *projection.parameters()]
    value = projection(x)
    first = torch.autograd.grad(value.pow(3).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(torch.cat([grad.flatten() for grad in first]).square().sum(), inputs)
    return [value.detach(), *(grad.detach() for grad in (*first, *second))]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(7, 5), (2, 3, 5), (2, 0, 5), (1, 2, 3, 5)], ids=str)
def test_values_and_gradients_are_torch_s_own(
    shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sublayer.nn.projection, "LARGE", 0)
    projection, x = drawn(5, 6, bias), given(*shape)
    with Asked() as asked:
        found = derived(projection, x)
    assert asked.times >= 2
    for ours, theirs in zip(found, derived(drawn(5, 6, bias, torch.float64), x.detach().double()), strict=True):
        assert_close(ours.double(), theirs, rtol=0, atol=1e-5 * max([0.0, *theirs.abs().flatten().tolist()]))


def test_views_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sublayer.nn.projection, "LARGE", 0)
    projection, x = drawn(5, 6), given(5, 4, 3)
    out = projection(x.transpose(0, 2)[..., :5])  # neither contiguous nor whole
    assert_close(out, F.linear(x.transpose(0, 2), projection.weight, projection.bias))
    weights = torch.randn(4, 3, 6).transpose(0, 1)  # nor is what arrives in the backward pass
    ours, wanted = (
        torch.autograd.grad((y * weights).sum(), [x, *projection.parameters()])
        for y in (out, F.linear(x.transpose(0, 2), projection.weight, projection.bias))
    )
    assert_close(ours, wanted)


def test_what_is_frozen_takes_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sublayer.nn.projection, "LARGE", 0)
    projection, x = drawn(5, 6), given(7, 5)
    with Asked() as asked:
        projection(x.detach()).sum().backward()
    assert asked.times == 1
    weight = projection.weight.grad
    assert_close(weight, x.detach().sum(0).expand(6, 5))
    projection.requires_grad_(False)
    projection(x).sum().backward()
    assert projection.weight.grad is weight
    assert x.grad is not None


CASES = {
    "large": (torch.float32, LARGE // 256**2, True),
    "small": (torch.float32, LARGE // 256**2 - 1, False),
    "fp64": (torch.float64, LARGE // 256**2, False),
    "bf16": (torch.bfloat16, LARGE // 256**2, False),
}


@pytest.mark.parametrize("case", CASES)
def test_large_products_in_fp32_are_onednn_s(case: str) -> None:
    dtype, rows, expected = CASES[case]
    projection, x = drawn(256, 256, dtype=dtype), given(rows, 256, dtype=dtype)
    with Asked() as asked:
        projection(x).sum().backward()
    assert asked.times == (2 if expected else 0)


def test_autocast_and_other_kinds_of_weights_go_torch_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sharded(nn.Parameter):
        pass

    monkeypatch.setattr(sublayer.nn.projection, "LARGE", 0)
    projection, x = drawn(5, 6), given(7, 5)
    with torch.autocast("cpu", torch.bfloat16), Asked() as asked:
        assert projection(x).dtype == torch.bfloat16
    assert asked.times == 0
    projection.weight = Sharded(projection.weight.detach())
    with Asked() as asked:
        projection(x)
    assert asked.times == 0


def test_transformed_functions_differentiate_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sublayer.nn.projection, "LARGE", 0)
    projection, x = drawn(5, 6), given(7, 5).detach()
    found = torch.func.grad(lambda x: projection(x).sum())(x)
    assert_close(found, projection.weight.sum(0).expand(7, 5).detach())
