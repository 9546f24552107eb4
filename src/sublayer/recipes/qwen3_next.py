"""Qwen3-Next (Qwen team 2025; the gated delta rule, arXiv 2412.06464; gated attention, arXiv 2505.06708).

Three layers of four mix by the gated delta rule, whose memory does not grow; each fourth attends, with partial rotary
positions, norms on queries and keys, and an output gate. Norms store their distance from 1. In each layer a few of
many small experts are added to one that every token goes through.

>>> qwen3_next(**SIZES["qwen3-next-80b-a3b"]).parameters()
79674391296
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import STACKED, Change, Row, in_turn, interleaved, rows
from ..nn.attention import Attention, AttentionOp
from ..nn.convolution import ShortConvolution
from ..nn.delta import GatedDelta, GatedDeltaOp
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_from_hf, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, mean, without_head, written
from .llama import ACTIVATIONS

FFN = FeedForward | MoE
ROPE = Rope(theta=10000000.0, size=64)
RULE = GatedDelta(16, 32)


def qwen3_next(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    ffn: FFN | tuple[FFN, ...],
    vocab: int,
    rope: Rope = ROPE,
    *,
    head_size: int = 256,
    delta: GatedDelta = RULE,
    attends: tuple[bool, ...] | None = None,
    bias: bool = False,
    eps: float = 1e-6,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture. ffn: one for all layers (`experts` or a FeedForward), or one for each; attends: which layers
    do, each fourth where it is not said. New models begin as transformers' classes do, matrices with 0.02."""
    norm = RMSNorm(eps, plus_one=True)
    attention = Attention(
        heads, kv_heads, head_size, position=rope, qk_norm=norm, bias=bias, gated=True, dropout=dropout
    )  # fmt: skip
    mixers = {True: pre_norm("attn", attention, norm), False: pre_norm("delta", delta, norm)}
    which = tuple(i % 4 == 3 for i in range(layers)) if attends is None else attends
    each = ffn if isinstance(ffn, tuple) else (ffn,) * layers
    if not len(which) == len(each) == layers:
        raise SpecError(f"qwen3_next: attends has {len(which)} and ffn {len(each)} entries for {layers} layers")
    blocks = tuple(Block((mixers[at], pre_norm("ffn", one, norm))) for at, one in zip(which, each, strict=True))
    return Model(dim, decoder=Trunk(Embed(vocab), blocks, norm), tied=tied, init=Init(0.02))


def experts(
    count: int,
    active: int,
    hidden: int,
    shared: int,
    activation: Activation = "silu",
    *,
    renormalise: bool = True,
    balance_loss: float = 0.001,
) -> MoE:
    """`active` of `count` experts of inner width `hidden`, beside a gated one of width `shared` for all tokens."""
    return MoE(
        count,
        FeedForward(hidden, activation, gated=True),
        Router(active, renormalise=renormalise, balance_loss=balance_loss),
        shared=FeedForward(shared, activation, gated=True),
        shared_gated=True,
    )


SIZES: dict[str, dict[str, Any]] = {
    "qwen3-next-80b-a3b": {"dim": 2048, "layers": 48, "heads": 16, "kv_heads": 2, "ffn": experts(512, 10, 512, 512),
                           "vocab": 151936},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": experts(4, 2, 12, 16), "vocab": 97,
    "rope": Rope(size=4), "head_size": 8, "delta": GatedDelta(2, 4, 6, 5), "attends": (False, True),
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def _by_head(attention: AttentionOp) -> Change:
    return interleaved(2, attention.head_size)


def _by_key_head(delta: GatedDeltaOp) -> Change:
    spec = delta.spec
    values = spec.value_heads // spec.key_heads * spec.value_size
    return in_turn(spec.key_size, spec.key_size, values, values)


def _by_share(delta: GatedDeltaOp) -> Change:
    return interleaved(2, delta.spec.value_heads // delta.spec.key_heads)


LAYER, DELTA, BLOCK = "model.layers.{}", "model.layers.{}.linear_attn", "decoder.blocks.{}"
SHARED_NAMES: list[Row] = [  # with Qwen3.5, which stores the projections of the delta rule in another way
    Row("model.embed_tokens.weight", "decoder.embed.tokens.weight"),
    *(
        Row(
            f"{LAYER}.self_attn.q_proj.{kind}",
            (f"{BLOCK}.attn.op.q.{kind}", f"{BLOCK}.attn.op.gate.{kind}"),
            sized=_by_head,
        )
        for kind in ("weight", "bias")
    ),
    *rows(
        [
            (f"{LAYER}.self_attn.k_proj", f"{BLOCK}.attn.op.k"),
            (f"{LAYER}.self_attn.v_proj", f"{BLOCK}.attn.op.v"),
            (f"{LAYER}.self_attn.o_proj", f"{BLOCK}.attn.op.out"),
            (f"{LAYER}.self_attn.q_norm", f"{BLOCK}.attn.op.q_norm"),
            (f"{LAYER}.self_attn.k_norm", f"{BLOCK}.attn.op.k_norm"),
            (f"{LAYER}.input_layernorm", f"{BLOCK}.attn.pre"),
            (f"{LAYER}.input_layernorm", f"{BLOCK}.delta.pre"),
            (f"{DELTA}.conv1d", f"{BLOCK}.delta.op.convolution"),
            (f"{DELTA}.norm", f"{BLOCK}.delta.op.norm"),
            (f"{DELTA}.out_proj", f"{BLOCK}.delta.op.out"),
            (f"{LAYER}.post_attention_layernorm", f"{BLOCK}.ffn.pre"),
            (f"{LAYER}.mlp.gate_proj", f"{BLOCK}.ffn.op.gate"),
            (f"{LAYER}.mlp.up_proj", f"{BLOCK}.ffn.op.up"),
            (f"{LAYER}.mlp.down_proj", f"{BLOCK}.ffn.op.down"),
            (f"{LAYER}.mlp.gate", f"{BLOCK}.ffn.op.router"),
            (f"{LAYER}.mlp.shared_expert.gate_proj", f"{BLOCK}.ffn.op.shared.gate"),
            (f"{LAYER}.mlp.shared_expert.up_proj", f"{BLOCK}.ffn.op.shared.up"),
            (f"{LAYER}.mlp.shared_expert.down_proj", f"{BLOCK}.ffn.op.shared.down"),
            (f"{LAYER}.mlp.shared_expert_gate", f"{BLOCK}.ffn.op.shared_gate"),
            ("model.norm", "decoder.norm"),
        ],
        kinds=("weight", "bias"),
    ),
    *(
        Row(f"{LAYER}.mlp.experts.*.{name}_proj.weight", f"{BLOCK}.ffn.op.experts.{name}", STACKED)
        for name in ("gate", "up", "down")
    ),
    Row(f"{DELTA}.dt_bias", f"{BLOCK}.delta.op.rate_bias"),
    Row(f"{DELTA}.A_log", f"{BLOCK}.delta.op.log_rate"),
    Row("lm_head.weight", "head.weight"),
]


def of_delta(*names: str) -> tuple[str, ...]:
    """Our names of some matrices of the delta rule."""
    return tuple(f"{BLOCK}.delta.op.{name}.weight" for name in names)


NAMES: list[Row] = [
    *SHARED_NAMES,
    Row(f"{DELTA}.in_proj_qkvz.weight", of_delta("q", "k", "v", "gate"), sized=_by_key_head),
    Row(f"{DELTA}.in_proj_ba.weight", of_delta("beta", "decay"), sized=_by_share),
]
PREFIX = "model."
# Their next-but-one token predictor, which no class of theirs reads either.
IGNORED = (
    *(f"mtp.{name}.weight" for name in ("fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")),
    *(f"mtp.layers.{{}}.{name}_layernorm.weight" for name in ("input", "post_attention")),
    *(f"mtp.layers.{{}}.self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mtp.layers.{{}}.self_attn.{name}_norm.weight" for name in "qk"),
    *(f"mtp.layers.{{}}.mlp.{name}.weight" for name in ("gate", "shared_expert_gate")),
    *(
        f"mtp.layers.{{}}.mlp.{of}{name}_proj.weight"
        for of in ("", "shared_expert.", "experts.{}.")
        for name in ("gate", "up", "down")
    ),
)


def read(config: Config, rope: Mapping[str, Any], ffn: FFN | tuple[FFN, ...]) -> Model:
    """What the config.json files of the line share; rope: the keys about rotary positions."""
    own = config.decoder(1e-6) | {"kv_heads": config.count("num_key_value_heads")}
    layers, head_size = own["layers"], config.count("head_dim", 256)
    every = config.count("full_attention_interval", 4)
    default = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
    kinds, known = config("layer_types", default), {"full_attention": True, "linear_attention": False}
    if not isinstance(kinds, list) or len(kinds) != layers or any(str(kind) not in known for kind in kinds):
        raise SpecError(f"{config.kind}: layer_types does not say {' or '.join(known)} for each of {layers} layers")
    delta = GatedDelta(
        config.count("linear_num_key_heads", 16),
        config.count("linear_num_value_heads", 32),
        config.count("linear_key_head_dim", 128),
        config.count("linear_value_head_dim", 128),
        ShortConvolution(config.count("linear_conv_kernel_dim", 4), bias=False, activation=activation(config)),
        own["eps"],
    )
    return qwen3_next(
        **own,
        ffn=ffn,
        rope=rope_from_hf({"partial_rotary_factor": 0.25} | dict(rope), head_size),
        head_size=head_size,
        delta=delta,
        attends=tuple(known[kind] for kind in kinds),
        bias=config("attention_bias", False),
    )


def activation(config: Config) -> Activation:
    return config.choose("hidden_act", ACTIVATIONS, "silu")


def read_experts(config: Config, layers: int, count: int, active: int, *, renormalise: bool = True) -> MoE:
    """The experts of each of so many layers of a config.json; count and active where it names none."""
    return experts(
        config.count("num_experts", count),
        config.count("num_experts_per_tok", active),
        config.count("moe_intermediate_size", 512),
        config.count("shared_expert_intermediate_size", 512),
        activation(config),
        renormalise=renormalise,
        balance_loss=config.over(layers, "router_aux_loss_coef", 0.001),
    )


IRRELEVANT = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings",
              "output_router_logits")  # fmt: skip


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen3NextForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    layers, every = config.layers("num_hidden_layers"), config.count("decoder_sparse_step", 1)
    dense = config.layers_of("mlp_only_layers")
    sparse = [i not in dense and (i + 1) % every == 0 for i in range(layers)]
    ffn: FFN = FeedForward(config.count("intermediate_size", 5632), activation(config), gated=True)
    moe: FFN = ffn
    if config.count("num_experts", 512, least=0):
        moe = read_experts(config, sum(sparse), 512, 10, renormalise=config("norm_topk_prob", True))
    model = read(config, values, tuple(moe if at else ffn for at in sparse))
    config.done(*IRRELEVANT, "norm_topk_prob", "num_experts_per_tok", "moe_intermediate_size",
                "shared_expert_intermediate_size", "router_aux_loss_coef")  # fmt: skip
    return model


def write(model: Model) -> tuple[dict[str, Any], list[Any]]:
    """(the keys of config.json that the line shares, each layer's feed-forward part)."""
    blocks = model.find("decoder.blocks")
    mixers, ffns = zip(*([sublayer.op for sublayer in block.sublayers] for block in blocks), strict=True)
    attention: Any = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    delta: Any = next((mixer for mixer in mixers if isinstance(mixer, GatedDelta)), None)
    if attention is None or delta is None:
        raise SpecError("qwen3_next: needs layers of both kinds")
    rope = rope_to_hf(attention.position, attention.head_size)
    rope["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
    return {
        **written(model, attention),
        "head_dim": attention.head_size,
        "layer_types": ["full_attention" if isinstance(m, Attention) else "linear_attention" for m in mixers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_size,
        "linear_value_head_dim": delta.value_size,
        "linear_conv_kernel_dim": delta.convolution.kernel,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[delta.convolution.activation],
        "attention_bias": attention.bias,
        **rope,
    }, list(ffns)


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec. A model with
    no experts is written as Qwen3.5, which is the same function."""
    config, ffns = write(model)
    moe = next((ffn for ffn in ffns if isinstance(ffn, MoE)), None)
    if moe is None or moe.shared is None:
        raise SpecError("qwen3_next: has experts, and a shared one")
    dense = [i for i, ffn in enumerate(ffns) if not isinstance(ffn, MoE)]
    return (
        config
        | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "mlp_only_layers": dense,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.router.active,
            "moe_intermediate_size": moe.expert.hidden,
            "shared_expert_intermediate_size": moe.shared.hidden,
            "norm_topk_prob": moe.router.renormalise,
            "router_aux_loss_coef": mean(moe.router.balance_loss, len(ffns) - len(dense)),
        }
        | ({"intermediate_size": ffns[dense[0]].hidden} if dense else {})
    )


HF = {"Qwen3NextForCausalLM": from_hf, "Qwen3NextModel": without_head(from_hf)}
