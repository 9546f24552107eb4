"""scan against a loop over each document by itself."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sublayer.nn.scan import Carry, keep, resume, scan
from sublayer.state import PerSlot
from sublayer.step import Shared, Step, document_starts

SEGMENTS = [
    [[3, 3, 3, 1, 1, 7], [2, 2, 2, 2, 2, 2]],
    [[0, 1, 1, 0, 1, 2], [0, 0, 0, 0, 0, 0]],
    [[5, 0, 5, 6, 6, 0], [0, 0, 4, 4, 0, 9]],
]


def powers(x: Tensor) -> Callable[[int, Carry], tuple[Tensor, Carry]]:
    """(a, b) → (a / 2 + x, b + 1), which depends on the order and the number of the tokens."""

    def move(i: int, carry: Carry) -> tuple[Tensor, Carry]:
        moved = carry[0] / 2 + x[:, i], carry[1] + 1
        return moved[0] * moved[1][:, :, None], moved

    return move


def by_document(x: Tensor, segment: list[int], begin: tuple[float, float], fresh: Carry) -> tuple[list[Tensor], Carry]:
    """Outputs of one row's tokens that are no padding, and where the last of them leaves the carry."""
    outputs, before = [], None
    a, b = torch.full((2, 3), begin[0]), torch.full((2,), begin[1])
    for i, document in enumerate(segment):
        if document == 0:
            continue
        if before not in (None, document):
            a, b = fresh[0][i], fresh[1][i]
        before = document
        a, b = a / 2 + x[i], b + 1
        outputs.append(a * b[:, None])
    return outputs, (a, b)


@pytest.mark.parametrize("segment", SEGMENTS, ids=str)
@pytest.mark.parametrize("from_zeros", [True, False])
def test_documents_start_anew_and_padding_is_passed_over(segment: list[list[int]], from_zeros: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 6, 2, 3, generator=generator)
    fresh = torch.randn(2, 6, 2, 3, generator=generator), torch.randn(2, 6, 2, generator=generator)
    fresh = tuple(new * (not from_zeros) for new in fresh)
    numbers = torch.tensor(segment)
    step = Step(segment=numbers, shared=Shared(starts=document_starts(numbers)))
    begin = None if from_zeros else lambda i: (fresh[0][:, i], fresh[1][:, i])
    y, carry = scan(powers(x), (torch.full((2, 2, 3), 0.5), torch.full((2, 2), 2.0)), 6, step, begin)
    assert y.shape == (2, 6, 2, 3)
    for row in range(2):
        outputs, last = by_document(x[row], segment[row], (0.5, 2.0), tuple(new[row] for new in fresh))
        for found, expected in zip(carry, last, strict=True):
            torch.testing.assert_close(found[row], expected)
        real = y[row, numbers[row] != 0]
        assert len(real) == len(outputs)
        if outputs:
            torch.testing.assert_close(real, torch.stack(outputs))


def test_what_a_document_starts_from_is_free_of_nan_before_it() -> None:
    numbers = torch.tensor([[1, 2, 2]])
    step = Step(segment=numbers, shared=Shared(starts=document_starts(numbers)))
    x = torch.tensor([[[torch.nan], [1.0], [2.0]]])
    y, (a, b) = scan(powers(x[..., None, :]), (torch.zeros(1, 1, 1), torch.zeros(1, 1)), 3, step)
    assert y[0, 1:].flatten().tolist() == [1.0, 5.0]
    assert (a.item(), b.item()) == (2.5, 2.0)


def test_without_a_state_a_recurrence_resumes_from_zeros_and_keeps_nothing() -> None:
    leaves, x = {"h": PerSlot((4,)), "c": PerSlot((2, 3))}, torch.ones(5, 1, 7, dtype=torch.float64)
    h, c = resume(leaves, x, Step())
    assert (h.shape, c.shape, h.dtype) == ((5, 4), (5, 2, 3), torch.float64)
    assert not h.any()
    keep(leaves, (h, c), Step())
