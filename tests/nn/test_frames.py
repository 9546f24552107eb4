"""Frames against two convolutions written out, number by number."""

import math

import pytest
import torch
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.frames import Frames, FramesOp
from sublayer.nn.op import Context
from sublayer.step import Step

DIM, FEATURES, LENGTH = 6, 3, 4


def drawn() -> FramesOp:
    op = Frames(FEATURES, LENGTH).build(DIM, Context()).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return op


def convolved(x: Tensor, weight: Tensor, bias: Tensor, stride: int) -> Tensor:
    """x [T, in] → [ceil(T / stride), out]: gelu of bias + Σ over the frame before, the frame and the one after."""
    rows = []
    for t in range(0, len(x), stride):
        total = bias.clone()
        for tap in range(3):
            if 0 <= t + tap - 1 < len(x):
                total = total + weight[:, :, tap] @ x[t + tap - 1]
        rows.append(total * 0.5 * (1 + torch.erf(total / math.sqrt(2))))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2, 7, 8])
def test_vectors_equal_the_convolutions_written_out(frames: int) -> None:
    op = drawn()
    x = torch.randn(2, frames, FEATURES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found, step = op(x, Step())
    assert step.segment is None
    for row, given in zip(found, x, strict=True):
        inner = convolved(given, op.first.weight, op.get_parameter("first.bias"), 1)
        outer = convolved(inner, op.second.weight, op.get_parameter("second.bias"), 2)
        # Wavelengths from 2π to 2π · 10000 in equal ratios: with 3 of them, 10000^0, 10000^(1/2), 10000^1.
        waves = [[f(pos / 10000 ** (i / 2)) for f in (math.sin, math.cos) for i in range(3)] for pos in range(LENGTH)]
        expected = outer + torch.tensor(waves, dtype=torch.float64)[: len(outer)]
        torch.testing.assert_close(row, expected, atol=1e-12, rtol=0)


@torch.no_grad()
def test_the_segment_is_halved_with_the_frames() -> None:
    step = Step(segment=torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1] * 7]))
    _, found = drawn()(torch.zeros(2, 7, FEATURES, dtype=torch.float64), step)
    assert found.segment is not None
    assert found.segment.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]


@pytest.mark.parametrize("sizes", [{"features": 0}, {"length": 0}, {"dropout": 1.0}], ids=str)
def test_sizes_that_cannot_be_meant_are_refused(sizes: dict) -> None:
    with pytest.raises(SpecError, match="above 0|share"):
        Frames(3, 4).replace(**sizes)
