"""Latent attention: both forms against a plain loop, what it keeps, and what a pass over it finds.

B batch, L length, D width, N heads.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from sublayer.errors import SpecError
from sublayer.inspect.trace import attention
from sublayer.nn.embed import Embed
from sublayer.nn.latent import LatentAttention, LatentAttentionOp
from sublayer.nn.norm import RMSNorm
from sublayer.nn.projection import Projection
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import DynamicNtk, Yarn
from sublayer.nn.sublayer import Block, Model, ModelOp, Trunk, pre_norm
from sublayer.state import PerToken, State
from sublayer.step import Step
from sublayer.train.flops import flops_per_token

B, L, D, N = 2, 7, 12, 3
SIZES: dict[str, Any] = {"heads": N, "latent": 10, "content_size": 6, "rotary_size": 4, "value_size": 5}
OPTIONS: dict[str, dict[str, Any]] = {
    "queries of x": {},
    "queries of a latent": {"query_latent": 8},
    "biases": {"query_latent": 8, "bias": True},
    "interleaved, YaRN": {"position": Rope(100.0, pairing="interleaved", scaling=Yarn(4.0, 8)), "scale": 0.7},
    "dynamic": {"position": Rope(100.0, scaling=DynamicNtk(2.0, 4))},
    "a small latent": {"latent": 2},
}
IDS = torch.arange(B * L).view(B, L) % 17


def built(layers: int = 2, **options: Any) -> ModelOp:
    block = Block((pre_norm("attn", LatentAttention(**SIZES | options), RMSNorm()),))
    model = Model(D, decoder=Trunk(Embed(17), (block,) * layers), head=None).build(dtype=torch.float64).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.2, 0.6)
    return model


def ops(model: ModelOp) -> list[LatentAttentionOp]:
    return [op for op in model.modules() if isinstance(op, LatentAttentionOp)]


def formed(model: ModelOp, absorb: bool | None) -> ModelOp:
    for op in ops(model):
        op.absorb = absorb
    return model


def by_loop(op: LatentAttentionOp, x: Tensor) -> Tensor:
    """x [L, D] → [L, D], position after position and head after head (eqs. 9 to 19, arXiv 2405.04434)."""
    spec, parts = op.spec, list[Tensor]()
    own: Any = op
    q = op.q(x) if op.q is not None else own.q_up(own.q_down_norm(own.q_down(x)))
    latent, key = op.down_norm(op.down(x)), op.k_rotary(x)
    for i in range(len(x)):
        heads = []
        for n in range(N):
            query = q[i, n * 10 : (n + 1) * 10]
            k_up = op.k_up.weight[n * 6 : (n + 1) * 6]
            v_up = op.v_up.weight[n * 5 : (n + 1) * 5]
            scores = []
            for j in range(i + 1):
                turned = [_turned(spec.position, part, at) for part, at in ((query[6:], i), (key[j], j))]
                scores.append(op.scale * (query[:6] @ (k_up @ latent[j]) + turned[0] @ turned[1]))
            weights = torch.stack(scores).softmax(0)
            heads.append(sum(weights[j] * (v_up @ latent[j]) for j in range(i + 1)))
        parts.append(op.out(torch.cat(heads)))
    return torch.stack(parts)


def _turned(rope: Rope, x: Tensor, at: int) -> Tensor:
    lengths = torch.tensor([[L]]) if rope.dynamic else None
    cos, sin = rope.tables(torch.tensor([[at]]), 4, lengths=lengths, dtype=torch.float64)
    a, b = (x[0::2], x[1::2]) if rope.pairing == "interleaved" else (x[:2], x[2:])
    cos, sin = cos[0, 0], sin[0, 0]
    parts = (a * cos - b * sin, b * cos + a * sin)
    return torch.stack(parts, -1).flatten() if rope.pairing == "interleaved" else torch.cat(parts)


@pytest.mark.parametrize("absorb", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_papers_equations(name: str, absorb: bool) -> None:
    model = formed(built(**OPTIONS[name]), absorb)
    seen: list[Any] = []
    ops(model)[0].register_forward_hook(lambda op, inputs, y: seen.extend([inputs[0], y]))
    model(IDS)
    assert_close(
        seen[1][1], by_loop(ops(model)[0], seen[0][1]), rtol=0, atol=1e-12 * float(seen[1].detach().abs().max())
    )


@pytest.mark.parametrize("name", OPTIONS)
def test_both_forms_agree_in_values_and_gradients(name: str) -> None:
    model = built(**OPTIONS[name])
    step = Step(segment=torch.tensor([[1] * 4 + [2] * 3, [0] * 2 + [1] * 5]))
    results: list[list[Tensor]] = []
    for absorb in (False, True):
        y = formed(model, absorb)(IDS, step)
        model.zero_grad()
        y[step.segment != 0].square().sum().backward()
        results.append([y[step.segment != 0], *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for expanded, absorbed in zip(*results, strict=True):
        assert_close(absorbed, expanded, rtol=0, atol=1e-11 * float(expanded.detach().abs().max()))


@pytest.mark.parametrize("absorb", [False, True, None])
@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "dynamic"])
def test_decoding_continues_what_was_prefilled(name: str, absorb: bool | None) -> None:
    model = built(**OPTIONS[name])
    whole = formed(model, False)(IDS)
    state = State.allocate(model, B, L)
    formed(model, absorb)(IDS[:, :3], None, state)
    for at in range(3, L):
        y = model(IDS[:, at : at + 1], None, state)
        assert_close(y, whole[:, at : at + 1], rtol=0, atol=1e-11 * float(whole.detach().abs().max()))


@pytest.mark.parametrize("absorb", [False, True])
def test_kept_keys_turn_anew_as_the_document_grows(absorb: bool) -> None:
    """In one layer: the vectors of a second would hold what shorter documents gave."""
    model = built(layers=1, **OPTIONS["dynamic"])
    whole = formed(model, False)(IDS)[:, -1:]
    state = State.allocate(model, B, L)
    formed(model, absorb)(IDS[:, :3], None, state)
    model(IDS[:, 3:6], None, state)
    assert_close(model(IDS[:, 6:], None, state), whole, rtol=0, atol=1e-11 * float(whole.detach().abs().max()))


def test_it_keeps_the_latent_and_the_rotary_key_alone() -> None:
    model = built()
    assert ops(model)[0].state() == {"latent": PerToken((14,))}
    assert State.allocate(model, 1, 8).bytes_per("token") == 2 * 14 * 8  # two layers, fp64


def test_the_form_that_multiplies_less_is_taken() -> None:
    """DeepSeek-V3's sizes: queries of a call against keys."""
    spec = LatentAttention(128, 512, 128, 64, 128)
    block = Block((pre_norm("attn", spec, RMSNorm()),))
    op = ops(Model(8, decoder=Trunk(Embed(3), (block,))).build(device="meta"))[0]
    assert [op._absorbs(queries, 4096) for queries in (1, 64, 512, 4096)] == [True, True, False, False]
    op.add_module("k_up", torch.nn.Sequential(op.k_up))  # an adapter, say, of whose matrix nothing is known
    assert not op._absorbs(1, 4096)


def test_what_stands_in_place_of_a_map_is_called() -> None:
    class Doubled(Projection):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = built()
    before = model(IDS)
    state = State.allocate(model, B, L)
    for op in ops(model):
        other = Doubled(10, N * 5, bias=False, dtype=torch.float64)
        other.weight = torch.nn.Parameter(op.v_up.weight.detach() / 2)
        op.v_up = other
    found = torch.cat([model(IDS[:, at : at + 1], None, state) for at in range(L)], 1)
    assert_close(found, before, rtol=0, atol=1e-11 * float(before.detach().abs().max()))


@pytest.mark.parametrize("absorb", [False, True])
def test_its_weights_are_shown(absorb: bool) -> None:
    found = attention(formed(built(), absorb), IDS[0].tolist())
    assert list(found) == ["decoder.blocks.0.attn", "decoder.blocks.1.attn"]
    for weights in found.values():
        assert weights.shape == (N, L, L)
        assert_close(weights.sum(-1), torch.ones(N, L, dtype=torch.float64))


def test_its_flops_are_counted() -> None:
    per_layer = sum(op.numel() for op in ops(built())[0].parameters() if op.dim() == 2)
    assert flops_per_token(built(), 100) == 2 * (6 * per_layer + 6 * N * (10 + 5) * 100)


@pytest.mark.parametrize("absorb", [False, True])
def test_autocast_is_respected(absorb: bool) -> None:
    model = formed(built(query_latent=8).float(), absorb)
    expected = model(IDS)
    with torch.autocast("cpu", torch.bfloat16):
        found = model(IDS)
    assert_close(found.float(), expected, rtol=0, atol=0.05 * float(expected.detach().abs().max()))
    assert float((found.float() - expected).detach().abs().max()) > 0


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"heads": 0}, "heads must be above 0"),
        ({"query_latent": 0}, "query_latent must be above 0"),
        ({"rotary_size": 3}, "odd"),
        ({"position": Rope(size=2)}, "all of rotary_size turn"),
        ({"dropout": 1.0}, "dropout is a share"),
    ],
    ids=str,
)
def test_sizes_that_mean_nothing_are_refused(values: dict, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        built(**values)
