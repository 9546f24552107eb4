"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with 128 small experts in each block, of which a token takes eight.

Qwen3's attention (normalised queries and keys, heads of 128) and Mixtral's block; many fine experts in place of few
large ones, weighted by their shares among the chosen. Some layers may stay dense.

>>> small = qwen3_moe(2048, 48, 32, 4, hidden=768, experts=128, vocab=151936)
>>> small.parameters(), small.active_parameters()
(30532122624, 3353032704)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import STACKED, Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, mean, without_head, written
from .llama import ACTIVATIONS
from .llama import NAMES as LLAMA

ROPE = Rope(theta=1000000.0)


def qwen3_moe(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    experts: int,
    vocab: int,
    active: int = 8,
    rope: Rope = ROPE,
    *,
    head_size: int = 128,
    dense: tuple[int, ...] = (),
    dense_hidden: int | None = None,
    renormalise: bool = True,
    window: int | None = None,
    bias: bool = False,
    activation: Activation = "silu",
    eps: float = 1e-6,
    dropout: float = 0.0,
    balance_loss: float = 0.001,
    tied: bool = False,
) -> Model:
    """The architecture. dense: layers, from 0, with one feed-forward layer of dense_hidden and no experts.

    The report publishes no initialisation: new models begin as Llama's do here.
    """
    norm = RMSNorm(eps)
    attention = Attention(
        heads, kv_heads, head_size, window=window, position=rope, qk_norm=norm, bias=bias, dropout=dropout
    )
    router = Router(active, renormalise=renormalise, balance_loss=balance_loss)
    moe = MoE(experts, FeedForward(hidden, activation, gated=True), router)

    def block(layer: int) -> Block:
        if layer in dense and dense_hidden is None:
            raise SpecError(f"qwen3_moe: layer {layer} is dense; give dense_hidden")
        ffn = FeedForward(dense_hidden or hidden, activation, gated=True) if layer in dense else moe
        return Block((pre_norm("attn", attention, norm), pre_norm("ffn", ffn, norm)))

    trunk = Trunk(Embed(vocab), tuple(map(block, range(layers))), norm)
    return Model(dim, decoder=trunk, tied=tied, init=Init(0.02, residual="depth"))


SIZES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {"dim": 2048, "layers": 48, "heads": 32, "kv_heads": 4, "hidden": 768, "experts": 128,
                      "vocab": 151936},
    "qwen3-235b-a22b": {"dim": 4096, "layers": 94, "heads": 64, "kv_heads": 4, "hidden": 1536, "experts": 128,
                        "vocab": 151936},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 16, "experts": 6, "vocab": 97,
                        "active": 3, "head_size": 8, "dense": (1,), "dense_hidden": 48}  # fmt: skip
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [
    *LLAMA,
    *rows([("model.layers.{}.mlp.gate", "decoder.blocks.{}.ffn.op.router")]),
    *(
        Row(f"model.layers.{{}}.mlp.experts.*.{m}_proj.weight", f"decoder.blocks.{{}}.ffn.op.experts.{m}", STACKED)
        for m in ("gate", "up", "down")
    ),
]
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)  # computed from the config


def qwen3_moe_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen3MoeForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    own = config.decoder(1e-6, 4, heads=32)
    layers, head_size = own["layers"], config.count("head_dim", own["dim"] // own["heads"])
    windowed = config("use_sliding_window", False)
    window = config.count("sliding_window", None if "sliding_window" in values else 4096)
    every, alone = config.count("decoder_sparse_step", 1), config.layers_of("mlp_only_layers")
    dense = tuple(layer for layer in range(layers) if layer in alone or (layer + 1) % every)
    dense_hidden = config.count("intermediate_size", 6144)
    for key, only in (("qkv_bias", False), ("use_qk_norm", True), ("shared_expert_intermediate_size", 0)):
        config.fix(key, only)  # Qwen3-Coder's, read by no class
    if windowed:
        config.fix("max_window_layers")  # theirs gives every layer the window
    model = qwen3_moe(
        **own,
        hidden=config.count("moe_intermediate_size", 768),
        experts=config.count("num_local_experts" if "num_local_experts" in values else "num_experts", 128),
        active=config.count("num_experts_per_tok", 8),
        rope=config.rope(head_size),
        head_size=head_size,
        dense=dense,
        dense_hidden=dense_hidden if dense else None,
        renormalise=config("norm_topk_prob", False),
        window=window if windowed else None,
        bias=config("attention_bias", False),
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
        balance_loss=config.over(layers - len(dense), "router_aux_loss_coef", 0.001),
    )
    config.done("output_router_logits", "max_window_layers")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffns = model.find("decoder.blocks.0.attn.op"), [b.sublayers[1].op for b in model.find("decoder.blocks")]
    dense = [layer for layer, ffn in enumerate(ffns) if isinstance(ffn, FeedForward)]
    moe: Any = next((ffn for ffn in ffns if isinstance(ffn, MoE)), None)
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **written(model, attention),
        "head_dim": attention.head_size,
        "intermediate_size": ffns[dense[0]].hidden if dense else moe.expert.hidden,
        "moe_intermediate_size": moe.expert.hidden,
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.router.active,
        "norm_topk_prob": moe.router.renormalise,
        "router_aux_loss_coef": mean(moe.router.balance_loss, len(ffns) - len(dense)),
        "mlp_only_layers": dense,
        "decoder_sparse_step": 1,
        "use_sliding_window": attention.window is not None,
        "sliding_window": attention.window,
        "attention_bias": attention.bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[moe.expert.activation],
        **rope_to_hf(attention.position, attention.head_size),
    }


HF = {"Qwen3MoeForCausalLM": qwen3_moe_from_hf, "Qwen3MoeModel": without_head(qwen3_moe_from_hf)}
