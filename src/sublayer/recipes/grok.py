"""Grok-1 (released by xAI in 2024): a mixture of eight experts, two a token, with a norm on both sides of every layer.

A token's experts are weighted by their shares of all eight, not of the two. Scores are capped at 30 by tanh, experts
are GeGLU, the embedding is multiplied by sqrt(D), and the logits, by the same table, by 3^−1/2.

>>> grok(6144, 64, 48, 8, hidden=32768, experts=8, vocab=131072).parameters()
315684820992
"""

from __future__ import annotations

from typing import Any

from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import FeedForward
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Rope
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "grok", "to_hf"]

ROPE = Rope(theta=10000.0)


def grok(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    experts: int,
    vocab: int,
    active: int = 2,
    rope: Rope = ROPE,
    *,
    head_size: int | None = None,
    softcap: float = 30.0,
    embedding_scale: float | None = None,
    logit_scale: float = 3**-0.5,
    eps: float = 1e-5,
) -> Model:
    """The architecture; embedding_scale None is sqrt(dim). Its initialisation is not published: 0.02, as GPT-2's."""
    norm = RMSNorm(eps)
    attention = Attention(heads, kv_heads, head_size, position=rope, softcap=softcap)
    moe = MoE(experts, FeedForward(hidden, "gelu_tanh", gated=True), Router(active, renormalise=False))
    block = Block((Sublayer("attn", attention, pre=norm, post=norm), Sublayer("ffn", moe, pre=norm, post=norm)))
    embed = Embed(vocab, scale=dim**0.5 if embedding_scale is None else embedding_scale)
    trunk = Trunk(embed, repeat(block, layers), norm)
    return Model(dim, decoder=trunk, head=Head(scale=logit_scale), tied=True, init=Init(0.02, residual="depth"))


SIZES: dict[str, dict[str, Any]] = {
    "grok-1": {"dim": 6144, "layers": 64, "heads": 48, "kv_heads": 8, "hidden": 32768, "experts": 8, "vocab": 131072}
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "experts": 4, "vocab": 97}
EXEMPT: dict[str, str] = {}
