"""DINOv2 (Oquab et al. 2023, arXiv 2304.07193), and with registers (Darcet et al. 2023, arXiv 2309.16588).

A ViT whose residual branches are scaled by a learned vector each (LayerScale, arXiv 2103.17239); the giant one is
gated (SwiGLU). Trained at 518 pixels, the grid of positions is resampled for other sizes. Registers are tokens between
the class token and the patches that stand for no place. A classifier reads the class token and the patches' mean.

>>> dinov2(384, 12, 6).parameters()
22056576
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..names import Row, rows, stacked
from ..nn.attention import Attention
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.op import Context, Op, Part
from ..nn.patches import Grid, Patches
from ..nn.projection import Projection
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from ..state import State
from ..step import Step
from .config import Config, labels, without_head
from .vit import ACTIVATIONS, ALONE, EXEMPT, TABLE, Sides, one, sides, two

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "dinov2", "to_hf"]


class LayerScale(Part):
    """A learned factor for each channel: a place that scales a residual branch."""

    start: float = 1.0
    """What every factor is at first; small ones (1e-5) let a deep model begin near the identity."""

    def build(self, dim: int, context: Context) -> LayerScaleOp:
        return LayerScaleOp(self, dim)


class LayerScaleOp(Op):
    """[…, D] → […, D]."""

    def __init__(self, spec: LayerScale, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(dim))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.fill_(self.spec.start)

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        return x * self.weight


class ClassAndMean(Part):
    """Logits of classes from the class token and the mean of the patches, side by side."""

    classes: int
    """C."""
    first: int = 1
    """Where the patches begin: how many tokens stand before them."""

    def check(self) -> None:
        self.require(self.classes > 0, f"classes must be above 0, got {self.classes}")

    @property
    def pool(self) -> str:
        """As of other heads that pool: every token has the answer of its image."""
        return "class and mean"

    def build(self, dim: int, context: Context) -> ClassAndMeanOp:
        return ClassAndMeanOp(self, dim)


class ClassAndMeanOp(nn.Module):
    """[B, L, D] → [B, L, C], the same for all L."""

    def __init__(self, spec: ClassAndMean, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.out = Projection(2 * dim, spec.classes)

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        pooled = torch.cat([x[:, 0], x[:, self.spec.first :].mean(1)], -1)
        return self.out(pooled)[:, None].expand(-1, x.shape[1], -1)


def dinov2(
    dim: int,
    layers: int,
    heads: int,
    image: Sides = 518,
    patch: Sides = 14,
    *,
    classes: int | None = None,
    hidden: int | None = None,
    gated: bool = False,
    registers: int = 0,
    mask_token: bool = True,
    channels: int = 3,
    activation: Activation = "gelu",
    eps: float = 1e-6,
    qkv_bias: bool = True,
    start: float = 1e-5,
    dropout: float = 0.0,
) -> Model:
    """The architecture; hidden None is 4 · dim, image and patch are sides in pixels, or (height, width).

    classes None: it answers hidden vectors [B, L, D]. start: the first value of LayerScale.
    """
    norm, scale = LayerNorm(eps), LayerScale(start)
    attention = Attention(heads, causal=False, bias=qkv_bias, out_bias=True)
    ffn = FeedForward(hidden or 4 * dim, activation, gated, bias=True)
    block = Block((Sublayer("attn", attention, norm, scale=scale), Sublayer("ffn", ffn, norm, scale=scale)))
    embed = Patches(
        sides(image), sides(patch), channels,
        class_token=True, registers=registers, mask_token=mask_token, position=Grid(antialias=registers > 0),
        dropout=dropout,
    )  # fmt: skip
    head = None if classes is None else ClassAndMean(classes, embed.first)
    return Model(dim, encoder=Trunk(embed, repeat(block, layers), norm), head=head, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "dinov2-s": {"dim": 384, "layers": 12, "heads": 6},
    "dinov2-b": {"dim": 768, "layers": 12, "heads": 12},
    "dinov2-l": {"dim": 1024, "layers": 24, "heads": 16},
    "dinov2-g": {"dim": 1536, "layers": 40, "heads": 24, "hidden": 4096, "gated": True, "activation": "silu"},
}
SIZES |= {f"{name}-registers": size | {"registers": 4} for name, size in SIZES.items()}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "classes": 5, "image": 12, "patch": 4}

PREFIX = ""
IGNORED = ()


def NAMES(model: Model) -> list[Row]:
    """The table of a spec: the base classes' names have no prefix, and gated layers others than plain ones."""
    embed, ffn = model.find("encoder.embed"), model.find("encoder.blocks.0.ffn.op")
    prefix = "" if model.head is None else "dinov2_with_registers." if embed.registers else "dinov2."
    layer, block = f"{prefix}encoder.layer.{{}}.", "encoder.blocks.{}."
    return [
        Row(f"{prefix}embeddings.cls_token", "encoder.embed.class_token", ALONE),
        Row(f"{prefix}embeddings.mask_token", "encoder.embed.mask_token", TABLE),
        Row(f"{prefix}embeddings.register_tokens", "encoder.embed.registers", TABLE),
        Row(f"{prefix}embeddings.position_embeddings", "encoder.embed.position", TABLE),
        Row(f"{layer}layer_scale1.lambda1", f"{block}attn.scale.weight"),
        Row(f"{layer}layer_scale2.lambda1", f"{block}ffn.scale.weight"),
        *rows(
            [
                (f"{prefix}embeddings.patch_embeddings.projection", "encoder.embed"),
                (f"{layer}norm1", f"{block}attn.pre"),
                (f"{layer}attention.attention.query", f"{block}attn.op.q"),
                (f"{layer}attention.attention.key", f"{block}attn.op.k"),
                (f"{layer}attention.attention.value", f"{block}attn.op.v"),
                (f"{layer}attention.output.dense", f"{block}attn.op.out"),
                (f"{layer}norm2", f"{block}ffn.pre"),
                (f"{layer}mlp.{'weights_out' if ffn.gated else 'fc2'}", f"{block}ffn.op.down"),
                (f"{prefix}layernorm", "encoder.norm"),
                ("classifier", "head.out"),
            ]
        ),
        *(_up(layer, f"{block}ffn.op.", kind, ffn.gated) for kind in ("weight", "bias")),
    ]


def _up(theirs: str, ours: str, kind: str, gated: bool) -> Row:
    if gated:
        return Row(f"{theirs}mlp.weights_in.{kind}", (f"{ours}gate.{kind}", f"{ours}up.{kind}"), stacked(2))
    return Row(f"{theirs}mlp.fc1.{kind}", f"{ours}up.{kind}")


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Dinov2ForImageClassification's config.json. Raises SpecError for what is not modelled."""
    return _read(Config(values), 0, 14)


def registers_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Dinov2WithRegistersForImageClassification's config.json. Raises SpecError likewise."""
    config = Config(values)
    return _read(config, config.count("num_register_tokens", 4), 16)


def _read(config: Config, registers: int, patch: int) -> Model:
    config.fix("drop_path_rate", 0.0)
    dim, gated = config.count("hidden_size", 768), config("use_swiglu_ffn", False)
    model = dinov2(
        dim,
        config.layers("num_hidden_layers"),
        config.count("num_attention_heads", 12),
        two(config, "image_size", 224),
        two(config, "patch_size", patch),
        classes=config.classes(),
        hidden=_hidden(dim, config.count("mlp_ratio", 4, most=1024), gated),
        gated=gated,
        registers=registers,
        mask_token=registers > 0 or config("use_mask_token", True),
        channels=config.count("num_channels", 3),
        activation="silu" if gated else config.choose("hidden_act", ACTIVATIONS, "gelu"),
        eps=config("layer_norm_eps", 1e-6),
        qkv_bias=config("qkv_bias", True),
        start=config("layerscale_value", 1.0),
        dropout=config("hidden_dropout_prob", 0.0),
    ).override(**{"encoder.blocks.*.attn.op.dropout": config("attention_probs_dropout_prob", 0.0)})
    config.done("hidden_act", "apply_layernorm", "reshape_hidden_states", "out_features", "out_indices", "stage_names")
    return model


def _hidden(dim: int, ratio: int, gated: bool) -> int:
    """The inner width: gated, two thirds of the plain one, rounded up to a multiple of 8."""
    return (dim * ratio * 2 // 3 + 7) // 8 * 8 if gated else dim * ratio


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = model.find("encoder.blocks.0.attn.op"), model.find("encoder.blocks.0.ffn.op")
    embed = model.find("encoder.embed")
    ratio = next((r for r in range(1, 65) if _hidden(model.dim, r, ffn.gated) == ffn.hidden), None)
    if ratio is None:
        raise SpecError(f"dinov2: no mlp_ratio gives {ffn.hidden} inner channels of {model.dim}")
    kind = "WithRegisters" if embed.registers else ""
    own = {"num_register_tokens": embed.registers} if kind else {"use_mask_token": embed.mask_token}
    return {
        "architectures": [f"Dinov2{kind}{'Model' if model.head is None else 'ForImageClassification'}"],
        "model_type": "dinov2_with_registers" if kind else "dinov2",
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("encoder.blocks")),
        "num_attention_heads": attention.heads,
        "mlp_ratio": ratio,
        "hidden_act": "gelu" if ffn.gated else {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "use_swiglu_ffn": ffn.gated,
        "layerscale_value": model.find("encoder.blocks.0.attn.scale.start"),
        "layer_norm_eps": model.find("encoder.norm.eps"),
        "image_size": one(embed.image),
        "patch_size": one(embed.patch),
        "num_channels": embed.channels,
        "qkv_bias": attention.bias,
        "hidden_dropout_prob": embed.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        **own,
        **({} if model.head is None else labels(model.find("head.classes"))),
    }


HF = {
    "Dinov2ForImageClassification": from_hf,
    "Dinov2Model": without_head(from_hf),
    "Dinov2WithRegistersForImageClassification": registers_from_hf,
    "Dinov2WithRegistersModel": without_head(registers_from_hf),
}
