"""gpt2, gptneox and gpt-oss."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import SpecError
from ...names import TRANSPOSED, Change, Row, in_turn, rows
from ...recipes.gpt_oss import BESIDE, IN_TURN, IN_TURN_BESIDE
from .llama import ATTENTION, HIDDEN, RMS, SIZES, decoder, routing
from .rope import rope
from .table import (
    Architecture,
    Config,
    Entry,
    Source,
    changed,
    fixed,
    head_size_of,
    heads,
    key,
    layers,
    present,
    tying,
    vocabulary,
)

LAYER_NORM = "attention.layer_norm_epsilon"


def _gpt2(config: Config) -> list[Row]:
    inner = layers(
        "transformer.h", "blk", ("ln_1", "attn_norm"), ("attn.c_attn", "attn_qkv"), ("attn.c_proj", "attn_output"),
        ("ln_2", "ffn_norm"), ("mlp.c_fc", "ffn_up"), ("mlp.c_proj", "ffn_down"),
    )  # fmt: skip
    return [
        Row("transformer.wte.weight", "token_embd.weight"),
        Row("transformer.wpe.weight", "position_embd.weight"),
        *(  # their Conv1D holds matrices by columns
            Row(row.theirs, row.ours, TRANSPOSED)
            if row.our_names[0].endswith(("qkv.weight", "output.weight", "up.weight", "down.weight"))
            else row
            for row in inner
        ),
        *rows([("transformer.ln_f", "output_norm")]),
        Row("lm_head.weight", "output.weight"),
    ]


GPT2 = Architecture(
    "gpt2", "GPT2LMHeadModel", "gpt2",
    (key("embedding_length", "n_embd"), key("block_count", "n_layer"), vocabulary(), tying(),
     key("attention.head_count", "n_head"), key("feed_forward_length", "n_inner"),
     key("context_length", "n_positions"), key(LAYER_NORM, "layer_norm_epsilon"),
     fixed(activation_function="gelu_new")),
    _gpt2,
    irrelevant=frozenset({"attention.head_count_kv", "rope.dimension_count"}),  # it has neither
)  # fmt: skip


def _neox(config: Config) -> list[Row]:
    inner = layers(
        "gpt_neox.layers", "blk", ("input_layernorm", "attn_norm"), ("attention.query_key_value", "attn_qkv"),
        ("attention.dense", "attn_output"), ("post_attention_layernorm", "ffn_norm"),
        ("mlp.dense_h_to_4h", "ffn_up"), ("mlp.dense_4h_to_h", "ffn_down"),
    )  # fmt: skip
    return [
        Row("gpt_neox.embed_in.weight", "token_embd.weight"),
        *changed(inner, {"attn_qkv": _apart(head_size_of(config))}),
        *rows([("gpt_neox.final_layer_norm", "output_norm")]),
        Row("embed_out.weight", "output.weight"),
    ]


def _apart(head_size: int) -> Change:
    """From q, k and v of each head in turn to all of q, all of k and all of v."""
    mixed = in_turn(head_size, head_size, head_size)
    return Change(lambda ts: [torch.cat(mixed.into(ts))], lambda ts: mixed.back(list(ts[0].chunk(3))))


GPT_NEOX = Architecture(
    "gptneox", "GPTNeoXForCausalLM", "gpt_neox",
    (*SIZES, key("attention.head_count", "num_attention_heads"), HIDDEN, key(LAYER_NORM, "layer_norm_eps"),
     rope(partial=True), key("use_parallel_residual", "use_parallel_residual", True),
     fixed(hidden_act="gelu"), present("blk.0.attn_qkv.bias", "attention_bias")),
    _neox,
    irrelevant=frozenset({"attention.head_count_kv"}),  # it has as many as heads
)  # fmt: skip


def _windows() -> Entry:
    """Every other layer sees a window only, the first among them."""

    def kinds(layers: int) -> list[str]:
        return ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]

    def read(source: Source) -> dict[str, Any]:
        window = source.count("attention.sliding_window")
        return {"sliding_window": window, "layer_types": kinds(source.layers())}

    def write(config: Config) -> dict[str, Any]:
        if config["layer_types"] != kinds(len(config["layer_types"])):
            raise SpecError("GGUF cannot say layer_types of this architecture but a window in every other layer")
        return {"attention.sliding_window": config["sliding_window"]}

    return Entry(read, write)


def _gpt_oss(config: Config) -> list[Row]:
    ours = "blk.{}.ffn_%s_exps.%s"
    return [
        *decoder(*ATTENTION, ("post_attention_layernorm", "post_attention_norm"), ("mlp.router", "ffn_gate_inp")),
        Row("model.layers.{}.self_attn.sinks", "blk.{}.attn_sinks.weight"),
        Row("model.layers.{}.mlp.experts.gate_up_proj",
            (ours % ("gate", "weight"), ours % ("up", "weight")), IN_TURN_BESIDE),
        Row("model.layers.{}.mlp.experts.gate_up_proj_bias",
            (ours % ("gate", "bias"), ours % ("up", "bias")), IN_TURN),
        Row("model.layers.{}.mlp.experts.down_proj", ours % ("down", "weight"), BESIDE),
        Row("model.layers.{}.mlp.experts.down_proj_bias", ours % ("down", "bias")),
    ]  # fmt: skip


GPT_OSS = Architecture(
    "gpt-oss", "GptOssForCausalLM", "gpt_oss",
    (*SIZES, heads(), key("expert_feed_forward_length", "intermediate_size"), RMS, rope(150000.0, truncate=False),
     _windows(), routing("num_local_experts", "num_experts_per_tok"), present("blk.0.attn_q.bias", "attention_bias"),
     fixed(hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)),
    _gpt_oss,
    irrelevant=frozenset({"feed_forward_length"}),  # it has none but the experts'
)  # fmt: skip
