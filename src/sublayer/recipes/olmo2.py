"""OLMo 2 (arXiv 2501.00656).

A decoder whose norms stand after attention and after the feed-forward, inside the residual branch, and not before;
queries and keys are normed over all heads together. Otherwise as Llama: RMSNorm, rotary positions, SwiGLU, no biases.

>>> olmo2(2048, 16, 16, 16, 8192).parameters()
1484916736
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_to_hf
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from .config import Config, without_head, written
from .llama import NAMES as LLAMA

ROPE = Rope(theta=500000.0)


def olmo2(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int = 100352,
    rope: Rope = ROPE,
    *,
    bias: bool = False,
    activation: Activation = "silu",
    eps: float = 1e-6,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; bias and dropout are attention's. New models begin as the paper says, 0.02 everywhere."""
    norm = RMSNorm(eps)
    attention = Attention(heads, kv_heads, position=rope, qk_norm=norm, qk_norm_joint=True, bias=bias, dropout=dropout)
    ffn = FeedForward(hidden, activation, gated=True)
    block = Block((Sublayer("attn", attention, post=norm), Sublayer("ffn", ffn, post=norm)))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), norm), tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "olmo2-1b": {"dim": 2048, "layers": 16, "heads": 16, "kv_heads": 16, "hidden": 8192},
    "olmo2-7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": 11008},
    "olmo2-13b": {"dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "hidden": 13824},
    "olmo2-32b": {"dim": 5120, "layers": 64, "heads": 40, "kv_heads": 8, "hidden": 27648},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 97}
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [
    *(row for row in LLAMA if ".pre." not in row.our_names[0]),
    *rows(
        [
            ("model.layers.{}.post_attention_layernorm", "decoder.blocks.{}.attn.post"),
            ("model.layers.{}.post_feedforward_layernorm", "decoder.blocks.{}.ffn.post"),
        ]
    ),
]
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)  # computed from the config


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of an Olmo2ForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    own = config.decoder(1e-5)
    config.fix("clip_qkv")  # OLMo 1's
    model = olmo2(
        **own,
        hidden=config.count("intermediate_size"),
        rope=config.rope(own["dim"] // own["heads"]),
        bias=config("attention_bias", False),
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
    )
    config.done()
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = (model.find(f"decoder.blocks.0.{name}.op") for name in ("attn", "ffn"))
    return {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        **written(model, attention),
        "intermediate_size": ffn.hidden,
        "attention_bias": attention.bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        **rope_to_hf(attention.position, model.dim // attention.heads),
    }


ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "relu": "relu"}
HF = {"Olmo2ForCausalLM": from_hf, "Olmo2Model": without_head(from_hf)}
