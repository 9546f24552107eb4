"""Two models' predictions beside each other, against the definition of KL divergence, token by token."""

import pytest
import torch
from torch import Tensor

from sublayer.errors import UsageError
from sublayer.eval import Comparison, Texts, compare, score
from sublayer.nn.sublayer import Model, ModelOp
from sublayer.recipes import gpt2, llama
from sublayer.step import Step
from sublayer.text import Bytes

BYTES = Bytes(("<|end|>",))
END = BYTES.eos[0]
DOCUMENTS = ["one", "Größe", "and a third"]
SPECS = [gpt2(32, 2, 4, vocab=257, context=16), llama(48, 2, 4, 2, hidden=64, vocab=257)]


def build(spec: Model, seed: int) -> ModelOp:
    """With a head of large weights, so that predictions differ."""
    model = spec.build(seed=seed, dtype=torch.float64)
    model.get_parameter("decoder.embed.tokens.weight" if spec.tied else "head.weight").data.mul_(8)
    return model


@pytest.fixture
def pair() -> list[ModelOp]:
    return [build(spec, seed) for seed, spec in enumerate(SPECS)]


def compared(pair: list[ModelOp]) -> Comparison:
    model, reference = pair
    return compare(model, reference, Texts.encode(DOCUMENTS, BYTES, END), length=16)


@torch.no_grad()
def logs(model: ModelOp, text: str) -> Tensor:
    return model(torch.tensor([[END, *text.encode()]]))[0, :-1].log_softmax(-1)


def test_divergence_and_agreement_are_those_of_their_definitions(pair: list[ModelOp]) -> None:
    found = compared(pair)
    divergences, same = list[Tensor](), list[Tensor]()
    for text in DOCUMENTS:
        mine, other = (logs(model, text) for model in pair)
        divergences.append((other.exp() * (other - mine)).sum(-1))
        same.append(mine.argmax(-1) == other.argmax(-1))
    assert found.divergence == pytest.approx(float(torch.cat(divergences).mean()), rel=1e-9)
    assert found.divergence > 0.1
    assert found.agreement == pytest.approx(float(torch.cat(same).double().mean()), rel=1e-9)
    texts = Texts.encode(DOCUMENTS, BYTES, END)
    for ours, alone in zip((found.score, found.reference), (score(m, texts, length=16) for m in pair), strict=True):
        assert ours.nats == pytest.approx(alone.nats, rel=1e-9)
        assert (ours.tokens, ours.bytes) == (alone.tokens, alone.bytes)


def test_a_model_beside_itself_is_no_distance_away(pair: list[ModelOp]) -> None:
    found = compared([pair[0], pair[0]])
    assert (found.divergence, found.agreement) == (0, 1)


def test_what_the_reference_rules_out_adds_nothing(pair: list[ModelOp], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ModelOp.logits

    def logits(model: ModelOp, hidden: Tensor, step: Step | None = None) -> Tensor:
        found = plain(model, hidden, step)
        return found.index_fill(-1, torch.tensor([0, 1]), -torch.inf) if model is pair[1] else found

    monkeypatch.setattr(ModelOp, "logits", logits)
    with torch.no_grad():
        mine = torch.cat([logs(pair[0], text) for text in DOCUMENTS])
    monkeypatch.undo()
    other = torch.cat([logs(pair[1], text) for text in DOCUMENTS])[:, 2:].log_softmax(-1)
    monkeypatch.setattr(ModelOp, "logits", logits)
    expected = float((other.exp() * (other - mine[:, 2:])).sum(-1).mean())
    assert compared(pair).divergence == pytest.approx(expected, rel=1e-9)


def test_models_of_different_vocabularies_have_nothing_to_compare(pair: list[ModelOp]) -> None:
    wider = build(llama(32, 1, 4, 2, hidden=64, vocab=300), 0)
    with pytest.raises(UsageError, match="the model has 257 ids, the other 300"):
        compared([pair[0], wider])
