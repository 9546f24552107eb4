"""ModernBERT (Warner et al. 2024, arXiv 2412.13663).

A pre-norm encoder with rotary positions, GeGLU and hardly any biases. Every third layer sees the whole document; the
others see 64 tokens on either side, with a RoPE of shorter wavelengths. The first layer has no norm before its
attention, since the embeddings have just passed one.

>>> modernbert(768, 22, 12, 1152).parameters()
149655232
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import SpecError
from ..names import Row, rows, stacked
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Classifier, Head, Pool, Spans, Transform
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.op import Part
from ..nn.rope import Rope, rope_from_hf, rope_to_hf
from ..nn.sublayer import Block, Model, Sublayer, Trunk, pre_norm
from .bert import ACTIVATIONS, SUFFIXES, prefixed, spans
from .config import Config, labels

ROPE, LOCAL_ROPE = Rope(160000.0), Rope(10000.0)
NORM = LayerNorm(bias=False)
MASKED_TOKENS = Head(bias=True, before=Transform(norm=NORM, bias=False))


def modernbert(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab: int = 50368,
    *,
    full: int | tuple[bool, ...] = 3,
    window: int = 65,
    rope: Rope = ROPE,
    local_rope: Rope = LOCAL_ROPE,
    activation: Activation = "gelu",
    norm: LayerNorm = NORM,
    bias: bool = False,
    ffn_bias: bool = False,
    dropout: float = 0.0,
    head: Part | None = MASKED_TOKENS,
) -> Model:
    """The architecture. full: every how many layers one sees everything, or which ones do; window: how far the others
    see either way, the token itself included. A Head is tied to the embedding. Trunks begin as theirs: 0.02, residual
    outputs divided by the square root of their number."""
    everything = full if isinstance(full, tuple) else tuple(i % full == 0 for i in range(layers))
    if len(everything) != layers:
        raise SpecError(f"modernbert: full={full} names {len(everything)} layers of {layers}")
    ffn = pre_norm("ffn", FeedForward(hidden, activation, gated=True, bias=ffn_bias), norm)

    def block(layer: int) -> Block:
        position, near = (rope, None) if everything[layer] else (local_rope, window)
        attention = Attention(heads, causal=False, window=near, position=position, bias=bias, dropout=dropout)
        return Block((Sublayer("attn", attention, pre=norm if layer else None, dropout=dropout), ffn))

    trunk = Trunk(Embed(vocab, norm=norm), tuple(map(block, range(layers))), norm)
    return Model(dim, encoder=trunk, head=head, tied=isinstance(head, Head), init=Init(0.02, residual="depth"))


SIZES: dict[str, dict[str, Any]] = {
    "modernbert-base": {"dim": 768, "layers": 22, "heads": 12, "hidden": 1152},
    "modernbert-large": {"dim": 1024, "layers": 28, "heads": 16, "hidden": 2624},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 3, "heads": 4, "hidden": 48, "vocab": 97, "full": 2, "window": 3}
EXEMPT: dict[str, str] = {
    "incremental": "every token sees those after it, so none can be answered before they are known"
}

ENCODER: list[Row] = [
    *(
        row
        for kind in ("weight", "bias")
        for row in (
            Row(
                f"layers.{{}}.attn.Wqkv.{kind}",
                tuple(f"encoder.blocks.{{}}.attn.op.{name}.{kind}" for name in "qkv"),
                stacked(3),
            ),
            Row(
                f"layers.{{}}.mlp.Wi.{kind}",
                (f"encoder.blocks.{{}}.ffn.op.gate.{kind}", f"encoder.blocks.{{}}.ffn.op.up.{kind}"),
                stacked(2),
            ),
        )
    ),
    *rows(
        [
            ("embeddings.tok_embeddings", "encoder.embed.tokens"),
            ("embeddings.norm", "encoder.embed.norm"),
            ("layers.{}.attn_norm", "encoder.blocks.{}.attn.pre"),
            ("layers.{}.attn.Wo", "encoder.blocks.{}.attn.op.out"),
            ("layers.{}.mlp_norm", "encoder.blocks.{}.ffn.pre"),
            ("layers.{}.mlp.Wo", "encoder.blocks.{}.ffn.op.down"),
            ("final_norm", "encoder.norm"),
        ]
    ),
]
HEAD = rows(
    [
        ("head.dense", "head.before.dense"),
        ("head.norm", "head.before.norm"),
        ("decoder", "head"),
        ("classifier", "head.out"),
    ]
)


def NAMES(model: Model) -> list[Row]:
    """The table of a spec: a model without a head has no prefix."""
    return ENCODER if model.head is None else prefixed("model.", ENCODER) + HEAD


PREFIX = ""
IGNORED: tuple[str, ...] = ()


def _head(config: Config, suffix: str, norm: LayerNorm) -> Part | None:
    activation = config.choose("classifier_activation", ACTIVATIONS, "gelu")
    before = Transform(activation, norm, bias=config("classifier_bias", False))
    dropped, pool = config("classifier_dropout", 0.0), config.choose("classifier_pooling", POOLS, "cls")
    decoder_bias = config("decoder_bias", True)
    if suffix == "ForMaskedLM":
        config.fix("tie_word_embeddings", True)
        return Head(bias=decoder_bias, before=before)
    if suffix == "ForQuestionAnswering":
        return spans(config, before, dropped)
    if suffix == "Model":
        return None
    return Classifier(
        config.classes(), pool if suffix == "ForSequenceClassification" else None, before, dropout=dropped
    )


def _read(suffix: str, values: Mapping[str, Any]) -> Model:
    """The spec of a config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    layers, heads, dim = (
        config.layers("num_hidden_layers"), config.count("num_attention_heads"), config.count("hidden_size"),
    )  # fmt: skip
    every = config.count("global_attn_every_n_layers", 3)
    kinds = config("layer_types", [FULL if i % every == 0 else LOCAL for i in range(layers)])
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (FULL, LOCAL) for kind in kinds):
        raise SpecError(f"{config.kind}: layer_types does not say {FULL} or {LOCAL} for each of {layers} layers")
    ropes = config.table("rope_parameters")
    thetas = {FULL: config("global_rope_theta", 160000.0), LOCAL: config("local_rope_theta", 10000.0)}
    longest = {"max_position_embeddings": config.count("max_position_embeddings", 8192)}
    rope, local = (
        rope_from_hf(
            longest | {"rope_parameters": {"rope_theta": thetas[kind]} | (ropes.get(kind) or {})}, dim // heads
        )
        for kind in (FULL, LOCAL)
    )
    norm = LayerNorm(config("norm_eps", 1e-5), bias=config("norm_bias", False))
    model = modernbert(
        dim,
        layers,
        heads,
        config.count("intermediate_size"),
        config.count("vocab_size"),
        full=tuple(kind == FULL for kind in kinds),
        window=1 + config.count("local_attention", 128) // 2,
        rope=rope,
        local_rope=local,
        activation=config.choose("hidden_activation", ACTIVATIONS, "gelu"),
        norm=norm,
        bias=config("attention_bias", False),
        ffn_bias=config("mlp_bias", False),
        dropout=config("attention_dropout", 0.0),
        head=_head(config, suffix, norm),
    ).override(**{
        "encoder.embed.dropout": config("embedding_dropout", 0.0),
        "encoder.blocks.*.ffn.op.dropout": config("mlp_dropout", 0.0),
    })  # fmt: skip
    config.done("tie_word_embeddings", "deterministic_flash_attn", "sparse_prediction", "sparse_pred_ignore_index",
                "initializer_cutoff_factor", "cls_token_id", "reference_compile", "repad_logits_with_grad",
                "position_embedding_type", "gradient_checkpointing", "layer_norm_eps")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    blocks, embed = model.find("encoder.blocks"), model.find("encoder.embed")
    attention, ffn = model.find("encoder.blocks.0.attn.op"), model.find("encoder.blocks.0.ffn.op")
    local = next((b.sublayers[0].op for b in blocks if b.sublayers[0].op.window), attention.replace(window=65))
    full = next((b.sublayers[0].op for b in blocks if not b.sublayers[0].op.window), attention)
    head, head_size = model.head, model.dim // attention.heads
    config: dict[str, Any] = {
        "model_type": "modernbert",
        "hidden_size": model.dim,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": attention.heads,
        "intermediate_size": ffn.hidden,
        "vocab_size": embed.vocab,
        "layer_types": [LOCAL if block.sublayers[0].op.window else FULL for block in blocks],
        "local_attention": 2 * (local.window - 1),
        "rope_parameters": {
            kind: rope_to_hf(op.position, head_size)["rope_parameters"] for kind, op in ((FULL, full), (LOCAL, local))
        },
        "hidden_activation": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "norm_eps": embed.norm.eps,
        "norm_bias": embed.norm.bias,
        "attention_bias": attention.bias,
        "mlp_bias": ffn.bias,
        "attention_dropout": attention.dropout,
        "embedding_dropout": embed.dropout,
        "mlp_dropout": ffn.dropout,
        # Read as token ids by the embedding, so they have to lie in the vocabulary.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
    }
    if head is None:
        return config | {"architectures": ["ModernBertModel"]}
    before: Any = model.find("head.before")
    config |= {
        "classifier_activation": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[before.activation],
        "classifier_bias": before.bias,
    }
    if isinstance(head, Head):
        return config | {"architectures": ["ModernBertForMaskedLM"], "decoder_bias": head.bias}
    assert isinstance(head, Classifier | Spans)
    config["classifier_dropout"] = head.dropout
    if isinstance(head, Spans):
        return config | {"architectures": ["ModernBertForQuestionAnswering"]}
    config |= labels(head.classes)
    if head.pool is None:
        return config | {"architectures": ["ModernBertForTokenClassification"]}
    pool = {ours: theirs for theirs, ours in POOLS.items()}[head.pool]
    return config | {"architectures": ["ModernBertForSequenceClassification"], "classifier_pooling": pool}


FULL, LOCAL = "full_attention", "sliding_attention"
POOLS: dict[str, Pool] = {"cls": "first", "mean": "mean"}
HF = {f"ModernBert{suffix}": partial(_read, suffix) for suffix in SUFFIXES}
