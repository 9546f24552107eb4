"""Additive attention: what it tells and what it refuses. Its formula is held in tests/recipes/test_seq2seq.py."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sublayer.errors import InputError, SpecError
from sublayer.nn.additive import Additive, AdditiveOp
from sublayer.nn.op import Context
from sublayer.step import Step
from tests.case import rough, texts
from tests.cases import CASES


@torch.no_grad()
def test_the_alignment_can_be_watched() -> None:
    """[B, 1, L, M]: a document's tokens share out one among the vectors of their own source, and nothing elsewhere."""
    case = CASES["seq2seq"]
    model, seen = rough(case), list[Tensor]()
    op = model.get_submodule("decoder.blocks.0.mixer.op")
    assert isinstance(op, AdditiveOp)
    op.watch = seen.append
    a, b = texts(case, [4, 5], 2)
    assert a.source is not None
    assert b.source is not None
    step = Step(segment=torch.tensor([[1] * 4 + [2] * 5]), memory_segment=torch.tensor([[1] * 3 + [2] * 7 + [0]]))
    source = torch.cat([a.source, b.source, a.source[:1]])[None]
    model(torch.cat([a.inputs, b.inputs])[None], step, source=source)
    (weights,) = seen
    assert weights.shape == (1, 1, 9, 11)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, 9, dtype=torch.float64))
    assert not weights[..., :4, 3:].any()
    assert not weights[..., 4:, :3].any()
    assert not weights[..., 10].any()
    assert weights.std() > 0.05


@torch.no_grad()
def test_nan_in_memory_that_nobody_sees_reaches_nobody() -> None:
    model = rough(CASES["seq2seq"])
    memory = torch.randn(1, 5, 32, dtype=torch.float64)
    ids = torch.tensor([[1, 2, 3]])
    bad = memory.clone()
    bad[:, 3:] = torch.nan
    results = [model(ids, Step(memory=rows, memory_segment=torch.tensor([[1, 1, 1, 0, 0]]))) for rows in (memory, bad)]
    assert torch.equal(*results)


def test_without_memory_attention_says_what_it_needs() -> None:
    op = Additive(hidden=4).build(4, Context(memory=6))
    with pytest.raises(InputError, match="needs Step.memory"):
        op(torch.zeros(1, 2, 4), Step())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"hidden": 0}, "hidden must be above 0"), ({"maxout": -1}, "maxout must be above 0"), ({"begin": -1}, "begin")],
    ids=str,
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Additive(**options)
