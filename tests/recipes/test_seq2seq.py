"""Recurrent encoder-decoders against the formulas of arXiv 1409.3215 and 1409.0473 (appendix A), one document at a
time, on torch's cells in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import to_hf
from sublayer.recipes.seq2seq import TINY, seq2seq
from sublayer.state import State
from sublayer.step import Step
from tests.case import Case, assert_near, rough, texts
from tests.oracle import close

FORMS: dict[str, dict[str, Any]] = {
    "RNNsearch": {},
    "RNNsearch of LSTMs, without deep output": {"kind": "lstm", "maxout": None, "align": 7},
    "Elman's, two layers, without biases": {"kind": "elman", "layers": 2, "bias": False},
    "Sutskever": {"kind": "lstm", "layers": 2, "attention": False},
    "Sutskever of GRUs": {"kind": "gru", "layers": 3, "attention": False, "hidden": None},
}


def case_of(form: str) -> Case:
    return Case(form, seq2seq(**TINY | FORMS[form]))


class Naive:
    """A document and its source → logits [L, V], step by step, by the model's own parameters."""

    def __init__(self, model: ModelOp, form: str) -> None:
        options: dict[str, Any] = TINY | FORMS[form]
        self.w = dict(model.named_parameters())
        self.kind, self.layers, self.attention = (
            options.get(name, default) for name, default in (("kind", "gru"), ("layers", 1), ("attention", True))
        )

    def linear(self, at: str, x: Tensor) -> Tensor:
        bias = self.w.get(f"{at}.bias")
        return self.w[f"{at}.weight"] @ x + (0 if bias is None else bias)

    def cell(self, at: str, x: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        weights = [self.w.get(f"{at}.{n}") for n in ("input", "recurrent", "input_bias", "recurrent_bias")]
        move: Any = {"elman": torch.rnn_tanh_cell, "lstm": torch.lstm_cell, "gru": torch.gru_cell}[self.kind]
        rows = tuple(part[None] for part in state)
        moved = move(x[None], rows if self.kind == "lstm" else rows[0], *weights)
        return tuple(part[0] for part in (moved if self.kind == "lstm" else (moved,)))

    def zeros(self, at: str) -> tuple[Tensor, ...]:
        size = self.w[f"{at}.recurrent"].shape[1]
        return tuple(torch.zeros(size, dtype=torch.float64) for _ in range(1 + (self.kind == "lstm")))

    def encode(self, source: Tensor) -> tuple[list[Tensor], list[tuple[Tensor, ...]]]:
        """(memory, the last state of each layer's backward reading)."""
        xs, ends = list(self.w["encoder.embed.tokens.weight"][source]), []
        for i in range(self.layers):
            read = {}
            for name in ("cell", "back"):
                at = f"encoder.embed.layers.{i}.{name}"
                if f"{at}.input" not in self.w:
                    continue
                state, ys = self.zeros(at), []
                for x in xs if name == "cell" else reversed(xs):
                    state = self.cell(at, x, state)
                    ys.append(state[0])
                read[name] = ys if name == "cell" else ys[::-1]
                end = state
            ends.append(end)
            xs = [torch.cat(parts) for parts in zip(*read.values(), strict=True)]
        return xs, ends

    def __call__(self, ids: Tensor, source: Tensor) -> Tensor:
        memory, states = self.encode(source)
        xs = list(self.w["decoder.embed.tokens.weight"][ids])
        for i, state in enumerate(states):
            at, ys = f"decoder.blocks.{i}.mixer.op", []
            attends = self.attention and i == self.layers - 1
            if attends:
                bridged = self.linear(f"{at}.bridge", torch.cat(state)).tanh()  # s_0 = tanh(W_s h←_1)
                state = tuple(bridged.chunk(len(state)))
            for x in xs:
                before = state[0]
                read = self.attend(at, before, memory) if attends else x[:0]
                state = self.cell(f"{at}.cell", torch.cat([x, read]), state)
                ys.append(self.deep(at, before, x, read) if f"{at}.readout.weight" in self.w else state[0])
            xs = ys
        return torch.stack([self.linear("head", x) for x in xs])

    def attend(self, at: str, s: Tensor, memory: list[Tensor]) -> Tensor:
        asked = self.w[f"{at}.query.weight"] @ s
        energies = [
            self.w[f"{at}.energy.weight"][0] @ torch.tanh(asked + self.w[f"{at}.key.weight"] @ m) for m in memory
        ]
        shares = torch.stack(energies).exp() / torch.stack(energies).exp().sum()
        return torch.stack([share * m for share, m in zip(shares, memory, strict=True)]).sum(0)

    def deep(self, at: str, s: Tensor, x: Tensor, read: Tensor) -> Tensor:
        wide = self.linear(f"{at}.readout", torch.cat([s, x, read]))
        return torch.stack([torch.maximum(wide[2 * j], wide[2 * j + 1]) for j in range(len(wide) // 2)])


def check_parity(model: ModelOp, found: list[Tensor], expected: list[Tensor]) -> None:
    """The same logits, loss and gradient of every parameter."""
    close(torch.cat(found), torch.cat(expected), "logits")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = []
    for logits in (torch.cat(found), torch.cat(expected)):
        loss = F.cross_entropy(logits, torch.arange(len(logits)) % logits.shape[1])
        gradients.append(torch.autograd.grad(loss, parameters))
    for name, one, other in zip(names, *gradients, strict=True):
        close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("form", FORMS)
def test_sources_of_3_and_7_in_one_batch_equal_the_formulas(form: str) -> None:
    case = case_of(form)
    model = rough(case)
    naive = Naive(model, form)
    a, b = texts(case, [6, 6], 1)
    assert a.source is not None
    assert b.source is not None
    assert [len(a.source), len(b.source)] == [3, 7]
    sources = torch.stack([torch.cat([a.source, torch.full((4,), 5)]), b.source])
    step = Step(memory_segment=torch.tensor([[1, 1, 1, 0, 0, 0, 0], [1] * 7]))
    logits = model(torch.stack([a.inputs, b.inputs]), step, source=sources)
    check_parity(model, list(logits), [naive(a.inputs, a.source), naive(b.inputs, b.source)])


@pytest.mark.parametrize("form", FORMS)
def test_documents_find_their_sources_by_number(form: str) -> None:
    """Packed, the sources in another order than the documents."""
    case = case_of(form)
    model = rough(case)
    naive = Naive(model, form)
    a, b = texts(case, [4, 5], 2)
    assert a.source is not None
    assert b.source is not None
    step = Step(segment=torch.tensor([[8] * 4 + [0] + [3] * 5]), memory_segment=torch.tensor([[3] * 7 + [8] * 3]))
    ids = torch.cat([a.inputs, b.inputs[:1], b.inputs])[None]
    logits = model(ids, step, source=torch.cat([b.source, a.source])[None])[0]
    check_parity(model, [logits[:4], logits[5:]], [naive(a.inputs, a.source), naive(b.inputs, b.source)])


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_slot_that_only_waits_keeps_where_it_will_begin(form: str) -> None:
    """The source comes with a call in which the row has padding alone; its first token comes later."""
    case = case_of(form)
    model = rough(case)
    (document,) = texts(case, [5], 2)
    assert document.source is not None
    state = State.allocate(model, 1, 8, 5)
    waiting = Step(segment=torch.zeros(1, 2, dtype=torch.long), memory_segment=torch.ones(1, 3, dtype=torch.long))
    model(document.inputs[None, :2], waiting, state, source=document.source[None])
    logits = model(document.inputs[None], Step(), state)[0]
    assert_near(logits, Naive(model, form)(document.inputs, document.source), 1e-10)


def test_no_config_json_expresses_it() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture"):
        to_hf(seq2seq(**TINY))
