"""Phi-3 and Phi-4 (arXiv 2404.14219, 2412.08905, 2503.01743).

A decoder as Llama's, with dropout after each branch. Its checkpoints hold queries, keys and values as one matrix, and
gate and up as another; long-context ones divide the rotary frequencies by searched numbers, other ones beyond the
trained length (LongRoPE, arXiv 2402.13753: Rope(scaling=LongRope(…)), whose numbers stand in config.json).

>>> phi3(3072, 32, 32, 32, 8192).parameters()
3821079552
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Change, Row, cut, rows, stacked
from ..nn.attention import Attention, AttentionOp
from ..nn.embed import Embed
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.rope import LongRope, Rope, rope_from_hf, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, without_head, written

ROPE = Rope(theta=10000.0)


def phi3(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int = 32064,
    rope: Rope = ROPE,
    *,
    window: int | None = None,
    eps: float = 1e-5,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture. The papers publish no initialisation: new models begin as transformers' do, 0.02 everywhere."""
    norm = RMSNorm(eps)
    attention = Attention(heads, kv_heads, window=window, position=rope, dropout=attention_dropout)
    ffn = FeedForward(hidden, "silu", gated=True)
    block = Block((pre_norm("attn", attention, norm, dropout), pre_norm("ffn", ffn, norm, dropout)))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), norm), tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "phi3-mini": {"dim": 3072, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": 8192, "window": 2047},
    "phi3-medium": {"dim": 5120, "layers": 40, "heads": 40, "kv_heads": 10, "hidden": 17920, "window": 2047},
    "phi4": {"dim": 5120, "layers": 40, "heads": 40, "kv_heads": 10, "hidden": 17920, "vocab": 100352,
             "rope": Rope(theta=250000.0)},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 97}
EXEMPT: dict[str, str] = {}


def _projections(attention: AttentionOp) -> Change:
    return cut(*(len(attention.get_parameter(f"{name}.weight")) for name in "qkv"))


NAMES: list[Row] = [
    Row("model.embed_tokens.weight", "decoder.embed.tokens.weight"),
    Row(
        "model.layers.{}.self_attn.qkv_proj.weight",
        tuple(f"decoder.blocks.{{}}.attn.op.{name}.weight" for name in "qkv"),
        sized=_projections,
    ),
    Row(
        "model.layers.{}.mlp.gate_up_proj.weight",
        ("decoder.blocks.{}.ffn.op.gate.weight", "decoder.blocks.{}.ffn.op.up.weight"),
        stacked(2),
    ),
    *rows(
        [
            ("model.layers.{}.input_layernorm", "decoder.blocks.{}.attn.pre"),
            ("model.layers.{}.self_attn.o_proj", "decoder.blocks.{}.attn.op.out"),
            ("model.layers.{}.post_attention_layernorm", "decoder.blocks.{}.ffn.pre"),
            ("model.layers.{}.mlp.down_proj", "decoder.blocks.{}.ffn.op.down"),
            ("model.norm", "decoder.norm"),
        ],
        ["weight"],
    ),
    Row("lm_head.weight", "head.weight"),
]
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)  # computed from the config


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Phi3ForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    for key, allowed in _ONE_VALUE.items():
        config.fix(key, allowed)
    own = config.decoder(1e-5)
    model = phi3(
        hidden=config.count("intermediate_size"),
        rope=_rope(config, own["dim"] // own["heads"]),
        window=config.count("sliding_window", None),
        attention_dropout=own.pop("dropout"),
        dropout=config("resid_pdrop", 0.0),
        **own,
    )
    config.done("rope_theta")
    return model


_ONE_VALUE = {  # keys of published files, read by no class or never another
    "hidden_act": "silu",
    "embd_pdrop": 0,
    "attention_bias": False,
    "mlp_bias": False,
    "lm_head_bias": False,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
}


def _rope(config: Config, head_size: int) -> Rope:
    longest = config.count("max_position_embeddings", 4096)
    rope = rope_from_hf(
        {
            "rope_theta": config.values.get("rope_theta"),
            "rope_parameters": config.table("rope_parameters"),
            "rope_scaling": config.table("rope_scaling"),
            "partial_rotary_factor": config.number("partial_rotary_factor", 1.0, most=1),
            "max_position_embeddings": longest,
            "original_max_position_embeddings": config.count("original_max_position_embeddings", 4096),
        },
        head_size,
    )
    if not isinstance(rope.scaling, LongRope | None):
        raise SpecError(f"{config.kind}: rope_parameters.rope_type is default or longrope in this family")
    return rope


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = (model.find(f"decoder.blocks.0.{name}") for name in ("attn", "ffn"))
    rope = attention.op.position
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        **written(model, attention.op),
        "intermediate_size": ffn.op.hidden,
        "sliding_window": attention.op.window,
        "resid_pdrop": attention.dropout,
        "pad_token_id": None,  # left out, it would be 32,000, beyond a smaller vocabulary
        **rope_to_hf(rope, model.dim // attention.op.heads),
    }
    if rope.scaling is not None:
        config["original_max_position_embeddings"] = rope.scaling.trained_length
    return config


HF = {"Phi3ForCausalLM": from_hf, "Phi3Model": without_head(from_hf)}
