"""Switch Transformer (Fedus et al. 2021, arXiv 2101.03961): T5 whose every second feed-forward layer has experts.

A token goes to the one expert it suits best, whose output is multiplied by its share of all: so the router learns
though it chooses. An expert takes so many tokens of a sequence and drops the rest, which the residual carries on;
auxiliary losses keep experts equally busy and the router's logits small.

>>> switch(768, 12, 12, hidden=3072, experts=8).parameters()
619339008
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import STACKED, Row, rows
from ..nn.feed_forward import Activation
from ..nn.moe import MoE, Router
from ..nn.sublayer import Model, Trunk
from .config import MAX_LAYERS, Config, mean, without_head
from .t5 import NAMES as T5
from .t5 import TINY as T5_TINY
from .t5 import t5


def switch(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    experts: int,
    vocab: int = 32128,
    *,
    every: int = 2,
    decoder_every: int | None = None,
    head_size: int = 64,
    decoder_layers: int | None = None,
    activation: Activation = "relu",
    buckets: int = 32,
    distance: int = 128,
    eps: float = 1e-6,
    dropout: float = 0.0,
    capacity: int = 64,
    router_bias: bool = False,
    jitter: float = 0.01,
    balance_loss: float = 0.001,
    z_loss: float = 0.001,
    tied: bool = True,
) -> Model:
    """The architecture. every: one layer of so many has experts, the second first; decoder_every None: as the encoder.

    Initialised as T5 is; the paper found a tenth of that variance more stable for its largest models (section 2.4).
    """
    dense = t5(
        dim, layers, heads, hidden, vocab, head_size=head_size, decoder_layers=decoder_layers, activation=activation,
        buckets=buckets, distance=distance, eps=eps, dropout=dropout, tied=tied,
    )  # fmt: skip
    router = Router(
        1, renormalise=False, bias=router_bias, capacity=capacity, jitter=jitter, balance_loss=balance_loss,
        z_loss=z_loss,
    )  # fmt: skip

    def sparse(trunk: Trunk | None, every: int) -> Trunk:
        assert trunk is not None
        blocks = list(trunk.blocks)
        for layer in range(1 % every, len(blocks), every):
            *attention, ffn = blocks[layer].sublayers
            moe = MoE(experts, ffn.op, router)  # pyright: ignore[reportArgumentType]
            blocks[layer] = blocks[layer].replace(sublayers=(*attention, ffn.replace(op=moe)))
        return trunk.replace(blocks=tuple(blocks))

    if every < 1 or (decoder_every or 1) < 1:
        raise SpecError(f"switch: every={every}, decoder_every={decoder_every}: one layer of how many has experts?")
    encoder, decoder = sparse(dense.encoder, every), sparse(dense.decoder, decoder_every or every)
    return dense.replace(encoder=encoder, decoder=decoder)


_BASE: dict[str, Any] = {"dim": 768, "layers": 12, "heads": 12, "hidden": 3072}
SIZES: dict[str, dict[str, Any]] = {
    **{f"switch-base-{experts}": _BASE | {"experts": experts} for experts in (8, 16, 32, 64, 128, 256)},
    "switch-large-128": {"dim": 1024, "layers": 24, "heads": 16, "hidden": 4096, "experts": 128},
}
TINY: dict[str, Any] = T5_TINY | {"hidden": 24, "experts": 4}
EXEMPT: dict[str, str] = {}


def _experts(trunk: str, place: int) -> list[Row]:
    """Rows of the layers with experts; place: where the feed-forward layer stands in their blocks."""
    theirs, ours = f"{trunk}.block.{{}}.layer.{place}.mlp", f"{trunk}.blocks.{{}}.ffn.op"
    return [
        *rows([(f"{theirs}.router.classifier", f"{ours}.router")]),
        Row(f"{theirs}.experts.expert_*.wi.weight", f"{ours}.experts.up", STACKED),
        Row(f"{theirs}.experts.expert_*.wo.weight", f"{ours}.experts.down", STACKED),
    ]


NAMES: list[Row] = [
    *(Row(row.their_names[0].replace("DenseReluDense", "mlp"), row.ours) for row in T5(t5(**T5_TINY))),
    *_experts("encoder", 1),
    *_experts("decoder", 2),
]
PREFIX = ""
IGNORED = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # copies of the shared table


def switch_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a SwitchTransformersForConditionalGeneration's config.json. Raises SpecError for what is not
    modelled. While training, theirs shakes what the experts read too; the paper and ours the router's input alone."""
    config = Config(values)
    layers = config.layers("num_layers")
    absent = layers if "num_decoder_layers" in values else 12
    decoder_layers = config.count("num_decoder_layers", absent, most=MAX_LAYERS)
    sparse = config.count("num_sparse_encoder_layers", 3, least=0, most=layers)
    decoder_sparse = config.count("num_sparse_decoder_layers", 3, least=0, most=decoder_layers)
    every, decoder_every = layers // (sparse or 1), decoder_layers // (decoder_sparse or 1)
    config.fix("encoder_sparse_step", every)
    config.fix("decoder_sparse_step", decoder_every)
    config.fix("router_dtype", "float32")
    config.fix("router_type", "tokens_masked")
    config.fix("is_encoder_decoder", True)
    config.fix("is_decoder", False)
    config.fix("add_cross_attention", False)
    config.fix("feed_forward_proj", config("dense_act_fn", "relu"))
    config.fix("is_gated_act", False)
    config.fix("tie_word_embeddings", True)  # their class then has three tables
    model = switch(
        config.count("d_model"),
        layers,
        config.count("num_heads"),
        config.count("d_ff"),
        config.count("num_experts", 8),
        config.count("vocab_size"),
        every=every,
        decoder_every=None if decoder_every == every else decoder_every,
        head_size=config.count("d_kv", 64),
        decoder_layers=None if decoder_layers == layers else decoder_layers,
        activation=config.choose("dense_act_fn", ACTIVATIONS, "relu"),
        buckets=config.count("relative_attention_num_buckets", 32),
        distance=config.count("relative_attention_max_distance", 128),
        eps=config("layer_norm_epsilon", 1e-6),
        dropout=config("dropout_rate", 0.1),
        capacity=config.count("expert_capacity", 64),
        router_bias=config("router_bias", False),
        jitter=config("router_jitter_noise", 0.01),
    )
    for trunk, routed in _routed(model).items():
        balance = config.over(len(routed), "router_aux_loss_coef", 0.001)
        z = config.over(len(routed), "router_z_loss_coef", 0.001)
        if routed:
            router = f"{trunk}.blocks.*.ffn.op.router"
            model = model.override(**{f"{router}.balance_loss": balance, f"{router}.z_loss": z})
    config.done("router_ignore_padding_tokens", "add_router_probs", "output_router_logits", "initializer_factor",
                "n_positions", "batch_prioritized_routing", "num_selected_experts")  # fmt: skip
    return model


def _routed(model: Model) -> dict[str, list[MoE]]:
    """The layers with experts of each trunk."""
    ffns = {name: [b.sublayers[-1].op for b in model.find(f"{name}.blocks")] for name in ("encoder", "decoder")}
    return {name: [op for op in ops if isinstance(op, MoE)] for name, ops in ffns.items()}


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    encoder, decoder = _routed(model).values()
    attention, bias = model.find("decoder.blocks.0.attn.op"), model.find("decoder.bias")
    routed = encoder or decoder
    moe: Any = routed[0] if routed else None
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[moe.expert.activation]
    return {
        "architectures": ["SwitchTransformersForConditionalGeneration"],
        "model_type": "switch_transformers",
        "is_encoder_decoder": True,
        "d_model": model.dim,
        "num_layers": len(model.find("encoder.blocks")),
        "num_decoder_layers": len(model.find("decoder.blocks")),
        "num_sparse_encoder_layers": len(encoder),
        "num_sparse_decoder_layers": len(decoder),
        "num_heads": attention.heads,
        "d_kv": attention.head_size or model.dim // attention.heads,
        "d_ff": moe.expert.hidden,
        "vocab_size": model.vocab,
        "num_experts": moe.experts,
        "expert_capacity": moe.router.capacity,
        "router_bias": moe.router.bias,
        "router_jitter_noise": moe.router.jitter,
        "router_aux_loss_coef": mean(moe.router.balance_loss, len(routed)),
        "router_z_loss_coef": mean(moe.router.z_loss, len(routed)),
        "dense_act_fn": activation,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.distance,
        "layer_norm_epsilon": model.find("decoder.norm.eps"),
        "dropout_rate": moe.expert.dropout,
        "tie_word_embeddings": model.tied,
    }


ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
HF = {
    "SwitchTransformersForConditionalGeneration": switch_from_hf,
    "SwitchTransformersModel": without_head(switch_from_hf),
}
