"""gpt-oss (arXiv 2508.10925): a mixture of experts with attention sinks.

Each head has a learned logit that takes attention away from all keys; every other layer sees 128 tokens back, and
positions reach 131,072 by YaRN. Router, experts and attention have biases, and the experts' SwiGLU is clamped.

>>> gpt_oss(2880, 24, 64, 8, hidden=2880, experts=32, vocab=201088).parameters()
20914757184
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..names import Change, Row, Tensors, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_to_hf
from ..nn.rope_scaling import Yarn
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, mean, without_head, written
from .llama import NAMES as LLAMA

ROPE = Rope(theta=150000.0, scaling=Yarn(32.0, trained_length=4096, truncate=False))


class ClampedSwiGLU(FeedForward):
    """down((up + 1) · gate · sigmoid(α · gate)), with the gate at most the limit and up within it on both sides."""

    gated: bool = True
    bias: bool = True
    alpha: float = 1.702
    """α: with 1.702, gate · sigmoid(α · gate) is nearly GELU (arXiv 1606.08415)."""
    limit: float = 7.0
    """Where the inner values are cut off."""

    def check(self) -> None:
        super().check()
        self.require(self.gated, "its inner layer is gated")
        self.require(self.limit > 0, f"limit must be above 0, got {self.limit}")

    def inner(self, up: Tensor, gate: Tensor | None) -> Tensor:
        assert gate is not None
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(self.alpha * gate)


def gpt_oss(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    experts: int,
    vocab: int,
    active: int = 4,
    rope: Rope = ROPE,
    *,
    head_size: int = 64,
    window: int | None = 128,
    full: tuple[int, ...] | None = None,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: bool = True,
    eps: float = 1e-5,
    dropout: float = 0.0,
    balance_loss: float = 0.001,
    tied: bool = False,
) -> Model:
    """The architecture. full: layers, from 0, without a window; None: every second.

    The report publishes no initialisation: new models begin at 0.02, sinks at 0.
    """
    norm = RMSNorm(eps)
    full = tuple(range(1, layers, 2)) if full is None else full
    expert = ClampedSwiGLU(hidden, alpha=alpha, limit=limit)
    moe = MoE(experts, expert, Router(active, bias=True, balance_loss=balance_loss))

    def block(layer: int) -> Block:
        attention = Attention(
            heads, kv_heads, head_size, window=None if layer in full else window, position=rope, sinks=True,
            bias=bias, dropout=dropout,
        )  # fmt: skip
        return Block((pre_norm("attn", attention, norm), pre_norm("ffn", moe, norm)))

    trunk = Trunk(Embed(vocab), tuple(map(block, range(layers))), norm)
    return Model(dim, decoder=trunk, tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"dim": 2880, "layers": 24, "heads": 64, "kv_heads": 8, "hidden": 2880, "experts": 32,
                    "vocab": 201088},
    "gpt-oss-120b": {"dim": 2880, "layers": 36, "heads": 64, "kv_heads": 8, "hidden": 2880, "experts": 128,
                     "vocab": 201088},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 16, "experts": 6, "vocab": 97,
                        "active": 2, "head_size": 8, "window": 5,
                        "rope": Rope(theta=150000.0, scaling=Yarn(4.0, trained_length=8, truncate=False))}  # fmt: skip
EXEMPT: dict[str, str] = {}


def _apart(theirs: Tensors) -> Tensors:
    """Gate and up stand in turn in the last dimension."""
    return [theirs[0][..., ::2], theirs[0][..., 1::2]]


def _in_turn(ours: Tensors) -> Tensors:
    return [torch.stack(ours, -1).flatten(-2)]


IN_TURN = Change(_apart, _in_turn, whole_rows=False)
IN_TURN_BESIDE = Change(
    lambda theirs: [t.mT for t in _apart(theirs)], lambda ours: _in_turn([t.mT for t in ours]), whole_rows=False
)
BESIDE = Change(lambda ts: [t.mT for t in ts], lambda ts: [t.mT for t in ts], whole_rows=False)

NAMES: list[Row] = [
    *(row for row in LLAMA if ".ffn.op." not in row.our_names[0]),
    Row("model.layers.{}.self_attn.sinks", "decoder.blocks.{}.attn.op.sink_logits"),
    *rows([("model.layers.{}.mlp.router", "decoder.blocks.{}.ffn.op.router")]),
    Row("model.layers.{}.mlp.experts.gate_up_proj",
        ("decoder.blocks.{}.ffn.op.experts.gate", "decoder.blocks.{}.ffn.op.experts.up"), IN_TURN_BESIDE),
    Row("model.layers.{}.mlp.experts.gate_up_proj_bias",
        ("decoder.blocks.{}.ffn.op.experts.gate_bias", "decoder.blocks.{}.ffn.op.experts.up_bias"), IN_TURN),
    Row("model.layers.{}.mlp.experts.down_proj", "decoder.blocks.{}.ffn.op.experts.down", BESIDE),
    Row("model.layers.{}.mlp.experts.down_proj_bias", "decoder.blocks.{}.ffn.op.experts.down_bias"),
]  # fmt: skip
PREFIX = "model."
IGNORED: tuple[str, ...] = ()


def gpt_oss_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a GptOssForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    own, head_size = config.decoder(1e-5, 8, heads=64), config.count("head_dim", 64)
    local = config.local_layers([layer % 2 == 0 for layer in range(own["layers"])])
    config.fix("hidden_act", "silu")  # what the file says; it is the clamped one
    config.fix("experts_per_token", config.count("num_experts_per_tok", 4))  # the published files say it twice
    given = values.get("rope_parameters") is not None or values.get("rope_scaling") is not None
    rope = config.values | {"rope_theta": config("rope_theta", ROPE.theta)}
    model = gpt_oss(
        **own,
        hidden=config.count("intermediate_size"),
        experts=config.count("num_local_experts", 128),
        active=config.count("num_experts_per_tok", 4),
        rope=config.rope(head_size, rope) if given else ROPE.replace(theta=rope["rope_theta"]),
        head_size=head_size,
        window=config.count("sliding_window", None if "sliding_window" in values else 128),
        full=tuple(layer for layer, one in enumerate(local) if not one),
        alpha=config("swiglu_alpha", 1.702),
        limit=config("swiglu_limit", 7.0),
        bias=config("attention_bias", True),
        balance_loss=config.over(own["layers"], "router_aux_loss_coef", 0.001),
    )
    config.done("rope_scaling", "rope_parameters", "max_position_embeddings", "initial_context_length",
                "output_router_logits")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, moe = model.find("decoder.blocks.0.attn.op"), model.find("decoder.blocks.0.ffn.op")
    windows = [block.sublayers[0].op.window for block in model.find("decoder.blocks")]
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **written(model, attention),
        "head_dim": attention.head_size,
        "intermediate_size": moe.expert.hidden,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.router.active,
        "router_aux_loss_coef": mean(moe.router.balance_loss, len(windows)),
        "swiglu_alpha": moe.expert.alpha,
        "swiglu_limit": moe.expert.limit,
        "sliding_window": max(filter(None, windows), default=None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
        "attention_bias": attention.bias,
        "hidden_act": "silu",
        **rope_to_hf(attention.position, attention.head_size),
    }


HF = {"GptOssForCausalLM": gpt_oss_from_hf, "GptOssModel": without_head(gpt_oss_from_hf)}
