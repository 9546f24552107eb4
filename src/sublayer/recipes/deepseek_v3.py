"""DeepSeek-V3 and V2 (arXiv 2412.19437, 2405.04434): latent attention, and many small experts beside shared ones.

A layer keeps 576 numbers a token for all of its heads, from which keys and values are made; a token takes its experts
from the best groups. V3's shares are sigmoids, balanced by a bias that joins them for the choice alone; V2's a softmax.

>>> v3 = deepseek_v3(**SIZES["deepseek-v3"])
>>> v3.parameters(), v3.active_parameters()
(671026419200, 37552297472)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import STACKED, Change, Row, cut, in_turn, rows
from ..nn.embed import Embed
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.latent import LatentAttention, LatentAttentionOp
from ..nn.moe import MoE, Router
from ..nn.norm import RMSNorm
from ..nn.rope import Pairing, Rope, rope_from_hf, rope_to_hf
from ..nn.rope_scaling import Yarn, yarn_magnitude
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, without_head
from .llama import ACTIVATIONS
from .llama import NAMES as LLAMA


def deepseek_v3(
    dim: int,
    layers: int,
    attention: LatentAttention,
    moe: MoE,
    vocab: int,
    *,
    dense: int,
    dense_hidden: int,
    eps: float = 1e-6,
    tied: bool = False,
) -> Model:
    """The architecture. dense: how many layers, the first ones, have one feed-forward layer of dense_hidden instead.

    New models begin with 0.006 everywhere, as both papers say. What V3 predicts of a second token while training, a
    layer of its own, is no part of it.
    """
    norm = RMSNorm(eps)
    plain = FeedForward(dense_hidden, moe.expert.activation, gated=True)

    def block(layer: int) -> Block:
        return Block((pre_norm("attn", attention, norm), pre_norm("ffn", plain if layer < dense else moe, norm)))

    trunk = Trunk(Embed(vocab), tuple(map(block, range(layers))), norm)
    return Model(dim, decoder=trunk, tied=tied, init=Init(0.006))


def latent(
    heads: int,
    query_latent: int | None,
    rope: Rope,
    sizes: tuple[int, int, int, int] = (512, 128, 64, 128),
    **options: Any,
) -> LatentAttention:
    """sizes: of the latent, and a head's for content, rotary part and values. Of YaRN's two factors, that of all dims
    is squared in the scale of scores, and the rotary tables hold what the other adds."""
    scale, yarn = None, rope.scaling
    if isinstance(yarn, Yarn) and yarn.mscale_all_dim:
        scale = (sizes[1] + sizes[2]) ** -0.5 * yarn_magnitude(yarn.factor, yarn.mscale_all_dim) ** 2
    return LatentAttention(heads, *sizes, query_latent=query_latent, position=rope, scale=scale, **options)


def experts(count: int, hidden: int, router: Router, shared: int, activation: Any = "silu") -> MoE:
    """`count` experts of width `hidden`, and `shared` of them side by side for every token."""
    expert = FeedForward(hidden, activation, gated=True)
    return MoE(count, expert, router, shared=expert.replace(hidden=shared * hidden))


def v3_router(active: int, groups: int, active_groups: int, **options: Any) -> Router:
    """Sigmoids, and a bias that moves by 0.001 a step (arXiv 2412.19437, section 4.2)."""
    return Router(active, "sigmoid", groups=groups, active_groups=active_groups, balance_rate=BALANCE_RATE, **options)


def v2_router(active: int, groups: int = 1, active_groups: int = 1, **options: Any) -> Router:
    """Shares as the softmax gives them; a group counts as much as its best expert."""
    return Router(active, renormalise=False, groups=groups, active_groups=active_groups, group_votes=1, **options)


BALANCE_RATE = 0.001
V3_ROPE = Rope(pairing="interleaved", scaling=Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0))
V2_ROPE = Rope(pairing="interleaved", scaling=Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707))
SIZES: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"dim": 7168, "layers": 61, "attention": latent(128, 1536, V3_ROPE),
                    "moe": experts(256, 2048, v3_router(8, 8, 4, scale=2.5), 1), "vocab": 129280, "dense": 3,
                    "dense_hidden": 18432},
    "deepseek-v2": {"dim": 5120, "layers": 60, "attention": latent(128, 1536, V2_ROPE),
                    "moe": experts(160, 1536, v2_router(6, 8, 3, scale=16.0), 2), "vocab": 102400, "dense": 1,
                    "dense_hidden": 12288},
    "deepseek-v2-lite": {"dim": 2048, "layers": 27, "attention": latent(16, None, V2_ROPE),
                         "moe": experts(64, 1408, v2_router(6), 2), "vocab": 102400, "dense": 1,
                         "dense_hidden": 10944},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "attention": latent(4, 12, Rope(pairing="interleaved"), (16, 8, 4, 6)),
    "moe": experts(8, 12, v3_router(2, 4, 2, scale=2.5), 1), "vocab": 97, "dense": 1, "dense_hidden": 48,
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def _compressed(attention: LatentAttentionOp) -> Change:
    return cut(attention.spec.latent, attention.spec.rotary_size)


def _by_head(attention: LatentAttentionOp) -> Change:
    return in_turn(attention.spec.content_size, attention.spec.value_size)


LAYER, BLOCK = "model.layers.{}", "decoder.blocks.{}"
NAMES: list[Row] = [
    *LLAMA,
    *rows(
        [
            (f"{LAYER}.self_attn.q_a_proj", f"{BLOCK}.attn.op.q_down"),
            (f"{LAYER}.self_attn.q_a_layernorm", f"{BLOCK}.attn.op.q_down_norm"),
            (f"{LAYER}.self_attn.q_b_proj", f"{BLOCK}.attn.op.q_up"),
            (f"{LAYER}.self_attn.kv_a_layernorm", f"{BLOCK}.attn.op.down_norm"),
            (f"{LAYER}.mlp.gate", f"{BLOCK}.ffn.op.router"),
            *((f"{LAYER}.mlp.shared_experts.{m}_proj", f"{BLOCK}.ffn.op.shared.{m}") for m in ("gate", "up", "down")),
        ]
    ),
    *(
        Row(
            f"{LAYER}.self_attn.kv_a_proj_with_mqa.{kind}",
            (f"{BLOCK}.attn.op.down.{kind}", f"{BLOCK}.attn.op.k_rotary.{kind}"),
            sized=_compressed,
        )
        for kind in ("weight", "bias")
    ),
    Row(
        f"{LAYER}.self_attn.kv_b_proj.weight",
        (f"{BLOCK}.attn.op.k_up.weight", f"{BLOCK}.attn.op.v_up.weight"),
        sized=_by_head,
    ),
    Row(f"{LAYER}.mlp.gate.e_score_correction_bias", f"{BLOCK}.ffn.op.selection_bias"),
    *(
        Row(f"{LAYER}.mlp.experts.*.{m}_proj.weight", f"{BLOCK}.ffn.op.experts.{m}", STACKED)
        for m in ("gate", "up", "down")
    ),
]
PREFIX = "model."


def _further(model: Model) -> tuple[str, ...]:
    """What predicts a second token, which their files hold as one layer more."""
    layer = LAYER.format(len(model.find("decoder.blocks")))
    inside = [name for row in NAMES for name in row.their_names if name.startswith(LAYER)]
    own = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    return (
        f"{LAYER}.self_attn.rotary_emb.inv_freq",  # computed from the config
        *(f"{layer}.{name}.weight" for name in own),
        *(layer + name.removeprefix(LAYER).replace("*", "{}") for name in inside),
    )


IGNORED = _further


def _read(config: Config, router: Router, pairing: Pairing) -> Model:
    """What the config.json files of both share."""
    heads, content = config.count("num_attention_heads"), config.count("qk_nope_head_dim", 128)
    turning, hidden = config.count("qk_rope_head_dim", 64), config.count("moe_intermediate_size")
    for key, only in (("num_key_value_heads", heads), ("head_dim", turning), ("qk_head_dim", content + turning),
                      ("partial_rotary_factor", 1.0), ("moe_layer_freq", 1)):  # fmt: skip
        config.fix(key, only)
    for key in ("rope_parameters", "rope_scaling"):
        config.table(key)  # refuses what is none
    attention = latent(
        heads,
        config.count("q_lora_rank", None if "q_lora_rank" in config.values else 1536),
        rope_from_hf(config.values, turning, pairing=pairing),
        (config.count("kv_lora_rank", 512), content, turning, config.count("v_head_dim", 128)),
        bias=config("attention_bias", False),
        dropout=config("attention_dropout", 0.0),
    )
    activation = config.choose("hidden_act", ACTIVATIONS, "silu")
    moe = experts(
        config.count("n_routed_experts"), hidden, router, config.count("n_shared_experts"), activation
    )  # fmt: skip
    model = deepseek_v3(
        config.count("hidden_size"),
        layers := config.layers("num_hidden_layers"),
        attention,
        moe,
        config.count("vocab_size"),
        dense=config.count("first_k_dense_replace", least=0, most=layers),
        dense_hidden=config.count("intermediate_size"),
        eps=config("rms_norm_eps", 1e-6),
        tied=config("tie_word_embeddings", False),
    )
    # aux_loss_alpha and seq_aux: a loss of their training code, which transformers has not.
    config.done("rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "output_router_logits",
                "aux_loss_alpha", "seq_aux", "ep_size", "num_nextn_predict_layers", "num_mtp_layers")  # fmt: skip
    return model


def deepseek_v3_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a DeepseekV3ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    config.fix("topk_method", "noaux_tc")
    config.fix("scoring_func", "sigmoid")
    router = v3_router(
        config.count("num_experts_per_tok"),
        config.count("n_group"),
        config.count("topk_group"),
        renormalise=config("norm_topk_prob", True),
        scale=config.number("routed_scaling_factor"),
    )
    return _read(config, router, "interleaved" if config("rope_interleave", True) else "half")


def deepseek_v2_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a DeepseekV2ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    config.fix("norm_topk_prob", False)
    config.fix("mlp_bias", False)
    config.fix("scoring_func", "softmax")
    config.fix("topk_method", "greedy", "group_limited_greedy")
    grouped = config("topk_method", "greedy") == "group_limited_greedy"
    groups, active_groups = (config.count(key, 1) for key in ("n_group", "topk_group"))
    router = v2_router(
        config.count("num_experts_per_tok"),
        *((groups, active_groups) if grouped else ()),
        scale=config.number("routed_scaling_factor", 1.0),
    )
    return _read(config, router, "interleaved")


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of either; the caller checks that it reads back as the same spec."""
    ops = [block.sublayers[1].op for block in model.find("decoder.blocks")]
    attention, dense = model.find("decoder.blocks.0.attn.op"), [op for op in ops if isinstance(op, FeedForward)]
    moe: Any = next(op for op in ops if isinstance(op, MoE))
    router, hidden = moe.router, moe.expert.hidden
    config = {
        "hidden_size": model.dim,
        "num_hidden_layers": len(ops),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "q_lora_rank": attention.query_latent,
        "kv_lora_rank": attention.latent,
        "qk_nope_head_dim": attention.content_size,
        "qk_rope_head_dim": attention.rotary_size,
        "v_head_dim": attention.value_size,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "intermediate_size": dense[0].hidden if dense else hidden,
        "first_k_dense_replace": len(dense),
        "moe_intermediate_size": hidden,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared.hidden // hidden,
        "num_experts_per_tok": router.active,
        "n_group": router.groups,
        "topk_group": router.active_groups,
        "routed_scaling_factor": router.scale,
        "norm_topk_prob": router.renormalise,
        "vocab_size": model.vocab,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[moe.expert.activation],
        "rms_norm_eps": model.find("decoder.norm.eps"),
        "tie_word_embeddings": model.tied,
        **rope_to_hf(attention.position, attention.rotary_size),
    }
    if router.scores == "sigmoid":
        interleaved = attention.position.pairing == "interleaved"
        return config | {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
                         "rope_interleave": interleaved, "num_nextn_predict_layers": 0}  # fmt: skip
    method = "group_limited_greedy" if router.groups > 1 else "greedy"
    return config | {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method}


HF = {
    "DeepseekV3ForCausalLM": deepseek_v3_from_hf,
    "DeepseekV2ForCausalLM": deepseek_v2_from_hf,
    "DeepseekV3Model": without_head(deepseek_v3_from_hf),
    "DeepseekV2Model": without_head(deepseek_v2_from_hf),
}
