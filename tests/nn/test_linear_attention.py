"""Linear attention against the written formula, O(n²), document by document in fp64."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError, StateError
from sublayer.nn import linear_attention
from sublayer.nn.embed import Embed
from sublayer.nn.linear_attention import LinearAttention, LinearAttentionOp, RandomFeatures
from sublayer.nn.sublayer import Block, Model, ModelOp, Sublayer, Trunk
from sublayer.state import State
from sublayer.step import Step
from tests.nn.allocated import Allocated
from tests.nn.recurrence import V, check_documents, check_state, ids, same_with_gradients
from tests.oracle import close

D, N = 12, 3
FEATURES = ("elu", "relu", RandomFeatures(10, seed=3))


def model(**options: Any) -> ModelOp:
    """Tokens and one linear attention without a residual: what comes out is the attention."""
    mixer = Sublayer("mixer", LinearAttention(N, bias=True, **options), skip=0.0)
    built = Model(D, decoder=Trunk(Embed(V), (Block((mixer,)),)), head=None).build(dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return built


def written(built: ModelOp, ids: Tensor) -> Tensor:
    """[L, D]: eq. 4 (eq. 8 where causal) of the paper for one document, every weight spelled out."""
    op = next(module for module in built.modules() if isinstance(module, LinearAttentionOp))
    x = built.get_parameter("decoder.embed.tokens.weight")[ids]
    q, k, v = (F.linear(x, p.weight, p.bias).unflatten(1, (N, -1)).transpose(0, 1) for p in (op.q, op.k, op.v))
    weights = feature(op, q) @ feature(op, k).transpose(1, 2)
    if op.spec.causal:
        weights = weights * torch.ones(len(ids), len(ids), dtype=torch.float64).tril()
    y = (weights @ v) / (weights.sum(2, keepdim=True) + op.spec.eps)
    return F.linear(y.transpose(0, 1).flatten(1), op.out.weight, op.out.bias)


def feature(op: LinearAttentionOp, x: Tensor) -> Tensor:
    if op.spec.features == "elu":
        return torch.where(x > 0, x + 1, x.exp())
    if op.spec.features == "relu":
        return x.clamp(min=0)
    assert isinstance(op.spec.features, RandomFeatures)
    w = torch.tensor(linear_attention._directions(10, 4, 3), dtype=torch.float64).view(10, 4)
    x = x / 4**0.25
    return (x @ w.T - (x * x).sum(-1, keepdim=True) / 2).exp() / 10**0.5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("features", FEATURES, ids=str)
@pytest.mark.parametrize("length", [1, 64, 150])
def test_it_is_the_written_formula(length: int, features: Any, causal: bool) -> None:
    eps = 0.0 if isinstance(features, RandomFeatures) else 1e-6  # a query's own factor is cancelled, but not by eps
    built = model(features=features, causal=causal, eps=eps)
    found, wanted = built(ids(length)[None])[0], written(built, ids(length))
    if length > 1:  # one token's weight is 1 whatever its query is
        same_with_gradients(found, wanted, built)
    close(found, wanted)


@pytest.mark.parametrize("causal", [True, False])
def test_documents_of_a_row_are_attended_alone_over_the_edges_of_chunks(causal: bool, monkeypatch) -> None:
    monkeypatch.setattr(linear_attention, "CHUNK", 4)
    check_documents(model(causal=causal), written)


def test_a_state_carries_on_over_chunks_steps_and_documents(monkeypatch) -> None:
    monkeypatch.setattr(linear_attention, "CHUNK", 4)
    check_state(model(), written)


def test_random_features_come_near_softmax_attention() -> None:
    """The estimate is unbiased, and its error falls as one over the square root of how many features there are."""
    generator = torch.Generator().manual_seed(2)
    q, k = (torch.randn(40, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    exact = (q @ k.T / 8**0.5).exp()
    errors = []
    for size in (64, 1024, 16384):
        features = RandomFeatures(size)
        found = features.features(q, query=False) @ features.features(k, query=False).T
        errors.append(float((found / exact - 1).abs().mean()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.1


def test_random_directions_are_orthogonal_and_the_same_for_a_seed() -> None:
    w = torch.tensor(linear_attention._directions(8, 8, 0), dtype=torch.float64).view(8, 8)
    gram = w @ w.T
    assert_close(gram, torch.diag(gram.diagonal()), atol=1e-12, rtol=0)
    assert linear_attention._drawn.__wrapped__(8, 8, 0) == linear_attention._directions(8, 8, 0)
    assert linear_attention._directions(8, 8, 1) != linear_attention._directions(8, 8, 0)


@pytest.mark.parametrize("packed", [False, True])
def test_memory_grows_with_the_length_and_not_with_its_square(packed: bool) -> None:
    assert largest(model(), 2048, packed) == 2 * largest(model(), 1024, packed)


def largest(built: ModelOp, length: int, packed: bool) -> int:
    """Elements of the largest tensor that a forward pass makes."""
    segment = (torch.arange(length) // 100 + 1)[None]
    with Allocated() as made:
        built(ids(length)[None], Step(segment=segment) if packed else None)
    return made.largest


def test_sums_are_kept_in_fp32_in_a_model_of_half_precision() -> None:
    state = State.allocate(model().bfloat16(), 1, 4)
    assert {tensor.dtype for tensor in state.store.tensors.values()} == {torch.float32}


def test_what_sees_both_ways_cannot_be_continued() -> None:
    built = model(causal=False)
    with pytest.raises(StateError, match="sees both ways"):
        built(ids(3)[None], Step(), State.allocate(built, 1, 4))


@pytest.mark.parametrize(
    "options", [{"heads": 0}, {"heads": 5}, {"heads": 3, "eps": -1.0}, {"heads": 3, "head_size": 0}]
)
def test_sizes_that_do_not_fit_are_refused(options: dict) -> None:
    with pytest.raises(SpecError, match="heads|eps|head_size"):
        Model(D, decoder=Trunk(Embed(V), (Block((Sublayer("a", LinearAttention(**options)),)),))).build()


def test_under_autocast_sums_are_still_computed_in_fp32() -> None:
    built = model().float()
    seen: list[Any] = []

    def look(*args: Any) -> Any:
        seen.append((torch.is_autocast_enabled("cpu"), *{x.dtype for x in args[:3]}))
        return plain(*args)

    plain = linear_attention.causal
    with patch.object(linear_attention, "causal", look), torch.autocast("cpu", torch.bfloat16):
        built(ids(5)[None])
    assert seen == [(False, torch.float32)]
