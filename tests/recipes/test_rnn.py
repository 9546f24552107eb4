"""Recurrent language models against torch.nn's layers in fp64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sublayer.errors import SpecError
from sublayer.names import expand
from sublayer.nn.recurrent import Kind
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import to_hf
from sublayer.recipes.rnn import NAMES, TINY, rnn
from sublayer.step import Step
from tests.oracle import PACKED, close

IDS = torch.randint(TINY["vocab"], (2, 12), generator=torch.Generator().manual_seed(1))
LAYERS: dict[str, Any] = {"elman": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}


class Theirs(nn.Module):
    """The model as torch's own parts make it, with every parameter drawn."""

    def __init__(self, kind: Kind, tied: bool, bias: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        dim, vocab = TINY["dim"], TINY["vocab"]
        self.encoder = nn.Embedding(vocab, dim)
        self.rnn = nn.ModuleList(LAYERS[kind](dim, dim, batch_first=True, bias=bias) for _ in range(TINY["layers"]))
        self.decoder = nn.Linear(dim, vocab, bias)
        self.double()
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.5)
        if tied:
            self.decoder.weight = self.encoder.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.encoder(ids)
        for layer in self.rnn:
            x = layer(x)[0]
        return self.decoder(x)


def check_parity(theirs: nn.Module, ours: ModelOp, calls: list[tuple[Tensor, Tensor]]) -> None:
    """The same logits, loss and gradients; calls are (what ours answers, what theirs answers)."""
    found, expected = (torch.cat([answer.flatten(0, -2) for answer in side]) for side in zip(*calls, strict=True))
    close(found, expected, "logits")
    targets = torch.arange(len(found)) % found.shape[1]
    for logits in (found, expected):
        F.cross_entropy(logits, targets).backward()
    gradients, wanted = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for row in expand(NAMES, gradients):
        gradient, want = gradients.pop(row.our_names[0]).grad, wanted.pop(row.their_names[0]).grad
        assert gradient is not None
        assert want is not None
        close(gradient, want, f"gradient of {row.our_names[0]}")
    assert not gradients
    assert not wanted


@pytest.mark.parametrize("geometry", ["whole", "packed"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_logits_loss_and_gradients_equal_theirs(kind: Kind, tied: bool, geometry: str) -> None:
    theirs = Theirs(kind, tied, bias=True)
    ours = loaded(theirs, kind=kind, tied=tied)
    if geometry == "whole":
        check_parity(theirs, ours, [(ours(IDS), theirs(IDS))])
        return
    logits, calls = ours(IDS, Step(segment=PACKED)), []
    for row, numbers in enumerate(PACKED):
        for number in numbers.unique():
            calls.append((logits[row][numbers == number], theirs(IDS[row][numbers == number][None])[0]))
    check_parity(theirs, ours, calls)


def test_without_biases() -> None:
    theirs = Theirs("lstm", tied=False, bias=False)
    ours = loaded(theirs, bias=False)
    check_parity(theirs, ours, [(ours(IDS), theirs(IDS))])


def loaded(theirs: nn.Module, **options: Any) -> ModelOp:
    """Ours, with their parameters put in by the checkpoint table, and given back by it."""
    ours = rnn(**TINY | options).build(dtype=torch.float64).eval()
    own, values = dict(ours.named_parameters()), dict(theirs.named_parameters())
    with torch.no_grad():
        for row in expand(NAMES, own):
            own[row.our_names[0]].copy_(row.change.into([values[row.their_names[0]]])[0])
    for row in expand(NAMES, own):
        assert torch.equal(row.change.back([own[row.our_names[0]]])[0], values[row.their_names[0]])
    return ours


def test_dropout_falls_on_tokens_and_between_layers() -> None:
    spec = rnn(**TINY, dropout=0.3)
    found = [spec.find(f"decoder.{path}.dropout") for path in ("embed", "blocks.0.mixer", "blocks.1.mixer")]
    assert found == [0.3, 0.3, 0.3]
    model = spec.build()
    assert not torch.equal(model.train()(IDS), model(IDS))
    assert torch.equal(model.eval()(IDS), model(IDS))


def test_no_config_json_expresses_it() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture"):
        to_hf(rnn(**TINY))
