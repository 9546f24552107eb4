"""ViT, the Vision Transformer (Dosovitskiy et al. 2020, arXiv 2010.11929).

A pre-norm encoder over patches of an image, with biases everywhere, exact GELU and a learned grid of positions, which
is resampled for images of another size. A class token in front, read by the head, stands for the image.

>>> vit(768, 12, 12).parameters()
86567656
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Change, Row, rows
from ..nn.attention import Attention
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Classifier
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.patches import Grid, Patches
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import MAX_COUNT, Config, labels, without_head

Sides = int | tuple[int, int]


def vit(
    dim: int,
    layers: int,
    heads: int,
    classes: int = 1000,
    image: Sides = 224,
    patch: Sides = 16,
    *,
    hidden: int | None = None,
    channels: int = 3,
    activation: Activation = "gelu",
    eps: float = 1e-6,
    qkv_bias: bool = True,
    dropout: float = 0.0,
) -> Model:
    """The architecture; hidden None is 4 · dim, image and patch are sides in pixels, or (height, width).

    Initialised near the authors' code: matrices by their width, class token and positions at 0.02.
    """
    norm = LayerNorm(eps)
    attention = Attention(heads, causal=False, bias=qkv_bias, out_bias=True)
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((pre_norm("attn", attention, norm, dropout), pre_norm("ffn", ffn, norm, dropout)))
    embed = Patches(sides(image), sides(patch), channels, class_token=True, position=Grid(), dropout=dropout)
    head = Classifier(classes, pool="first")
    return Model(dim, encoder=Trunk(embed, repeat(block, layers), norm), head=head, init=Init("fan_in"))


def sides(size: Any) -> Any:
    """(height, width) of a size that may be one number."""
    return (size, size) if isinstance(size, int) else tuple(size)


SIZES: dict[str, dict[str, Any]] = {
    "vit-s16": {"dim": 384, "layers": 12, "heads": 6},
    "vit-b16": {"dim": 768, "layers": 12, "heads": 12},
    "vit-l16": {"dim": 1024, "layers": 24, "heads": 16},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "classes": 5, "image": 12, "patch": 4}
EXEMPT: dict[str, str] = {
    "incremental": "an image is seen whole: no patch comes before another",
    "packing": "a row is one image: its patches have their places in that image's grid",
    "padding": "images of one batch have one size, so no row is longer than another",
}

ALONE = Change(lambda ts: [ts[0].flatten(0, -2)[0]], lambda ts: [ts[0][None, None]])  # a vector, stored as [1, 1, D]
TABLE = Change(lambda ts: [ts[0][0]], lambda ts: [ts[0][None]])  # a table, stored as [1, rows, D]

NAMES: list[Row] = [
    Row("vit.embeddings.cls_token", "encoder.embed.class_token", ALONE),
    Row("vit.embeddings.position_embeddings", "encoder.embed.position", TABLE),
    *rows(
        [
            ("vit.embeddings.patch_embeddings.projection", "encoder.embed"),
            ("vit.encoder.layer.{}.layernorm_before", "encoder.blocks.{}.attn.pre"),
            ("vit.encoder.layer.{}.attention.attention.query", "encoder.blocks.{}.attn.op.q"),
            ("vit.encoder.layer.{}.attention.attention.key", "encoder.blocks.{}.attn.op.k"),
            ("vit.encoder.layer.{}.attention.attention.value", "encoder.blocks.{}.attn.op.v"),
            ("vit.encoder.layer.{}.attention.output.dense", "encoder.blocks.{}.attn.op.out"),
            ("vit.encoder.layer.{}.layernorm_after", "encoder.blocks.{}.ffn.pre"),
            ("vit.encoder.layer.{}.intermediate.dense", "encoder.blocks.{}.ffn.op.up"),
            ("vit.encoder.layer.{}.output.dense", "encoder.blocks.{}.ffn.op.down"),
            ("vit.layernorm", "encoder.norm"),
            ("classifier", "head.out"),
        ]
    ),
]
PREFIX = "vit."
IGNORED = ("vit.pooler.dense.weight", "vit.pooler.dense.bias")  # of ViTModel, beside the hidden vectors


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a ViTForImageClassification's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    model = vit(
        config.count("hidden_size", 768),
        config.layers("num_hidden_layers"),
        config.count("num_attention_heads", 12),
        config.classes(),
        two(config, "image_size", 224),
        two(config, "patch_size", 16),
        hidden=config.count("intermediate_size", 3072),
        channels=config.count("num_channels", 3),
        activation=config.choose("hidden_act", ACTIVATIONS, "gelu"),
        eps=config("layer_norm_eps", 1e-12),
        qkv_bias=config("qkv_bias", True),
        dropout=config("hidden_dropout_prob", 0.0),
    ).override(**{"encoder.blocks.*.attn.op.dropout": config("attention_probs_dropout_prob", 0.0)})
    config.done("encoder_stride", "pooler_output_size", "pooler_act")
    return model


def two(config: Config, key: str, default: int) -> tuple[int, int]:
    """(height, width): a number for both, or a list of two."""
    value = sides(value) if isinstance(value := config(key, default), int | list | tuple) else ()
    if len(value) != 2 or not all(type(side) is int and 1 <= side <= MAX_COUNT for side in value):
        raise SpecError(f"{config.kind}: {key}={config(key, default)!r} is neither a side in pixels nor two of them")
    return value


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = model.find("encoder.blocks.0.attn.op"), model.find("encoder.blocks.0.ffn.op")
    embed = model.find("encoder.embed")
    classes = {} if model.head is None else labels(model.find("head.classes"))
    return {
        "architectures": ["ViTModel" if model.head is None else "ViTForImageClassification"],
        "model_type": "vit",
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("encoder.blocks")),
        "num_attention_heads": attention.heads,
        "intermediate_size": ffn.hidden,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "layer_norm_eps": model.find("encoder.norm.eps"),
        "image_size": one(embed.image),
        "patch_size": one(embed.patch),
        "num_channels": embed.channels,
        "qkv_bias": attention.bias,
        "hidden_dropout_prob": embed.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        **classes,
    }


def one(size: tuple[int, int]) -> int | list[int]:
    """A size as their configs write it."""
    return size[0] if size[0] == size[1] else list(size)


ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",  # the later name of one function is the one that is written
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
HF = {"ViTForImageClassification": from_hf, "ViTModel": without_head(from_hf)}
