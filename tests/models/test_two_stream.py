"""two_stream against its formulas written index by index, in fp64; and what a stream goes through untouched."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.nn.sublayer import Block, Trunk, pre_norm
from tests.cases import CASES
from tests.contracts import assert_near, rough, roughen
from tests.models.two_stream import TINY, OfStreams

CASE, HEADS, SIZE = CASES["two_stream"], TINY["heads"], TINY["dim"] // TINY["heads"]
Weights = Mapping[str, Tensor]


def naive(w: Weights, ids: Tensor) -> Tensor:
    """[L, L, classes] for one alignment: ids [S, L]."""
    rows = w["encoder.embed.rows.weight"][ids]
    left, right = w["encoder.embed.left.weight"][ids[0]], w["encoder.embed.right.weight"][ids[0]]
    pair = torch.stack([torch.stack([a + b for b in right]) for a in left])
    for i in range(TINY["layers"]):
        at = f"encoder.blocks.{i}"
        rows = rows + attention(w, f"{at}.attn.op", *norms(w, f"{at}.attn.pre", rows, pair))
        normed, normed_pair = norms(w, f"{at}.mix.pre", rows, pair)
        a, b = linear(w, f"{at}.mix.op.left", normed), linear(w, f"{at}.mix.op.right", normed)
        length, back = ids.shape[1], linear(w, f"{at}.mix.op.back", normed_pair.mean(1))
        products = [
            [torch.stack([torch.outer(x[m], y[n]) for x, y in zip(a, b, strict=True)]).mean(0) for n in range(length)]
            for m in range(length)
        ]
        outer = torch.stack([torch.stack([product.flatten() for product in row]) for row in products])
        rows, pair = rows + back, pair + linear(w, f"{at}.mix.op.outer", outer)
    return linear(w, "head", norms(w, "encoder.norm", rows, pair)[1])


def norms(w: Weights, at: str, rows: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
    def norm(x: Tensor, name: str) -> Tensor:
        return w[f"{at}.{name}.weight"] * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()

    return norm(rows, "rows"), norm(pair, "pair")


def attention(w: Weights, at: str, rows: Tensor, pair: Tensor) -> Tensor:
    bias = pair @ w[f"{at}.bias.weight"].T  # [L, L, N]
    results = []
    for row in rows:
        q, k, v = linear(w, f"{at}.qkv", row).chunk(3, -1)
        heads = []
        for n in range(HEADS):
            head = slice(n * SIZE, (n + 1) * SIZE)
            heads.append((q[:, head] @ k[:, head].T / SIZE**0.5 + bias[..., n]).softmax(-1) @ v[:, head])
        results.append(linear(w, f"{at}.out", torch.cat(heads, -1)))
    return torch.stack(results)


def linear(w: Weights, at: str, x: Tensor) -> Tensor:
    return F.linear(x, w[f"{at}.weight"], w[f"{at}.bias"])


@torch.no_grad()
def test_logits_equal_the_formulas() -> None:
    model = rough(CASE)
    weights = dict(model.named_parameters())
    a, b = CASE.documents(CASE, [6, 6], 1)
    logits = model({"rows": torch.stack([a.inputs["rows"], b.inputs["rows"]])})
    for row, document in zip(logits, (a, b), strict=True):
        assert_near(row, naive(weights, document.inputs["rows"]), 1e-10)


@torch.no_grad()
def test_a_leaf_that_an_op_does_not_return_passes_unchanged() -> None:
    pair = TINY["pair"]
    block = Block((pre_norm("attn", OfStreams("RowAttention", pair, HEADS), OfStreams("Norms", pair)),))
    spec = CASE.spec.replace(encoder=Trunk(OfStreams("Lift", pair, TINY["vocab"]), (block,)), head=None)
    model = spec.build(dtype=torch.float64)
    roughen(model)
    (document,) = CASE.documents(CASE, [6], 2)
    inputs = {"rows": document.inputs["rows"][None]}
    before, _ = model.get_submodule("encoder.embed")(inputs, None)
    after = model(inputs)
    assert torch.equal(after["pair"], before["pair"])
    assert not torch.allclose(after["rows"], before["rows"])
