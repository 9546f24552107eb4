"""Gemma 1, 2 and 3 (text): norms are stored as the factor itself, not as its distance from 1."""

from __future__ import annotations

from typing import Any

from ...errors import SpecError
from ...names import Row
from .llama import ATTENTION, FEED_FORWARD, FFN_NORM, HIDDEN, QK_NORMS, RMS, SIZES, decoder
from .rope import rope
from .table import PLUS_ONE, Architecture, Config, Entry, Source, changed, fixed, head_size, heads, key

GELU = "gelu_pytorch_tanh"
NORMS = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm", "attn_k_norm", "output_norm")
SANDWICH = (
    ("post_attention_layernorm", "post_attention_norm"),
    ("pre_feedforward_layernorm", "ffn_norm"),
    ("post_feedforward_layernorm", "post_ffw_norm"),
)


def _rows(*pairs: tuple[str, str]) -> list[Row]:
    return changed(decoder(*pairs), dict.fromkeys(NORMS, PLUS_ONE))


def _scale(largest: int) -> Entry:
    """What scores are divided by: the root of the head size, but in the model of so many layers (27B, of which GGUF
    says no more) of each head's share of the width."""

    def scalar(layers: int, width: int, heads: int, size: int) -> int:
        return width // max(1, heads) if layers == largest else size

    def read(source: Source) -> dict[str, Any]:
        layers, width, heads = map(source.count, ("block_count", "embedding_length", "attention.head_count"))
        return {"query_pre_attn_scalar": scalar(layers, width, heads, head_size(source))}

    def write(config: Config) -> dict[str, Any]:
        layers, width, heads = (config[key] for key in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
        if config["query_pre_attn_scalar"] != scalar(layers, width, heads, config["head_dim"]):
            raise SpecError(f"GGUF cannot say query_pre_attn_scalar={config['query_pre_attn_scalar']}")
        return {}

    return Entry(read, write)


def _windows(period: int) -> Entry:
    """Every period-th layer sees all, the others a window."""

    def kinds(layers: int, every: int) -> list[str]:
        return ["full_attention" if every and i % every == 0 else "sliding_attention" for i in range(1, layers + 1)]

    def read(source: Source) -> dict[str, Any]:
        layers = source.layers()
        every = source("attention.sliding_window_pattern", period)
        if isinstance(every, list):  # one for each layer: whether it sees a window only
            listed = ["sliding_attention" if one else "full_attention" for one in every]
            return {"sliding_window": source.count("attention.sliding_window"), "layer_types": listed}
        window = source.count("attention.sliding_window", 0)
        if not window:
            return {"layer_types": ["full_attention"] * layers}
        return {"sliding_window": window, "layer_types": kinds(layers, every)}

    def write(config: Config) -> dict[str, Any]:
        given = config["layer_types"]
        if "sliding_attention" not in given:
            return {}
        if given != kinds(len(given), period):
            raise SpecError(f"GGUF cannot say layer_types of this architecture but with every {period}th layer full")
        return {"attention.sliding_window": config["sliding_window"]}

    return Entry(read, write)


def _ropes() -> Entry:
    """Rotary positions of global layers and of local ones, which have a base of their own and no scaling."""
    whole = rope(1e6)

    def read(source: Source) -> dict[str, Any]:
        found = whole.read(source)
        local = {"rope_type": "default", "rope_theta": source("rope.freq_base_swa", 10000.0)}
        both = {"full_attention": found["rope_parameters"], "sliding_attention": local}
        return found | {"rope_parameters": both}

    def write(config: Config) -> dict[str, Any]:
        both = config["rope_parameters"]
        local = both["sliding_attention"]
        if local.get("rope_type", "default") != "default":
            raise SpecError(f"GGUF cannot say rope_type={local['rope_type']!r} of local layers")
        found = whole.write({**config, "rope_parameters": both["full_attention"]})
        return found | {"rope.freq_base_swa": float(local["rope_theta"])}

    return Entry(read, write)


GEMMA = Architecture(
    "gemma", "GemmaForCausalLM", "gemma",
    (*SIZES, heads(), HIDDEN, RMS, rope(), fixed(hidden_act=GELU, attention_bias=False)),
    lambda config: _rows(*ATTENTION, *FFN_NORM, *FEED_FORWARD),
)  # fmt: skip

GEMMA2 = Architecture(
    "gemma2", "Gemma2ForCausalLM", "gemma2",
    (*SIZES, heads(), HIDDEN, RMS, rope(), fixed(hidden_activation=GELU, attention_bias=False), _scale(46), _windows(2),
     key("attn_logit_softcapping", "attn_logit_softcapping", 50.0),
     key("final_logit_softcapping", "final_logit_softcapping", 30.0)),
    lambda config: _rows(*ATTENTION, *SANDWICH, *FEED_FORWARD),
)  # fmt: skip

GEMMA3 = Architecture(
    "gemma3", "Gemma3ForCausalLM", "gemma3_text",
    (*SIZES, heads(), HIDDEN, RMS, _ropes(), fixed(hidden_activation=GELU, attention_bias=False), _scale(62),
     _windows(6), key("final_logit_softcapping", "final_logit_softcapping", None)),
    lambda config: _rows(*ATTENTION, *QK_NORMS, *SANDWICH, *FEED_FORWARD),
)  # fmt: skip
