"""mamba, mamba2 and jamba: A is stored as it is used, and convolutions without their axis of one."""

from __future__ import annotations

from typing import Any

from ...errors import SpecError
from ...names import Change, Row, rows
from ...nn.mamba import step_rank
from ...recipes.jamba import period_of
from .llama import ATTENTION, HIDDEN, MAX_EXPERTS, RMS, SILU, SIZES, experts
from .table import COLUMN, FLAT, MINUS_EXP, Architecture, Config, Entry, Source, constant, key, layers, present

EPS = key("attention.layer_norm_rms_epsilon", "layer_norm_epsilon")
KERNEL = key("ssm.conv_kernel", "conv_kernel")
NOTHING = (constant("attention.head_count", 0), constant("feed_forward_length", 0))
"""What a loader asks of every architecture, and these have not."""
BIASES = (present("blk.0.ssm_in.bias", "use_bias"), present("blk.0.ssm_conv1d.bias", "use_conv_bias"))
CONTEXT = 1 << 20  # nothing ends it; what converters write


def _inner(ours: str, *written: int) -> Entry:
    """The inner width over the model's; written: what llama.cpp computes of it, any where none is given."""

    def read(source: Source) -> dict[str, Any]:
        width, inner = source.count("embedding_length"), source.count("ssm.inner_size")
        ratio = inner / max(1, width)
        return {ours: int(ratio) if ratio == int(ratio) else ratio}

    def write(config: Config) -> dict[str, Any]:
        if written and config[ours] not in written:
            raise SpecError(f"llama.cpp computes this architecture with {ours}={written[0]} alone, not {config[ours]}")
        context = config.get("max_position_embeddings", CONTEXT)
        return {"ssm.inner_size": round(config[ours] * config["hidden_size"]), "context_length": context}

    return Entry(read, write)


def _rank(ours: str) -> Entry:
    """Of the maps to step sizes, a number even where config.json leaves it to the width."""

    def write(config: Config) -> dict[str, Any]:
        rank = config[ours]
        return {"ssm.time_step_rank": step_rank(config["hidden_size"]) if rank == "auto" else rank}

    return Entry(lambda source: {ours: source.count("ssm.time_step_rank")}, write)


def _mixer(theirs: str, mixer: str, *more: tuple[str, str]) -> list[Row]:
    """What the mixers of layers under a name share."""
    pairs = [("in_proj", "ssm_in"), ("out_proj", "ssm_out"), *more]
    return [
        *layers(theirs, "blk", *((f"{mixer}.{one}", other) for one, other in pairs)),
        Row(f"{theirs}.{{}}.{mixer}.conv1d.weight", "blk.{}.ssm_conv1d.weight", FLAT),
        Row(f"{theirs}.{{}}.{mixer}.conv1d.bias", "blk.{}.ssm_conv1d.bias"),
    ]


def _mamba(theirs: str, mixer: str, *more: tuple[str, str]) -> list[Row]:
    return [
        *_mixer(theirs, mixer, ("x_proj", "ssm_x"), ("dt_proj", "ssm_dt"), *more),
        Row(f"{theirs}.{{}}.{mixer}.A_log", "blk.{}.ssm_a", MINUS_EXP),
        Row(f"{theirs}.{{}}.{mixer}.D", "blk.{}.ssm_d"),
    ]


ENDS = [
    Row("backbone.embeddings.weight", "token_embd.weight"),
    *layers("backbone.layers", "blk", ("norm", "attn_norm")),
    *rows([("backbone.norm_f", "output_norm"), ("lm_head", "output")]),
]

MAMBA = Architecture(
    "mamba", "MambaForCausalLM", "mamba",
    (*SIZES, *NOTHING, EPS, KERNEL, *BIASES, _inner("expand", 2), key("ssm.state_size", "state_size"),
     _rank("time_step_rank"), constant("ssm.dt_b_c_rms", False)),
    lambda config: [*ENDS, *_mamba("backbone.layers", "mixer")],
    irrelevant=frozenset({"context_length"}),
)  # fmt: skip


def _heads() -> Entry:
    """Heads, of which GGUF says how many and how wide they are together."""

    def read(source: Source) -> dict[str, Any]:
        count, groups = source.count("ssm.time_step_rank"), source.count("ssm.group_count", 1)
        if not count or source.count("ssm.inner_size") % count:
            raise SpecError(f"{source.name}.ssm.time_step_rank={count} does not divide ssm.inner_size")
        return {"num_heads": count, "head_dim": source.count("ssm.inner_size") // count, "n_groups": groups}

    return Entry(
        read, lambda config: {"ssm.time_step_rank": config["num_heads"], "ssm.group_count": config["n_groups"]}
    )


MINUS_EXP_COLUMN = Change(
    lambda ts: COLUMN.into(MINUS_EXP.into(ts)), lambda ts: MINUS_EXP.back(COLUMN.back(ts)), whole_rows=False
)


def _by_group(groups: int) -> Change:
    return Change(lambda ts: [ts[0].unflatten(0, (groups, -1))], lambda ts: [ts[0].flatten()])


MAMBA2 = Architecture(
    "mamba2", "Mamba2ForCausalLM", "mamba2",
    (*SIZES, *NOTHING, EPS, KERNEL, *BIASES, _inner("expand"), key("ssm.state_size", "state_size"), _heads()),
    lambda config: [
        *ENDS,
        *_mixer("backbone.layers", "mixer"),
        Row("backbone.layers.{}.mixer.A_log", "blk.{}.ssm_a", MINUS_EXP_COLUMN),
        Row("backbone.layers.{}.mixer.D", "blk.{}.ssm_d", COLUMN),
        Row("backbone.layers.{}.mixer.dt_bias", "blk.{}.ssm_dt.bias"),
        Row("backbone.layers.{}.mixer.norm.weight", "blk.{}.ssm_norm.weight", _by_group(config["n_groups"])),
    ],
    irrelevant=frozenset({"context_length"}),
)  # fmt: skip


def _attention_layers() -> Entry:
    """Layers with attention have keys, the others none."""

    def read(source: Source) -> dict[str, Any]:
        layers, kv_heads = source.layers(), source("attention.head_count_kv")
        if not isinstance(kv_heads, list) or len(kv_heads) != layers:
            raise SpecError(f"{source.name}.attention.head_count_kv does not say of each of {layers} layers how many")
        period, offset = period_of([count > 0 for count in kv_heads])
        return {
            "num_attention_heads": source.count("attention.head_count"),
            "num_key_value_heads": max(kv_heads),
            "attn_layer_period": period,
            "attn_layer_offset": offset,
        }

    def write(config: Config) -> dict[str, Any]:
        period, offset = config["attn_layer_period"], config["attn_layer_offset"]
        layers = range(config["num_hidden_layers"])
        kv_heads = [config["num_key_value_heads"] if i % period == offset else 0 for i in layers]
        return {"attention.head_count": config["num_attention_heads"], "attention.head_count_kv": kv_heads}

    return Entry(read, write)


def _expert_layers() -> Entry:
    """Layers with experts have a router, which only the tensors show."""

    def read(source: Source) -> dict[str, Any]:
        routed = [source.has(f"blk.{i}.ffn_gate_inp.weight") for i in range(source.layers())]
        period, offset = period_of(routed)
        count = source.count("expert_count")
        if count > MAX_EXPERTS:
            raise SpecError(f"{source.name}.expert_count={count} is more than {MAX_EXPERTS}")
        return {
            "expert_layer_period": period,
            "expert_layer_offset": offset,
            "num_experts": count,
            "num_experts_per_tok": source.count("expert_used_count"),
        }

    return Entry(
        read,
        lambda config: {
            "expert_count": config["num_experts"], "expert_used_count": config["num_experts_per_tok"]
        },
    )  # fmt: skip


def _jamba(config: Config) -> list[Row]:
    inner = [
        ("input_layernorm", "attn_norm"), ("pre_ff_layernorm", "ffn_norm"), ("feed_forward.router", "ffn_gate_inp"),
        *ATTENTION[1:],
        *((f"feed_forward.{name}_proj", f"ffn_{name}") for name in ("gate", "up", "down")),
    ]  # fmt: skip
    norms = [(f"{name}_layernorm", f"ssm_{name}_norm") for name in ("dt", "b", "c")]
    return [
        Row("model.embed_tokens.weight", "token_embd.weight"),
        *layers("model.layers", "blk", *inner),
        *_mamba("model.layers", "mamba", *norms),
        *experts(config["num_experts"], "feed_forward.experts"),
        *rows([("model.final_layernorm", "output_norm"), ("lm_head", "output")]),
    ]


JAMBA = Architecture(
    "jamba", "JambaForCausalLM", "jamba",
    (*SIZES, HIDDEN, RMS, SILU, _inner("mamba_expand", 2), _attention_layers(), _expert_layers(),
     key("ssm.conv_kernel", "mamba_d_conv"), key("ssm.state_size", "mamba_d_state"),
     _rank("mamba_dt_rank"), present("blk.0.ssm_in.bias", "mamba_proj_bias")),
    _jamba,
    irrelevant=frozenset({"context_length"}),
)  # fmt: skip
