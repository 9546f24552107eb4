"""The short convolution against torch's conv1d, document by document."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.nn.convolution import ShortConvolution, ShortConvolutionOp
from sublayer.nn.embed import Embed
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Step

V, D = 11, 6


def model(kernel: int = 4, **options: Any) -> ModelOp:
    """Tokens, one convolution without a residual: what comes out is the convolution."""
    mixer = Sublayer("mixer", ShortConvolution(kernel, **options), skip=0.0)
    spec = Model(D, decoder=Trunk(Embed(V), (Block((mixer,)),)), head=None)
    return spec.override("init.std=1.0").build(1, dtype=torch.float64)


def op(built: ModelOp) -> ShortConvolutionOp:
    return next(module for module in built.modules() if isinstance(module, ShortConvolutionOp))


def expected(built: ModelOp, ids: Tensor) -> Tensor:
    """[L, D]: torch's own convolution of one document."""
    x, conv = built.get_parameter("decoder.embed.tokens.weight")[ids], op(built)
    padded = F.pad(x.T, (conv.spec.kernel - 1, 0))
    y = F.conv1d(padded, conv.weight, conv.bias, groups=D).T
    return F.silu(y) if conv.spec.activation else y


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(V, (length,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"activation": "silu"}], ids=str)
@pytest.mark.parametrize("kernel", [2, 4, 9])
@pytest.mark.parametrize("length", [1, 3, 12])
def test_a_document_is_convolved_as_by_torch(length: int, kernel: int, options: dict) -> None:
    built = model(kernel, **options)
    results = [built(ids(length)[None])[0], expected(built, ids(length))]
    assert_close(*results)
    gradients = [torch.autograd.grad(result.square().sum(), list(built.parameters())) for result in results]
    assert_close(*gradients)


PACKED = torch.tensor([[3, 3, 3, 3, 3, 1, 2, 2, 0, 0], [5, 1, 1, 2, 2, 2, 2, 2, 2, 2]])
SPREAD = torch.tensor([[0, 0, 3, 0, 3, 3, 0, 2, 2, 0], [4, 4, 4, 4, 0, 4, 4, 0, 0, 1]])


@pytest.mark.parametrize("segment", [PACKED, SPREAD], ids=["packed", "padding inside"])
def test_documents_of_a_row_are_convolved_alone_and_padding_is_skipped(segment: Tensor) -> None:
    built = model()
    rows = torch.stack([ids(10, 1), ids(10, 2)])
    y = built(rows, Step(segment=segment))
    loss, parts = y.new_zeros(()), y.new_zeros(())
    for row, numbers, found in zip(rows, segment, y, strict=True):
        for number in numbers[numbers != 0].unique():
            wanted = expected(built, row[numbers == number])
            assert_close(found[numbers == number], wanted)
            loss, parts = loss + found[numbers == number].square().sum(), parts + wanted.square().sum()
    assert_close(*[torch.autograd.grad(total, list(built.parameters())) for total in (loss, parts)])


@pytest.mark.parametrize("segment", [PACKED, SPREAD], ids=["packed", "padding inside"])
@torch.no_grad()
def test_a_slot_goes_on_with_the_last_real_inputs_of_its_last_document(segment: Tensor) -> None:
    built, rows = model(), torch.stack([ids(10, 1), ids(10, 2)])
    state = State.allocate(built, 2, 16)
    built(rows, Step(segment=segment), state)
    last = segment.gather(1, (torch.arange(10) * (segment != 0)).argmax(1, keepdim=True))
    y = built(torch.stack([ids(3, 3), ids(3, 4)]), Step(segment=last.expand(2, 3)), state)
    for i, seed in enumerate((3, 4)):
        document = torch.cat([rows[i][segment[i] == last[i]], ids(3, seed)])
        assert_close(y[i], expected(built, document)[-3:])


@pytest.mark.parametrize("sizes", [[1] * 12, [2, 1, 6, 3], [12]], ids=str)
@torch.no_grad()
def test_chunks_shorter_than_the_kernel_equal_the_whole(sizes: list[int]) -> None:
    built = model(kernel=5)
    state = State.allocate(built, 1, 12)
    parts = [built(part[None], Step(), state)[0] for part in ids(12).split(sizes)]
    assert_close(torch.cat(parts), expected(built, ids(12)))


@torch.no_grad()
def test_padding_leaves_the_state_as_it_is() -> None:
    built = model()
    state = State.allocate(built, 2, 16)
    built(torch.stack([ids(5), ids(5)]), Step(), state)
    before = next(iter(state.store.tensors.values())).clone()
    built(torch.stack([ids(4), ids(4)]), Step(segment=torch.tensor([[0] * 4, [1, 0, 1, 0]])), state)
    after = next(iter(state.store.tensors.values()))
    assert torch.equal(after[0], before[0])
    assert not torch.equal(after[1], before[1])


@torch.no_grad()
def test_another_documents_nan_is_not_seen() -> None:
    built = model()
    built.get_parameter("decoder.embed.tokens.weight")[0] = torch.nan
    row = torch.tensor([[0, 0, 3, 4, 5, 0]])
    y = built(row, Step(segment=torch.tensor([[1, 1, 2, 2, 2, 3]])))
    assert_close(y[0, 2:5], expected(built, torch.tensor([3, 4, 5])))


def test_it_begins_as_torchs_and_refuses_a_kernel_of_one() -> None:
    built = op(model(kernel=4))
    for parameter in built.parameters():
        assert 0.2 < parameter.abs().max() <= 0.5
    with pytest.raises(SpecError, match="kernel=1 mixes no positions"):
        ShortConvolution(1)
