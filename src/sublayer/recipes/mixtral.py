"""Mixtral (arXiv 2401.04088): Mistral with eight feed-forward layers in each block, of which a token takes two.

A router's two best experts, weighted by the softmax of their logits alone, stand where Llama has one SwiGLU; all else
is Llama's. So a token goes through a quarter of the expert weights: 12.9B parameters of 46.7B.

>>> mixtral8x7b = mixtral(4096, 32, 32, 8, hidden=14336, experts=8, vocab=32000)
>>> mixtral8x7b.parameters(), mixtral8x7b.active_parameters()
(46702792704, 12879925248)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import STACKED, Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, mean, without_head, written
from .llama import ACTIVATIONS
from .llama import NAMES as LLAMA

ROPE = Rope(theta=1000000.0)


def mixtral(
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
    window: int | None = None,
    activation: Activation = "silu",
    eps: float = 1e-5,
    dropout: float = 0.0,
    balance_loss: float = 0.001,
    tied: bool = False,
) -> Model:
    """The architecture. balance_loss: of each layer; the published files' 0.02 is of their mean.

    The paper publishes no initialisation: new models begin as Llama's do here.
    """
    norm = RMSNorm(eps)
    attention = Attention(heads, kv_heads, head_size, window=window, position=rope, dropout=dropout)
    moe = MoE(experts, FeedForward(hidden, activation, gated=True), Router(active, balance_loss=balance_loss))
    block = Block((pre_norm("attn", attention, norm), pre_norm("ffn", moe, norm)))
    return Model(
        dim, decoder=Trunk(Embed(vocab), repeat(block, layers), norm), tied=tied, init=Init(0.02, residual="depth")
    )


SIZES: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "experts": 8,
                     "vocab": 32000},
    "mixtral-8x22b": {"dim": 6144, "layers": 56, "heads": 48, "kv_heads": 8, "hidden": 16384, "experts": 8,
                      "vocab": 32000},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 24, "experts": 4, "vocab": 97}
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [
    *(row for row in LLAMA if ".ffn.op." not in row.our_names[0]),
    *rows([("model.layers.{}.block_sparse_moe.gate", "decoder.blocks.{}.ffn.op.router")]),
    Row("model.layers.{}.block_sparse_moe.experts.*.w1.weight", "decoder.blocks.{}.ffn.op.experts.gate", STACKED),
    Row("model.layers.{}.block_sparse_moe.experts.*.w3.weight", "decoder.blocks.{}.ffn.op.experts.up", STACKED),
    Row("model.layers.{}.block_sparse_moe.experts.*.w2.weight", "decoder.blocks.{}.ffn.op.experts.down", STACKED),
]
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)  # computed from the config


def mixtral_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a MixtralForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    own = config.decoder(1e-5, 8, heads=32)
    head_size = config.count("head_dim", own["dim"] // own["heads"])
    config.fix("router_jitter_noise", 0.0)  # theirs shakes what the experts read too, and no published file asks
    model = mixtral(
        **own,
        hidden=config.count("intermediate_size"),
        experts=config.count("num_local_experts", 8),
        active=config.count("num_experts_per_tok", 2),
        rope=config.rope(head_size, config.values | {"rope_theta": config("rope_theta", ROPE.theta)}),
        head_size=None if head_size * own["heads"] == own["dim"] else head_size,
        window=config.count("sliding_window", None),
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
        balance_loss=config.over(own["layers"], "router_aux_loss_coef", 0.001),
    )
    config.done("output_router_logits")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, moe = model.find("decoder.blocks.0.attn.op"), model.find("decoder.blocks.0.ffn.op")
    head_size, layers = attention.head_size or model.dim // attention.heads, len(model.find("decoder.blocks"))
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        **written(model, attention),
        "head_dim": head_size,
        "intermediate_size": moe.expert.hidden,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.router.active,
        "router_aux_loss_coef": mean(moe.router.balance_loss, layers),
        "sliding_window": attention.window,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[moe.expert.activation],
        **rope_to_hf(attention.position, head_size),
    }


HF = {"MixtralForCausalLM": mixtral_from_hf, "MixtralModel": without_head(mixtral_from_hf)}
