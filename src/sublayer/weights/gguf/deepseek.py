"""deepseek2: DeepSeek V2 and V3 under one name, told apart by how their routers score."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import SpecError
from ...names import Change, Row
from .llama import FEED_FORWARD, FFN_NORM, HIDDEN, RMS, SILU, SIZES, decoder, experts, routing
from .rope import rope
from .table import Architecture, Config, Entry, Source, constant, fixed, key

SOFTMAX, SIGMOID = 1, 2  # llama.cpp's numbers of functions


def _latent() -> Entry:
    """The sizes of a head. Files say those of attention among latent vectors too, where all heads share keys."""

    def read(source: Source) -> dict[str, Any]:
        latent, turning = source.count("attention.kv_lora_rank"), source.count("rope.dimension_count")
        whole, value = source.count("attention.key_length_mla", 0), source.count("attention.value_length_mla", 0)
        if not whole:
            raise SpecError(
                f"{source.name}.attention.key_length_mla is missing: files of older converters are not read"
            )
        return {
            "num_attention_heads": source.count("attention.head_count"),
            "q_lora_rank": source("attention.q_lora_rank", None),
            "kv_lora_rank": latent,
            "qk_rope_head_dim": turning,
            "qk_nope_head_dim": whole - turning,
            "v_head_dim": value,
        }

    def write(config: Config) -> dict[str, Any]:
        latent, turning = config["kv_lora_rank"], config["qk_rope_head_dim"]
        query = {} if config["q_lora_rank"] is None else {"attention.q_lora_rank": config["q_lora_rank"]}
        return query | {
            "attention.head_count": config["num_attention_heads"],
            "attention.head_count_kv": 1,
            "attention.kv_lora_rank": latent,
            "attention.key_length": latent + turning,
            "attention.value_length": latent,
            "attention.key_length_mla": config["qk_nope_head_dim"] + turning,
            "attention.value_length_mla": config["v_head_dim"],
        }

    return Entry(read, write)


def _apart(heads: int, content: int) -> Change:
    """Keys and values of each head in turn, to keys [N, latent, content] and values [N, value, latent]."""

    def into(ts: list[Any]) -> list[Any]:
        by_head = ts[0].unflatten(0, (heads, -1))
        return [by_head[:, :content].mT, by_head[:, content:]]

    return Change(into, lambda ts: [torch.cat((ts[0].mT, ts[1]), 1).flatten(0, 1)], whole_rows=False)


def _rows(config: Config) -> list[Row]:
    attention = (
        ("input_layernorm", "attn_norm"), ("self_attn.q_proj", "attn_q"), ("self_attn.q_a_proj", "attn_q_a"),
        ("self_attn.q_a_layernorm", "attn_q_a_norm"), ("self_attn.q_b_proj", "attn_q_b"),
        ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"), ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
        ("self_attn.o_proj", "attn_output"),
    )  # fmt: skip
    shared = [(f"mlp.shared_experts.{name}_proj", f"ffn_{name}_shexp") for name in ("gate", "up", "down")]
    return [
        *decoder(*attention, *FFN_NORM, *FEED_FORWARD, ("mlp.gate", "ffn_gate_inp"), *shared),
        Row("model.layers.{}.mlp.gate.e_score_correction_bias", "blk.{}.exp_probs_b.bias"),
        Row("model.layers.{}.self_attn.kv_b_proj.weight", ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"),
            _apart(config["num_attention_heads"], config["qk_nope_head_dim"])),
        *experts(config["n_routed_experts"], "mlp.experts"),
    ]  # fmt: skip


_SHARED = (
    *SIZES, HIDDEN, RMS, SILU, _latent(), routing("n_routed_experts", "num_experts_per_tok"),
    rope(size=lambda source: source.count("rope.dimension_count"), size_of=lambda config: config["qk_rope_head_dim"]),
    key("leading_dense_block_count", "first_k_dense_replace", 0), key("expert_shared_count", "n_shared_experts"),
    key("expert_feed_forward_length", "moe_intermediate_size"),
    key("expert_weights_scale", "routed_scaling_factor", 1.0), key("expert_group_count", "n_group", 1),
    key("expert_group_used_count", "topk_group", 1), constant("nextn_predict_layers", 0),
    fixed(attention_bias=False),
)  # fmt: skip
_UNREAD = frozenset({"attention.head_count_kv", "attention.key_length", "attention.value_length"})


def _method() -> Entry:
    return Entry(
        lambda source: {
            "topk_method": "group_limited_greedy" if source.count("expert_group_count", 1) > 1 else "greedy"
        },
        lambda config: {},
    )


DEEPSEEK_V3 = Architecture(
    "deepseek2", "DeepseekV3ForCausalLM", "deepseek_v3",
    (*_SHARED, constant("expert_gating_func", SIGMOID), key("expert_weights_norm", "norm_topk_prob", False),
     fixed(rope_interleave=True)),
    _rows,
    when=lambda source: source.values.get("expert_gating_func") == SIGMOID,
    irrelevant=_UNREAD,
)  # fmt: skip

DEEPSEEK_V2 = Architecture(
    "deepseek2", "DeepseekV2ForCausalLM", "deepseek_v2",
    (*_SHARED, constant("expert_gating_func", SOFTMAX), constant("expert_weights_norm", False), _method(),
     fixed(norm_topk_prob=False)),
    _rows,
    when=lambda source: source.values.get("expert_gating_func") != SIGMOID,
    irrelevant=_UNREAD,
)  # fmt: skip
