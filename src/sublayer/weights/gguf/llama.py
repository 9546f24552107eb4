"""Decoders that are named as Llama is: llama (Llama, Mistral, SmolLM; Mixtral under the same name), smollm3, qwen2,
qwen3, qwen3moe, olmo2, phi3."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import SpecError
from ...names import STACKED, Row, rows
from .rope import rope
from .table import (
    Architecture,
    Config,
    Entry,
    Source,
    changed,
    constant,
    fixed,
    head_size_of,
    heads,
    key,
    layers,
    present,
    turned,
    tying,
    vocabulary,
)

MAX_EXPERTS = 4096  # of one layer; each becomes names in a table

SIZES = (
    key("embedding_length", "hidden_size"),
    key("block_count", "num_hidden_layers"),
    vocabulary(),
    tying(),
)
RMS = key("attention.layer_norm_rms_epsilon", "rms_norm_eps")
HIDDEN = key("feed_forward_length", "intermediate_size")
SILU = fixed(hidden_act="silu")

ATTENTION = (
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
)
QK_NORMS = (("self_attn.q_norm", "attn_q_norm"), ("self_attn.k_norm", "attn_k_norm"))
FEED_FORWARD = (
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)
FFN_NORM = (("post_attention_layernorm", "ffn_norm"),)


def decoder(*pairs: tuple[str, str]) -> list[Row]:
    """The rows of a decoder's ends, and of these modules inside its layers."""
    return [
        Row("model.embed_tokens.weight", "token_embd.weight"),
        *layers("model.layers", "blk", *pairs),
        *rows([("model.norm", "output_norm"), ("lm_head", "output")]),
    ]


def experts(
    count: int,
    theirs: str,
    names: Iterable[tuple[str, str]] = (("gate_proj", "gate"), ("up_proj", "up"), ("down_proj", "down")),
) -> list[Row]:
    """The rows of a layer's routed experts: theirs one by one, GGUF's in one tensor a matrix."""
    return [
        Row(
            tuple(f"model.layers.{{}}.{theirs}.{i}.{one}.weight" for i in range(count)),
            f"blk.{{}}.ffn_{other}_exps.weight",
            STACKED,
        )
        for one, other in names
    ]


def routing(total: str, active: str) -> Entry:
    """How many experts there are, and how many a token goes to."""

    def read(source: Source) -> dict[str, Any]:
        count, used = source.count("expert_count"), source.count("expert_used_count")
        if not 0 < count <= MAX_EXPERTS:
            raise SpecError(f"{source.name}.expert_count={count} is not a number from 1 to {MAX_EXPERTS}")
        return {total: count, active: used}

    return Entry(read, lambda config: {"expert_count": config[total], "expert_used_count": config[active]})


def _turned(config: Config, table: Iterable[Row]) -> list[Row]:
    change = turned(head_size_of(config))
    return changed(table, {"attn_q": change, "attn_k": change})


def _windowless() -> Entry:
    """A window in none of the layers, and no key that could say of one."""

    def write(config: Config) -> dict[str, Any]:
        kinds = config.get("layer_types") or []
        if "sliding_attention" in kinds or (not kinds and config.get("sliding_window") is not None):
            raise SpecError("GGUF cannot say a sliding window of this architecture")
        return {}

    return Entry(lambda source: {"sliding_window": None}, write)


LLAMA = Architecture(
    "llama", "LlamaForCausalLM", "llama",
    (*SIZES, heads(), HIDDEN, RMS, rope(), SILU, present("blk.0.attn_q.bias", "attention_bias"),
     present("blk.0.ffn_gate.bias", "mlp_bias")),
    lambda config: _turned(config, decoder(*ATTENTION, *FFN_NORM, *FEED_FORWARD)),
    when=lambda source: not source.values.get("expert_count"),
    irrelevant=frozenset({"expert_count", "expert_used_count"}),
    ignored=("blk.{}.attn_rot_embd.weight",),
)  # fmt: skip


def _unrotated(every: int = 4) -> Entry:
    """Every fourth layer knows no positions, of which GGUF says nothing."""

    def rotated(layers: int) -> list[int]:
        return [int((layer + 1) % every != 0) for layer in range(layers)]

    def write(config: Config) -> dict[str, Any]:
        if config["no_rope_layers"] != rotated(len(config["no_rope_layers"])):
            raise SpecError(f"GGUF cannot say no_rope_layers of this architecture but every {every}th")
        return {}

    return Entry(lambda source: {"no_rope_layers": rotated(source.layers())}, write)


SMOLLM3 = Architecture(
    "smollm3", "SmolLM3ForCausalLM", "smollm3",
    (*SIZES, heads(), HIDDEN, RMS, rope(), SILU, _unrotated(), _windowless(),
     present("blk.0.attn_q.bias", "attention_bias"), present("blk.0.ffn_gate.bias", "mlp_bias")),
    lambda config: _turned(config, decoder(*ATTENTION, *FFN_NORM, *FEED_FORWARD)),
)  # fmt: skip

MIXTRAL_NAMES = (("w1", "gate"), ("w3", "up"), ("w2", "down"))
MIXTRAL = Architecture(
    "llama", "MixtralForCausalLM", "mixtral",
    (*SIZES, heads(), HIDDEN, RMS, rope(), SILU, routing("num_local_experts", "num_experts_per_tok"), _windowless()),
    lambda config: [
        *_turned(config, decoder(*ATTENTION, *FFN_NORM, ("block_sparse_moe.gate", "ffn_gate_inp"))),
        *experts(config["num_local_experts"], "block_sparse_moe.experts", MIXTRAL_NAMES),
    ],
    when=lambda source: bool(source.values.get("expert_count")),
    ignored=("blk.{}.attn_rot_embd.weight",),
)  # fmt: skip

QWEN2 = Architecture(
    "qwen2", "Qwen2ForCausalLM", "qwen2",
    (*SIZES, heads(), HIDDEN, RMS, rope(), SILU, fixed(use_sliding_window=False)),
    lambda config: decoder(*ATTENTION, *FFN_NORM, *FEED_FORWARD),
)  # fmt: skip

QWEN3 = Architecture(
    "qwen3", "Qwen3ForCausalLM", "qwen3",
    (*SIZES, heads(), HIDDEN, RMS, rope(), SILU, fixed(use_sliding_window=False, attention_bias=False)),
    lambda config: decoder(*ATTENTION, *QK_NORMS, *FFN_NORM, *FEED_FORWARD),
)  # fmt: skip

QWEN3_MOE = Architecture(
    "qwen3moe", "Qwen3MoeForCausalLM", "qwen3_moe",
    (*SIZES, heads(), key("feed_forward_length", "intermediate_size", 0), RMS, rope(), SILU,
     fixed(use_sliding_window=False, norm_topk_prob=True, mlp_only_layers=[], decoder_sparse_step=1,
           attention_bias=False),
     key("expert_feed_forward_length", "moe_intermediate_size"), routing("num_experts", "num_experts_per_tok"),
     constant("expert_shared_feed_forward_length", 0, written=False)),  # Qwen3-Coder's
    lambda config: [
        *decoder(*ATTENTION, *QK_NORMS, *FFN_NORM, ("mlp.gate", "ffn_gate_inp")),
        *experts(config["num_experts"], "mlp.experts"),
    ],
)  # fmt: skip

OLMO2 = Architecture(
    "olmo2", "Olmo2ForCausalLM", "olmo2",
    (*SIZES, heads(size=False), HIDDEN, RMS, rope(), SILU, fixed(attention_bias=False)),
    lambda config: decoder(
        *ATTENTION[1:], *QK_NORMS, *FEED_FORWARD, ("post_attention_layernorm", "post_attention_norm"),
        ("post_feedforward_layernorm", "post_ffw_norm"),
    ),
)  # fmt: skip


def _phi3_window() -> Entry:
    """None is a window of zero."""
    return Entry(
        lambda source: {"sliding_window": source.count("attention.sliding_window", 0) or None},
        lambda config: {"attention.sliding_window": config.get("sliding_window") or 0},
    )


PHI3 = Architecture(
    "phi3", "Phi3ForCausalLM", "phi3",
    (*SIZES, heads(size=False), HIDDEN, RMS, rope(partial=True), SILU, _phi3_window(),
     key("rope.scaling.original_context_length", "original_max_position_embeddings", None)),
    lambda config: decoder(
        ("input_layernorm", "attn_norm"), ("self_attn.qkv_proj", "attn_qkv"), ("self_attn.o_proj", "attn_output"),
        ("mlp.gate_up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), *FFN_NORM,
    ),
)  # fmt: skip
