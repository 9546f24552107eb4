"""Gated convolutions against torch's conv1d and glu on each document alone, in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError, StateError
from sublayer.nn.embed import Embed
from sublayer.nn.gated_convolution import GatedConvolution, GatedConvolutionOp
from sublayer.nn.op import Context
from sublayer.nn.sublayer import Block, Model, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Shared, Step, document_starts
from tests.case import assert_near

D = 3
FORMS: list[dict[str, Any]] = [
    {"kernel": 2},
    {"kernel": 3, "dilation": 2},
    {"kernel": 4, "bias": False},
    {"kernel": 3, "causal": False},
    {"kernel": 5, "dilation": 3, "causal": False},
]
SEGMENTS = [[[1] * 9, [1] * 9], [[0, 2, 2, 2, 0, 2, 5, 5, 0], [4, 1, 1, 1, 1, 1, 1, 0, 0]], [[0] * 9, [0] * 8 + [3]]]


def made(**options: Any) -> GatedConvolutionOp:
    op = GatedConvolution(**options).build(D, Context()).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return op


def alone(op: GatedConvolutionOp, x: Tensor) -> Tensor:
    """[L, D] → [L, D]: eq. 1 of arXiv 1612.08083."""
    spec = op.spec
    reach = (spec.kernel - 1) * spec.dilation
    padded = F.pad(x.T, (reach, 0) if spec.causal else (reach // 2, reach // 2))
    weight = op.weight.view(2 * D, spec.kernel, D).transpose(1, 2)
    return F.glu(F.conv1d(padded[None], weight, op.bias, dilation=spec.dilation), 1)[0].T


@pytest.mark.parametrize("segment", SEGMENTS, ids=str)
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_each_document_is_convolved_alone(options: dict[str, Any], segment: list[list[int]]) -> None:
    op, numbers = made(**options), torch.tensor(segment)
    x = torch.randn(2, 9, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    y = op(x, Step(segment=numbers, shared=Shared(starts=document_starts(numbers))))
    total, expected_total = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for row in range(2):
        for number in numbers[row].unique():
            if number == 0:
                continue
            here = numbers[row] == number
            expected = alone(op, x[row][here])
            assert_near(y[row][here], expected, 1e-12)
            total, expected_total = total + y[row][here].square().sum(), expected_total + expected.square().sum()
    leaves = [x, *op.parameters()]
    for found, wanted in zip(
        torch.autograd.grad(total, leaves), torch.autograd.grad(expected_total, leaves), strict=True
    ):
        assert_near(found, wanted, 1e-12)


@pytest.mark.parametrize("options", FORMS, ids=str)
def test_whole_rows(options: dict[str, Any]) -> None:
    op = made(**options)
    for length in (1, 2, 11):
        x = torch.randn(2, length, D, dtype=torch.float64)
        y = op(x, Step())
        for row, found in zip(x, y, strict=True):
            assert_near(found, alone(op, row), 1e-12)


def test_what_sees_both_ways_has_no_state() -> None:
    op = made(causal=False)
    assert not op.state()
    with pytest.raises(StateError, match="cannot be continued"):
        op(torch.zeros(1, 2, D).double(), Step(), State.allocate(made(), 1, 4))


def test_variance_is_kept_as_the_paper_means_it() -> None:
    """GLU outputs of a new layer have about the variance of its inputs (arXiv 1705.03122, section 3.5)."""
    block = Block((Sublayer("mixer", GatedConvolution(3), skip=0.0),))
    model = Model(64, decoder=Trunk(Embed(5), (block,)), head=None).build(seed=1)
    op = model.get_submodule("decoder.blocks.0.mixer.op")
    y = op(torch.randn(4, 50, 64), Step())
    assert 0.7 < float(y.detach().var()) < 1.7
    assert not op.bias.any()  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kernel": 1}, "mixes no positions"),
        ({"dilation": 0}, "dilation is at least 1"),
        ({"kernel": 4, "causal": False}, "has no middle"),
        ({"dropout": 1.0}, "dropout is a share"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        GatedConvolution(**options)
