"""The linear transformer against its equations, written naively in fp64: transformers has no class for it."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.linear_attention import RandomFeatures
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import linear_transformer, to_hf
from sublayer.recipes.linear_transformer import TINY
from sublayer.step import Step
from tests.oracle import PACKED, PADDED, close

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))


def drawn(**changes: Any) -> ModelOp:
    model = linear_transformer(**TINY | changes).build(dtype=torch.float64)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            around = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.copy_(around + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def written(p: Mapping[str, Tensor], ids: Tensor, layers: int, heads: int, activation: Any) -> Tensor:
    """[L, V]: the paper's equations for one document, every attention weight spelled out."""

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(1, keepdim=True)
        return (
            centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt() * p[f"{name}.weight"] + p[f"{name}.bias"]
        )

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]

    def phi(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, x.exp())

    x = p["decoder.embed.tokens.weight"][ids]
    dim = x.shape[1]
    for place in range(len(ids)):
        for i in range(0, dim, 2):
            angle = torch.tensor(place / 10000 ** (i / dim), dtype=torch.float64)
            x = x.clone()
            x[place, i : i + 2] += torch.stack([angle.sin(), angle.cos()])
    for layer in range(layers):
        at = f"decoder.blocks.{layer}"
        q, k, v = (linear(x, f"{at}.attn.op.{name}").view(len(ids), heads, -1) for name in "qkv")
        mixed = torch.zeros_like(v)
        for i in range(len(ids)):
            weights = torch.stack([(phi(q[i]) * phi(k[j])).sum(-1) for j in range(i + 1)])  # [i + 1, N]
            mixed[i] = (weights[..., None] * v[: i + 1]).sum(0) / (weights.sum(0)[:, None] + 1e-6)
        x = norm(x + linear(mixed.flatten(1), f"{at}.attn.op.out"), f"{at}.attn.after")
        inner = activation(linear(x, f"{at}.ffn.op.up"))
        x = norm(x + linear(inner, f"{at}.ffn.op.down"), f"{at}.ffn.after")
    table = p["head.weight"] if "head.weight" in p else p["decoder.embed.tokens.weight"]
    return norm(x, "decoder.norm") @ table.T


def check_parity(model: ModelOp, ids: Tensor, segment: Tensor, activation: Any = F.gelu) -> None:
    """Logits and the gradient of every parameter, document by document."""
    parameters = dict(model.named_parameters())
    found = model(ids, Step(segment=segment))
    parts = [(row, segment[row] == number) for row in range(len(ids)) for number in segment[row].unique() if number]
    documents = [(found[row, where], written(parameters, ids[row, where], 2, 4, activation)) for row, where in parts]
    ours, expected = (torch.cat(side) for side in zip(*documents, strict=True))
    close(ours, expected, "logits")
    gradients = [torch.autograd.grad(side.square().mean(), list(parameters.values())) for side in (ours, expected)]
    for name, one, other in zip(parameters, *gradients, strict=True):
        close(one, other, f"gradient of {name}")


@pytest.mark.parametrize("changes", [{}, {"tied": True, "activation": "relu", "hidden": 40}], ids=str)
def test_logits_and_gradients_are_those_of_the_equations(changes: dict[str, Any]) -> None:
    check_parity(drawn(**changes), IDS, torch.ones_like(IDS), F.relu if "activation" in changes else F.gelu)


@pytest.mark.parametrize("segment", [PADDED, PACKED], ids=["padded", "packed"])
def test_padded_and_packed_rows_are_their_documents(segment: Tensor) -> None:
    check_parity(drawn(), IDS, segment)


def test_performer_is_a_choice_of_features() -> None:
    exact, other = (drawn(features=features)(IDS) for features in ("elu", RandomFeatures(16)))
    assert (exact - other).abs().max() > 1e-3


def test_no_class_of_theirs_has_it() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(linear_transformer(**TINY))
