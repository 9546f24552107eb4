"""Jamba (AI21 2024, arXiv 2403.19887; 1.5: 2408.12570): Mamba, a few attention layers, and experts.

Every block is a mixer and a feed-forward layer, pre-norm, as in Llama. The mixers are Mamba with norms on its step
sizes and on the maps into and out of the state; one in eight is attention, which needs no positions. Every second
feed-forward layer is sixteen experts, of which a token takes two, weighted by their share among all.

>>> jamba(4096, 32, 32, 8, 14336, 65536).parameters()
51570323328
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpecError
from ..names import STACKED, Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.mamba import Mamba
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, mean, without_head
from .mamba import ACTIVATIONS, mixer_rows, whole
from .mamba import check_hf as check_hf

Every = tuple[int, int]
"""(period, offset): of each `period` layers, the one at `offset`."""


def jamba(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    *,
    attention: Every = (8, 4),
    moe: Every = (2, 1),
    experts: int = 16,
    active: int = 2,
    inner: int | None = None,
    state_size: int = 16,
    rank: int | None = None,
    kernel: int = 4,
    mamba_bias: bool = False,
    conv_bias: bool = True,
    activation: Activation = "silu",
    eps: float = 1e-6,
    dropout: float = 0.0,
    balance_loss: float = 0.001,
    tied: bool = False,
) -> Model:
    """The architecture; inner None is 2 · dim, rank None dim / 16; with one expert all feed-forward layers are plain.

    Matrices begin at 0.02, the scans as Mamba's.
    """
    norm = RMSNorm(eps)
    mamba = Mamba(inner or 2 * dim, state_size, rank, kernel, mamba_bias, conv_bias, activation, norm)
    attend = pre_norm("attn", Attention(heads, kv_heads, dropout=dropout), norm)
    scan = pre_norm("mamba", mamba, norm)
    plain = FeedForward(hidden, activation, gated=True)
    routed = MoE(experts, plain, Router(active, renormalise=False, balance_loss=balance_loss)) if experts > 1 else plain

    def block(layer: int) -> Block:
        ffn = routed if layer % moe[0] == moe[1] else plain
        return Block((attend if layer % attention[0] == attention[1] else scan, pre_norm("ffn", ffn, norm)))

    blocks = tuple(map(block, range(layers)))
    return Model(dim, decoder=Trunk(Embed(vocab), blocks, norm), tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "jamba-52b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 65536},
    "jamba-1.5-large": {"dim": 8192, "layers": 72, "heads": 64, "kv_heads": 8, "hidden": 24576, "vocab": 65536},
}
TINY: dict[str, Any] = {
    "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 61, "attention": (3, 1), "experts": 4,
    "inner": 64, "state_size": 4,
}  # fmt: skip
EXEMPT: dict[str, str] = {}

SHARED_NAMES: list[Row] = [  # with Bamba
    Row("model.embed_tokens.weight", "decoder.embed.tokens.weight"),
    *rows(
        [
            ("model.layers.{}.input_layernorm", "decoder.blocks.{}.mamba.pre"),
            ("model.layers.{}.input_layernorm", "decoder.blocks.{}.attn.pre"),
            ("model.layers.{}.self_attn.q_proj", "decoder.blocks.{}.attn.op.q"),
            ("model.layers.{}.self_attn.k_proj", "decoder.blocks.{}.attn.op.k"),
            ("model.layers.{}.self_attn.v_proj", "decoder.blocks.{}.attn.op.v"),
            ("model.layers.{}.self_attn.o_proj", "decoder.blocks.{}.attn.op.out"),
            ("model.layers.{}.pre_ff_layernorm", "decoder.blocks.{}.ffn.pre"),
            ("model.layers.{}.feed_forward.gate_proj", "decoder.blocks.{}.ffn.op.gate"),
            ("model.layers.{}.feed_forward.up_proj", "decoder.blocks.{}.ffn.op.up"),
            ("model.layers.{}.feed_forward.down_proj", "decoder.blocks.{}.ffn.op.down"),
            ("model.final_layernorm", "decoder.norm"),
        ]
    ),
    Row("lm_head.weight", "head.weight"),
]
NAMES: list[Row] = [
    *SHARED_NAMES,
    *mixer_rows("model.layers.{}.mamba", "decoder.blocks.{}.mamba.op"),
    *rows(
        [
            ("model.layers.{}.mamba.dt_layernorm", "decoder.blocks.{}.mamba.op.dt_norm"),
            ("model.layers.{}.mamba.b_layernorm", "decoder.blocks.{}.mamba.op.b_norm"),
            ("model.layers.{}.mamba.c_layernorm", "decoder.blocks.{}.mamba.op.c_norm"),
            ("model.layers.{}.feed_forward.router", "decoder.blocks.{}.ffn.op.router"),
        ]
    ),
    *(
        Row(
            f"model.layers.{{}}.feed_forward.experts.*.{name}_proj.weight",
            f"decoder.blocks.{{}}.ffn.op.experts.{name}",
            STACKED,
        )
        for name in ("gate", "up", "down")
    ),
]
PREFIX = "model."
IGNORED: tuple[str, ...] = ()


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a JambaForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    own = config.decoder(1e-6, 8, heads=32)
    rank = None if config("mamba_dt_rank", "auto") == "auto" else config.count("mamba_dt_rank")

    def every(what: str, period: int, offset: int) -> Every:
        found = config.count(f"{what}_layer_period", period), config.count(f"{what}_layer_offset", offset, least=0)
        if found[1] >= found[0]:
            raise SpecError(f"jamba: {what}_layer_offset={found[1]} lies beyond {what}_layer_period={found[0]}")
        return found

    config.fix("mamba_inner_layernorms", True)
    config.fix("sliding_window")
    moe = every("expert", 2, 1)
    model = jamba(
        **own,
        hidden=config.count("intermediate_size"),
        attention=every("attn", 8, 4),
        moe=moe,
        experts=config.count("num_experts", 16),
        active=config.count("num_experts_per_tok", 2),
        inner=int(config.number("mamba_expand", 2) * own["dim"]),
        state_size=config.count("mamba_d_state", 16),
        rank=rank,
        kernel=config.count("mamba_d_conv", 4),
        mamba_bias=config("mamba_proj_bias", False),
        conv_bias=config("mamba_conv_bias", True),
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
        balance_loss=config.over(len(range(moe[1], own["layers"], moe[0])), "router_aux_loss_coef", 0.001),
    )
    config.done("output_router_logits", "use_mamba_kernels", "use_mambapy", "use_associative_scan",
                "max_position_embeddings", "n_ctx", "num_logits_to_keep", "calc_logits_for_entire_prompt")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    mixers, ffns = zip(*([sub.op for sub in block.sublayers] for block in model.find("decoder.blocks")), strict=True)
    mamba, *_ = [mixer for mixer in mixers if isinstance(mixer, Mamba)]
    attention = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    routed = [ffn for ffn in ffns if isinstance(ffn, MoE)]
    moe = routed[0] if routed else None
    attn_period, attn_offset = period_of([isinstance(mixer, Attention) for mixer in mixers])
    expert_period, expert_offset = period_of([isinstance(ffn, MoE) for ffn in ffns])
    plain = moe.expert if moe is not None else ffns[0]
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        "hidden_size": model.dim,
        "num_hidden_layers": len(mixers),
        "num_attention_heads": attention.heads if attention is not None else 1,
        "num_key_value_heads": attention.kv_heads if attention is not None else 1,
        "attention_dropout": attention.dropout if attention is not None else 0.0,
        "intermediate_size": plain.hidden,
        "vocab_size": model.vocab,
        "attn_layer_period": attn_period,
        "attn_layer_offset": attn_offset,
        "expert_layer_period": expert_period,
        "expert_layer_offset": expert_offset,
        "num_experts": moe.experts if moe is not None else 1,
        "num_experts_per_tok": moe.router.active if moe is not None else 1,
        "router_aux_loss_coef": mean(moe.router.balance_loss, len(routed)) if moe is not None else 0.0,
        "mamba_expand": whole(mamba.inner / model.dim),
        "mamba_d_state": mamba.state_size,
        "mamba_dt_rank": mamba.rank or "auto",
        "mamba_d_conv": mamba.kernel,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[plain.activation],
        "rms_norm_eps": model.find("decoder.norm.eps"),
        "tie_word_embeddings": model.tied,
    }


def period_of(chosen: Sequence[bool]) -> Every:
    """The shortest period, and the offset, that choose these layers."""
    layers, places = len(chosen), [i for i, one in enumerate(chosen) if one]
    if len(places) > 1:
        period = places[1] - places[0]
    else:
        period = max(places[0] + 1, layers - places[0]) if places else layers + 1
    offset = places[0] % period if places else layers
    if [i % period == offset for i in range(layers)] != list(chosen):
        raise SpecError("jamba: the layers with attention or experts follow no period")
    return period, offset


HF = {"JambaForCausalLM": from_hf, "JambaModel": without_head(from_hf)}
