"""Grok-1 against its published equations, written naively in fp64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.errors import SpecError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import grok, to_hf
from sublayer.recipes.grok import TINY
from tests.case import roughen
from tests.oracle import close

IDS = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def turned(x: Tensor) -> Tensor:
    """[B, L, N, H] rotated: halves of a head are pairs."""
    length, size = x.shape[1], x.shape[3]
    angle = torch.arange(length).double()[:, None] * 10000.0 ** (-torch.arange(0, size, 2).double() / size)
    cos, sin = torch.cat([angle, angle], -1).cos()[:, None], torch.cat([angle, angle], -1).sin()[:, None]
    return x * cos + torch.cat([-x[..., size // 2 :], x[..., : size // 2]], -1) * sin


def published(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [B, L, V], token by token and expert by expert."""
    heads, kv_heads, dim = TINY["heads"], TINY["kv_heads"], TINY["dim"]
    size, length = dim // heads, ids.shape[1]
    x = weights["decoder.embed.tokens.weight"][ids] * math.sqrt(dim)
    for layer in range(TINY["layers"]):
        w = {key.removeprefix(f"decoder.blocks.{layer}."): value for key, value in weights.items()}
        h = norm(x, w["attn.pre.weight"])
        q, k, v = ((h @ w[f"attn.op.{name}.weight"].t()).unflatten(-1, (-1, size)) for name in "qkv")
        q, k = turned(q), turned(k)
        out = torch.zeros(*ids.shape, heads, size, dtype=torch.float64)
        for n in range(heads):
            group = n // (heads // kv_heads)
            scores = torch.einsum("blh,bmh->blm", q[:, :, n], k[:, :, group]) / math.sqrt(size)
            scores = 30 * torch.tanh(scores / 30)
            scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf)
            out[:, :, n] = scores.softmax(-1) @ v[:, :, group]
        x = x + norm(out.flatten(2) @ w["attn.op.out.weight"].t(), w["attn.post.weight"])
        h = norm(x, w["ffn.pre.weight"])
        shares = (h @ w["ffn.op.router.weight"].t()).softmax(-1)
        best, chosen = shares.topk(2, -1)
        mixed = []
        for row, experts, parts in zip(h.flatten(0, 1), chosen.flatten(0, 1), best.flatten(0, 1), strict=True):
            total = torch.zeros(dim, dtype=torch.float64)
            for e, share in zip(experts.tolist(), parts, strict=True):
                gate, up, down = (w[f"ffn.op.experts.{name}"][e] for name in ("gate", "up", "down"))
                total = total + share * (down @ (F.gelu(gate @ row, approximate="tanh") * (up @ row)))
            mixed.append(total)
        x = x + norm(torch.stack(mixed).view_as(h), w["ffn.post.weight"])
    x = norm(x, weights["decoder.norm.weight"])
    return x @ weights["decoder.embed.tokens.weight"].t() / math.sqrt(3)


def check_parity(ours: ModelOp, ids: Tensor) -> None:
    """Logits, and the gradient of every parameter."""
    weights = {name: parameter.detach().clone().requires_grad_() for name, parameter in ours.named_parameters()}
    found, expected = ours(ids), published(weights, ids)
    close(found, expected)
    for logits in (found, expected):
        F.cross_entropy(logits.flatten(0, 1), ids.flatten().roll(1)).backward()
    for name, parameter in ours.named_parameters():
        wanted = weights[name].grad
        assert parameter.grad is not None
        assert wanted is not None
        close(parameter.grad, wanted, f"gradient of {name}")


def test_logits_and_gradients_are_those_of_the_published_equations() -> None:
    ours = grok(**TINY).build(dtype=torch.float64).eval()
    roughen(ours)
    check_parity(ours, IDS)


def test_no_class_of_theirs_is_this_model() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(grok(**TINY))
