"""t5_like against T5's formulas, head by head, in fp64; and its cross keys and values computed once."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from sublayer.state import State
from sublayer.step import Step
from tests.cases import CASES
from tests.contracts import assert_near, rough
from tests.models.t5_like import TINY

CASE = CASES["t5_like"]
HEADS, SIZE = TINY["heads"], TINY["dim"] // TINY["heads"]
Weights = Mapping[str, Tensor]


def naive(w: Weights, ids: Tensor, source: Tensor) -> Tensor:
    """[L, V] for one document: ids [L], source [M]."""
    table = w["decoder.embed.tokens.weight"]
    memory = w["encoder.embed.tokens.weight"][source]
    for i in range(TINY["layers"]):
        memory = memory + attention(w, f"encoder.blocks.{i}.attn", memory, None, bias(w, "encoder", source, source))
        memory = memory + feed_forward(w, f"encoder.blocks.{i}.ffn", memory)
    memory = norm(memory, w["encoder.norm.weight"])
    x = table[ids]
    future = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)
    for i in range(TINY["layers"]):
        at = f"decoder.blocks.{i}"
        causal = bias(w, "decoder", ids, ids).masked_fill(future, -torch.inf)
        x = x + attention(w, f"{at}.attn", x, None, causal)
        x = x + attention(w, f"{at}.cross", x, memory, torch.zeros(HEADS, 1, 1, dtype=x.dtype))
        x = x + feed_forward(w, f"{at}.ffn", x)
    return norm(x, w["decoder.norm.weight"]) / math.sqrt(TINY["dim"]) @ table.T


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def attention(w: Weights, at: str, x: Tensor, memory: Tensor | None, scores: Tensor) -> Tensor:
    """scores: what is added to them, [N, L, M] or what broadcasts to it; nothing divides them."""
    x = norm(x, w[f"{at}.pre.weight"])
    memory = x if memory is None else memory
    q, k, v = x @ w[f"{at}.op.q.weight"].T, memory @ w[f"{at}.op.k.weight"].T, memory @ w[f"{at}.op.v.weight"].T
    heads = []
    for n in range(HEADS):
        head = slice(n * SIZE, (n + 1) * SIZE)
        heads.append((q[:, head] @ k[:, head].T + scores[n]).softmax(-1) @ v[:, head])
    return torch.cat(heads, -1) @ w[f"{at}.op.out.weight"].T


def feed_forward(w: Weights, at: str, x: Tensor) -> Tensor:
    x = norm(x, w[f"{at}.pre.weight"])
    return (x @ w[f"{at}.op.up.weight"].T).relu() @ w[f"{at}.op.down.weight"].T


def bias(w: Weights, trunk: str, queries: Tensor, keys: Tensor) -> Tensor:
    rows = [[bucket(m - n, trunk == "encoder") for m in range(len(keys))] for n in range(len(queries))]
    return w[f"{trunk}.bias.weight"][torch.tensor(rows)].permute(2, 0, 1)


def bucket(relative: int, both_ways: bool) -> int:
    """Key minus query; half of a direction's buckets for single distances, the other half by logarithm."""
    buckets, first = TINY["buckets"], 0
    if both_ways:
        buckets //= 2
        first = buckets if relative > 0 else 0
        away = abs(relative)
    else:
        away = max(-relative, 0)
    own = buckets // 2
    if away < own:
        return first + away
    share = math.log(away / own) / math.log(TINY["distance"] / own)
    return first + min(own + int(share * (buckets - own)), buckets - 1)


@torch.no_grad()
def test_logits_equal_the_formulas() -> None:
    model = rough(CASE)
    weights = dict(model.named_parameters())
    for document in CASE.documents(CASE, [11, 16], 1):
        assert document.source is not None
        logits = model(document.inputs[None], source=document.source[None])[0]
        assert_near(logits, naive(weights, document.inputs, document.source), 1e-10)


@torch.no_grad()
def test_sources_may_lie_in_another_order_than_their_targets() -> None:
    model = rough(CASE)
    a, b = CASE.documents(CASE, [4, 6], 2)
    assert a.source is not None
    assert b.source is not None
    step = Step(segment=torch.tensor([[7] * 4 + [2] * 6]), memory_segment=torch.tensor([[2] * 7 + [0] + [7] * 3]))
    sources = torch.cat([b.source, torch.tensor([1]), a.source])
    logits = model(torch.cat([a.inputs, b.inputs])[None], step, source=sources[None])[0]
    weights = dict(model.named_parameters())
    expected = torch.cat([naive(weights, a.inputs, a.source), naive(weights, b.inputs, b.source)])
    assert_near(logits, expected, 1e-10)


@torch.no_grad()
def test_cross_keys_and_values_are_computed_once() -> None:
    model = rough(CASE)
    (document,) = CASE.documents(CASE, [8], 3)
    assert document.source is not None
    calls = {"k": 0, "v": 0, "encoder": 0}

    def count(what: str) -> None:
        calls[what] += 1

    cross = model.get_submodule("decoder.blocks.0.cross.op")
    cross.k.register_forward_hook(lambda *_: count("k"))  # pyright: ignore
    cross.v.register_forward_hook(lambda *_: count("v"))  # pyright: ignore
    model.get_submodule("encoder").register_forward_hook(lambda *_: count("encoder"))
    state = State.allocate(model, 1, 8, 5)
    model(document.inputs[None, :3], Step(), state, source=document.source[None])
    for i in range(3, 8):
        model(document.inputs[None, i : i + 1], Step(), state)
    assert calls == {"k": 1, "v": 1, "encoder": 1}
