"""Heads against their formulas; what they answer for packed and padded documents."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import InputError, SpecError
from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.head import Classifier, Head, Pool, Pooled, Spans, Transform, of_documents
from sublayer.nn.norm import LayerNorm
from sublayer.nn.op import Context, Part
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm, repeat
from sublayer.step import Step
from sublayer.train.loss import head_loss
from tests.case import Case
from tests.contracts import compiled, learning, packing, padding, round_trip

SEGMENT = torch.tensor([[0, 3, 3, 3, 0, 1, 1, 0], [2, 2, 2, 2, 2, 2, 5, 5], [0] * 8, [4, 4, 4, 4, 4, 4, 4, 4]])
DOCUMENTS = [(0, [1, 2, 3]), (0, [5, 6]), (1, [0, 1, 2, 3, 4, 5]), (1, [6, 7]), (3, list(range(8)))]
X = torch.randn(4, 8, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
HOW: tuple[Pool, ...] = ("first", "mean", "last")


def drawn(head: Part, dim: int = 16, context: Context | None = None) -> torch.nn.Module:
    module = head.build(dim, context or Context()).double().eval()
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module


def pooled(tokens: Tensor, how: Pool) -> Tensor:
    return {"first": tokens[0], "mean": tokens.mean(0), "last": tokens[-1]}[how]


def test_the_masked_language_models_head_is_its_formula() -> None:
    table = torch.randn(11, 16, dtype=torch.float64)
    head = drawn(Head(bias=True, before=Transform("gelu", LayerNorm(1e-12))), context=Context(vocab=11, tied=True))
    assert {name for name, _ in head.named_parameters()} == {
        "before.dense.weight", "before.dense.bias", "before.norm.weight", "before.norm.bias", "bias",
    }  # fmt: skip
    dense, norm = head.get_submodule("before.dense"), head.get_submodule("before.norm")
    inner = F.layer_norm(F.gelu(dense(X)), (16,), norm.get_parameter("weight"), norm.get_parameter("bias"), 1e-12)
    assert_close(head(X, Step(), table), inner @ table.T + head.get_parameter("bias"), rtol=0, atol=1e-10)


@pytest.mark.parametrize("how", HOW)
def test_every_token_has_the_classes_of_its_document(how: Pool) -> None:
    head = drawn(Classifier(3, how, Transform("tanh")))
    dense, out = head.get_submodule("before.dense"), head.get_submodule("out")
    found = head(X, Step(segment=SEGMENT))
    expected = [out(torch.tanh(dense(pooled(X[row, tokens], how)))) for row, tokens in DOCUMENTS]
    for (row, tokens), logits in zip(DOCUMENTS, expected, strict=True):
        assert_close(found[row, tokens], logits.expand(len(tokens), 3), rtol=0, atol=1e-12)
    assert_close(of_documents(found, Step(segment=SEGMENT)), torch.stack(expected), rtol=0, atol=1e-12)


@pytest.mark.parametrize("how", HOW)
def test_without_segments_a_row_is_a_document(how: Pool) -> None:
    head = drawn(Pooled(how))
    whole = torch.ones(4, 8, dtype=torch.long)
    for step in (None, Step()):
        assert_close(head(X, step), head(X, Step(segment=whole)), rtol=0, atol=1e-12)
        assert_close(of_documents(head(X, step), step), torch.stack([pooled(row, how) for row in X]))


@pytest.mark.parametrize("how", HOW)
def test_what_padding_holds_reaches_no_document(how: Pool) -> None:
    head, step = drawn(Pooled(how, normalise=True)), Step(segment=SEGMENT)
    poisoned = X.masked_fill((SEGMENT == 0)[..., None], torch.nan).requires_grad_()
    found = of_documents(head(poisoned, step), step)
    assert torch.equal(found, of_documents(head(X, step), step))
    found.sum().backward()
    assert poisoned.grad is not None
    assert not poisoned.grad[SEGMENT == 0].any()


def test_the_last_token_is_the_last_valid_one() -> None:
    """A batch with short rows: the answer of each is that of the row alone."""
    head = drawn(Classifier(2, "last"))
    segment = torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1]])
    found = of_documents(head(X[:2], Step(segment=segment)), Step(segment=segment))
    assert_close(found, torch.cat([head(X[:1, :3])[:, 0], head(X[1:2, 1:])[:, 0]]), rtol=0, atol=1e-12)


def test_an_embedding_has_length_one() -> None:
    found = drawn(Pooled("mean", Transform("tanh"), normalise=True))(X, Step(segment=SEGMENT))
    assert_close(of_documents(found, Step(segment=SEGMENT)).norm(dim=-1), torch.ones(5, dtype=torch.float64))


def test_means_of_halves_are_taken_in_single_precision() -> None:
    x = torch.full((1, 4096, 2), 1.0, dtype=torch.bfloat16)
    for step in (Step(), Step(segment=torch.ones(1, 4096, dtype=torch.long))):
        assert torch.equal(Pooled("mean").build(2, Context())(x, step), x)


def test_tags_and_spans_read_each_token_alone() -> None:
    for head, classes in ((Classifier(5), 5), (Spans(), 2)):
        module = drawn(head)
        assert_close(module(X, Step(segment=SEGMENT)), module.get_submodule("out")(X))
        assert module(X).shape == (4, 8, classes)


@pytest.mark.parametrize("how", HOW)
def test_compiled_it_reads_no_values_of_the_segments(how: Pool) -> None:
    head, step = drawn(Classifier(3, how)), Step(segment=SEGMENT)
    fast = torch.compile(head, fullgraph=True, backend="eager")
    assert_close(of_documents(fast(X, step), step), of_documents(head(X, step), step), rtol=0, atol=1e-12)


def test_of_documents_without_any_is_empty() -> None:
    assert of_documents(X[2:3], Step(segment=SEGMENT[2:3])).shape == (0, 16)


@pytest.mark.parametrize(
    "head", [Classifier(3, "mean", dropout=0.5), Spans(dropout=0.5), Pooled("mean", Transform(dropout=0.5))], ids=str
)
def test_training_drops_and_a_document_drops_once(head: Part) -> None:
    module = drawn(head).train()
    first, second = module(X), module(X)
    assert not torch.equal(first, second)
    if not isinstance(head, Spans):
        assert torch.equal(first, first[:, :1].expand_as(first))
    module.eval()
    assert torch.equal(module(X), module(X))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Classifier(0), "classes must be above 0"),
        (lambda: Classifier(2, dropout=1.0), "dropout is a share"),
        (lambda: Transform(dropout=-0.1), "dropout is a share"),
        (lambda: Classifier.from_json({"spec": "Classifier", "classes": 2, "pool": "max"}), "pool"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Any, match: str) -> None:
    with pytest.raises(SpecError, match=match):
        make()


def test_a_head_that_pools_needs_rows() -> None:
    with pytest.raises(InputError, match=r"takes rows of tokens \[B, L, D\], got \[8, 16\]"):
        drawn(Classifier(2, "mean"))(X[0])


# --- whole models ---


def encoder(head: Part | None, tied: bool = False) -> Model:
    norm = LayerNorm()
    block = Block((pre_norm("attn", Attention(4, causal=False), norm), pre_norm("ffn", FeedForward(48), norm)))
    return Model(32, encoder=Trunk(Embed(61), repeat(block, 2), norm), head=head, tied=tied)


EXEMPT = {"incremental": "it sees both ways and writes no sequence"}


@pytest.mark.parametrize(
    "head",
    [
        Classifier(3, "first", Transform("tanh")),
        Classifier(3, "mean"),
        Classifier(3, "last"),
        Classifier(3),
        Spans(),
        Pooled("mean", normalise=True),
    ],
    ids=str,
)
@pytest.mark.parametrize("contract", [packing, padding, compiled, round_trip])
def test_contracts_hold_with_every_head(contract: Any, head: Part) -> None:
    contract(Case("an encoder", encoder(head), EXEMPT))


def test_a_document_is_learned_to_be_classified() -> None:
    learning(Case("an encoder", encoder(Classifier(3, "last")), EXEMPT))


def test_a_new_head_shares_the_trunk() -> None:
    model = encoder(Head(), tied=True).build(seed=3)
    tuned = model.eval().with_head(Classifier(3, "mean"), seed=4)
    assert isinstance(tuned, ModelOp)
    assert tuned.spec == encoder(Classifier(3, "mean"))
    assert tuned.encoder is model.encoder
    assert not tuned.training
    assert torch.equal(tuned(torch.arange(6)[None], output="hidden"), model(torch.arange(6)[None], output="hidden"))
    weight = tuned.get_parameter("head.out.weight")
    assert 0.01 < float(weight.detach().std()) < 0.03
    assert torch.equal(weight, model.with_head(Classifier(3, "mean"), seed=4).get_parameter("head.out.weight"))
    assert model.with_head(None)(torch.arange(6)[None]).shape == (1, 6, 32)


def test_the_loss_in_chunks_goes_through_the_transform() -> None:
    model = encoder(Head(bias=True, before=Transform("gelu", LayerNorm())), tied=True).build(dtype=torch.float64)
    ids = torch.arange(12).view(2, 6)
    hidden, labels = model(ids, output="hidden"), ids.flip(1)
    expected = F.cross_entropy(model(ids).flatten(0, 1), labels.flatten(), reduction="sum")
    assert_close(head_loss(model, hidden, labels, chunk=5).sum, expected)
