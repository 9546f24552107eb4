"""seq2seq_like against Bahdanau's formulas (arXiv 1409.0473, appendix A), one document at a time, in fp64."""

from collections.abc import Mapping

import torch
from torch import Tensor

from sublayer.state import State
from sublayer.step import Step
from tests.cases import CASES
from tests.contracts import assert_near, rough
from tests.models.seq2seq_like import TINY

CASE, DIM = CASES["seq2seq_like"], TINY["dim"]
Weights = Mapping[str, Tensor]


def naive(w: Weights, ids: Tensor, source: Tensor) -> Tensor:
    """[L, V] for one document: ids [L], source [M]."""
    h = c = torch.zeros(DIM, dtype=torch.float64)
    memory = []
    for x in w["encoder.embed.tokens.weight"][source]:
        h, c = lstm(w, "encoder.embed.gates", x, h, c)
        memory.append(h)
    at, outputs = "decoder.blocks.0.mixer.op", []
    for x in w["decoder.embed.tokens.weight"][ids]:
        asked = w[f"{at}.attention.query.weight"] @ h
        energies = [
            w[f"{at}.attention.energy.weight"][0] @ torch.tanh(asked + w[f"{at}.attention.key.weight"] @ m)
            for m in memory
        ]
        shares = torch.stack(energies).exp() / torch.stack(energies).exp().sum()
        read = sum((share * m for share, m in zip(shares, memory, strict=True)), torch.zeros_like(h))
        h, c = lstm(w, f"{at}.gates", torch.cat([x, read]), h, c)
        outputs.append(h)
    return torch.stack(outputs) @ w["head.weight"].T


def lstm(w: Weights, at: str, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    forget, enter, output, new = (w[f"{at}.weight"] @ torch.cat([x, h]) + w[f"{at}.bias"]).split(DIM)
    c = torch.sigmoid(forget) * c + torch.sigmoid(enter) * torch.tanh(new)
    return torch.sigmoid(output) * torch.tanh(c), c


@torch.no_grad()
def test_sources_of_3_and_7_in_one_batch_equal_batches_of_one() -> None:
    model = rough(CASE)
    weights = dict(model.named_parameters())
    a, b = CASE.documents(CASE, [6, 6], 1)
    assert a.source is not None
    assert b.source is not None
    assert [len(a.source), len(b.source)] == [3, 7]
    sources = torch.stack([torch.cat([a.source, torch.full((4,), 5)]), b.source])
    step = Step(memory_segment=torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7]))
    logits = model(torch.stack([a.inputs, b.inputs]), step, source=sources)
    for row, document in zip(logits, (a, b), strict=True):
        assert document.source is not None
        expected = naive(weights, document.inputs, document.source)
        assert_near(row, expected, 1e-10)
        assert_near(model(document.inputs[None], source=document.source[None])[0], expected, 1e-10)


@torch.no_grad()
def test_a_slot_that_only_waits_keeps_where_it_will_begin() -> None:
    """The source comes with a call in which the row has padding alone; its first token comes later."""
    model = rough(CASE)
    (document,) = CASE.documents(CASE, [5], 2)
    assert document.source is not None
    state = State.allocate(model, 1, 8, 5)
    waiting = Step(segment=torch.zeros(1, 2, dtype=torch.long), memory_segment=torch.ones(1, 3, dtype=torch.long))
    model(document.inputs[None, :2], waiting, state, source=document.source[None])
    logits = model(document.inputs[None], Step(), state)[0]
    assert_near(logits, naive(dict(model.named_parameters()), document.inputs, document.source), 1e-10)
