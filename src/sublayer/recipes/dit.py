"""DiT, the diffusion transformer (Peebles and Xie 2022, arXiv 2212.09748).

A transformer over patches of a noised image (or of its latent) that answers noise of the image's shape. The time and
the class are one vector, from which each layer draws the shift and scale of its norms and the gate of its branches
(adaLN); all gates begin at zero, so that a new model passes its input through.

>>> dit(1152, 28, 16).parameters()
674834720
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, SpecError, WeightsError
from ..names import Change, Row, Tensors, rows, stacked
from ..nn.attention import Attention
from ..nn.constant import constant
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.op import Context, Op, Part
from ..nn.patches import Patches
from ..nn.position import Sinusoidal
from ..nn.projection import Projection, table
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from ..state import State
from ..step import Step
from .config import Config
from .vit import EXEMPT, Sides, one, sides, two

__all__ = ["EXEMPT", "FILE", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "dit", "to_hf"]


class Zero(Op):
    """x Wᵀ + b, beginning as zero: [B, D] → [B, F]."""

    matrices = ("weight",)

    def __init__(self, dim: int, out: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(out, dim)), nn.Parameter(torch.empty(out))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.zero_()
        self.bias.zero_()

    def forward(self, x: Tensor, step: Step | None = None, state: State | None = None) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class AdaptiveNorm(Part):
    """LayerNorm without parameters of its own, then x · (1 + scale) + shift, both linear in Step.condition."""

    eps: float = 1e-6
    """Added to the variance."""

    def build(self, dim: int, context: Context) -> AdaptiveNormOp:
        return AdaptiveNormOp(self, dim)


class AdaptiveNormOp(nn.Module):
    """[B, L, D] → [B, L, D]."""

    def __init__(self, spec: AdaptiveNorm, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.shift, self.scale = Zero(dim, dim), Zero(dim, dim)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        shift, scale = (change(_condition(step))[:, None] for change in (self.shift, self.scale))
        return F.layer_norm(x, x.shape[-1:], eps=self.spec.eps) * (1 + scale) + shift


class AdaptiveGate(Part):
    """x · gate, linear in Step.condition: a place that scales a residual branch."""

    def build(self, dim: int, context: Context) -> AdaptiveGateOp:
        return AdaptiveGateOp(dim)


class AdaptiveGateOp(nn.Module):
    """[B, L, D] → [B, L, D]."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = Zero(dim, dim)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return x * self.gate(_condition(step))[:, None]


def _condition(step: Step) -> Tensor:
    assert step.condition is not None
    return step.condition


class Noised(Part):
    """Patches of a noised image, and Step.condition: SiLU of a vector for the time plus one for the class."""

    patches: Patches
    """The image's."""
    classes: int
    """Rows of the class table, but for the last, which stands for no class (classifier-free guidance)."""
    waves: int = 256
    """How many cosines and sines of the time the first matrix reads."""
    theta: float = 10000.0
    """The longest wavelength of the time is 2π · theta, as good as reached by the last wave, or exactly."""
    reached: bool = False
    """Whether it is reached exactly, as in diffusers, and not one wave later, as in the authors' code."""

    def check(self) -> None:
        self.require(self.classes >= 0, f"classes must not be below 0, got {self.classes}")
        self.require(self.waves > 2 and self.waves % 2 == 0, f"waves is an even number above 2, got {self.waves}")

    @property
    def frequencies(self) -> tuple[float, ...]:
        """[waves / 2], falling from 1."""
        half = self.waves // 2
        return tuple(self.theta ** (-i / (half - self.reached)) for i in range(half))

    def build(self, dim: int, context: Context) -> NoisedOp:
        return NoisedOp(self, dim, context)


class NoisedOp(nn.Module):
    """{"images": [B, C, H, W], "time": [B], "classes": [B] int64} → ([B, P, D], step with its condition [B, D]).

    time may be whole steps or parts of them. Without "classes" no class is meant. Raises InputError for what does not
    fit.
    """

    def __init__(self, spec: Noised, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.patches = spec.patches.build(dim, context)
        self.time_in, self.time_out = Projection(spec.waves, dim), Projection(dim, dim)
        self.classes = table(spec.classes + 1, dim)

    def forward(self, inputs: dict[str, Tensor], step: Step) -> tuple[Tensor, Step]:
        if not isinstance(inputs, dict) or not {"images", "time"} <= set(inputs) <= {"images", "time", "classes"}:
            raise InputError('a diffusion model takes {"images": …, "time": …, "classes": …}')
        x, step = self.patches(inputs["images"], step)
        time = inputs["time"]
        classes = inputs.get("classes", torch.full_like(time, self.spec.classes, dtype=torch.long))
        for name, given in (("time", time), ("classes", classes)):
            if given.shape != x.shape[:1]:
                raise InputError(f"{name} is one number an image, [{len(x)}], got {list(given.shape)}")
        if classes.is_floating_point() or classes.dtype == torch.bool:
            raise InputError(f"classes are whole numbers, got {classes.dtype}")
        if not torch.compiler.is_compiling() and classes.device.type == "cpu":
            bad = classes[(classes < 0) | (classes > self.spec.classes)]
            if len(bad):
                raise InputError(f"class {int(bad[0])} is none of 0 … {self.spec.classes}, the last being no class")
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        angles = time.to(wide)[:, None] * constant(self.spec.frequencies, time, wide)
        waves = torch.cat([angles.cos(), angles.sin()], -1).to(x.dtype)
        condition = self.time_out(F.silu(self.time_in(waves))) + self.classes(classes)
        return x, step.replace(condition=F.silu(condition))


class Unpatch(Part):
    """Patches back to an image: each vector becomes the pixels of its patch."""

    channels: int
    """C' of the answer: twice the image's where a variance is answered beside the noise."""
    patch: tuple[int, int]
    """(height, width) of a patch, in pixels."""
    grid: tuple[int, int]
    """(rows, columns) of an image of the trained size; one with another number of patches is a square of them."""

    def build(self, dim: int, context: Context) -> UnpatchOp:
        return UnpatchOp(self, dim)


class UnpatchOp(nn.Module):
    """[B, P, D] → [B, C', H, W]."""

    def __init__(self, spec: Unpatch, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.out = Zero(dim, spec.patch[0] * spec.patch[1] * spec.channels)

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        (h, w), (rows, columns) = self.spec.patch, self.spec.grid
        if x.shape[1] != rows * columns:
            rows = columns = isqrt(x.shape[1])
        if rows * columns != x.shape[1]:
            raise InputError(f"{x.shape[1]} patches are neither a square nor the trained {self.spec.grid}")
        pixels = self.out(x).view(len(x), rows, columns, h, w, -1)
        return pixels.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, rows * h, columns * w)


def dit(
    dim: int,
    layers: int,
    heads: int,
    image: Sides = 32,
    patch: Sides = 2,
    *,
    channels: int = 4,
    classes: int = 1000,
    learn_sigma: bool = True,
    head_size: int | None = None,
    eps: float = 1e-6,
    ffn_eps: float | None = None,
    bias: bool = True,
    reached: bool = False,
) -> Model:
    """The architecture; image and patch are sides in pixels (of the latent), or (height, width).

    learn_sigma: the answer has a second half of channels, for the variance. ffn_eps: that of the norm before the
    feed-forward layer; None: eps. Initialised as the authors' code: what adaLN draws, the gates and the head at zero,
    class vectors at 0.02; matrices by their width.
    """
    norm, gate = AdaptiveNorm(eps), AdaptiveGate()
    attention = Attention(heads, head_size=head_size, causal=False, bias=bias, out_bias=True)
    ffn = FeedForward(4 * dim, "gelu_tanh", bias=True)
    block = Block((
        Sublayer("attn", attention, norm, scale=gate),
        Sublayer("ffn", ffn, norm if ffn_eps is None else AdaptiveNorm(ffn_eps), scale=gate),
    ))  # fmt: skip
    patches = Patches(sides(image), sides(patch), channels, position=Sinusoidal(layout="half"))
    return Model(
        dim,
        encoder=Trunk(Noised(patches, classes, reached=reached), repeat(block, layers), AdaptiveNorm()),
        head=Unpatch(channels * (1 + learn_sigma), patches.patch, patches.grid),
        init=Init("fan_in", embedding=0.02),
    )


SIZES: dict[str, dict[str, Any]] = {
    "dit-s2": {"dim": 384, "layers": 12, "heads": 6},
    "dit-b2": {"dim": 768, "layers": 12, "heads": 12},
    "dit-l2": {"dim": 1024, "layers": 24, "heads": 16},
    "dit-xl2": {"dim": 1152, "layers": 28, "heads": 16},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "image": 8, "patch": 2, "channels": 2, "classes": 5}
TINY |= {"reached": True}  # as diffusers has it

PREFIX = ""
IGNORED = ()
FILE = "diffusion_pytorch_model"


def NAMES(model: Model) -> list[Row]:
    """The table of a spec, by diffusers' names: there every layer holds a copy of what makes the condition."""
    block, theirs = "encoder.blocks.{}.", "transformer_blocks.{}."
    drawn = ("attn.pre.shift", "attn.pre.scale", "attn.scale.gate", "ffn.pre.shift", "ffn.pre.scale", "ffn.scale.gate")
    made = (
        ("timestep_embedder.linear_1.weight", "time_in.weight"),
        ("timestep_embedder.linear_1.bias", "time_in.bias"),
        ("timestep_embedder.linear_2.weight", "time_out.weight"),
        ("timestep_embedder.linear_2.bias", "time_out.bias"),
        ("class_embedder.embedding_table.weight", "classes.weight"),
    )
    layers = len(model.find("encoder.blocks"))
    same = copies(layers)
    return [
        *(
            Row(tuple(f"transformer_blocks.{i}.norm1.emb.{name}" for i in range(layers)), f"encoder.embed.{ours}", same)
            for name, ours in made
        ),
        *(
            Row(f"{theirs}norm1.linear.{kind}", tuple(f"{block}{name}.{kind}" for name in drawn), stacked(6))
            for kind in ("weight", "bias")
        ),
        *(
            Row(f"proj_out_1.{kind}", tuple(f"encoder.norm.{name}.{kind}" for name in ("shift", "scale")), stacked(2))
            for kind in ("weight", "bias")
        ),
        *rows(
            [
                ("pos_embed.proj", "encoder.embed.patches"),
                (f"{theirs}attn1.to_q", f"{block}attn.op.q"),
                (f"{theirs}attn1.to_k", f"{block}attn.op.k"),
                (f"{theirs}attn1.to_v", f"{block}attn.op.v"),
                (f"{theirs}attn1.to_out.0", f"{block}attn.op.out"),
                (f"{theirs}ff.net.0.proj", f"{block}ffn.op.up"),
                (f"{theirs}ff.net.2", f"{block}ffn.op.down"),
                ("proj_out_2", "head.out"),
            ]
        ),
    ]  # fmt: skip


def copies(count: int) -> Change:
    """Equal tensors of theirs are one of ours."""

    def into(theirs: Tensors) -> Tensors:
        first = theirs[0]
        if not first.is_meta and not all(torch.equal(first, other) for other in theirs):
            raise WeightsError("the layers of this DiT make their conditions differently: only one way is modelled")
        return [first]

    return Change(into, lambda ours: [ours[0].clone() for _ in range(count)])


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a DiTTransformer2DModel's config.json (diffusers). Raises SpecError for what is not modelled."""
    config = Config({"model_type": "dit"} | dict(values))
    config.fix("norm_type", "ada_norm_zero")
    config.fix("norm_elementwise_affine", False)
    config.fix("activation_fn", "gelu-approximate")
    config.fix("upcast_attention", False, True)  # of half precision alone
    config.fix("dropout", 0.0)
    heads, size = config.count("num_attention_heads", 16), config.count("attention_head_dim", 72)
    channels = config.count("in_channels", 4)
    answered = config.count("out_channels", channels)
    if answered not in (channels, 2 * channels):
        raise SpecError(f"dit: out_channels={answered} is neither in_channels nor twice that")
    model = dit(
        heads * size,
        config.layers("num_layers"),
        heads,
        two(config, "sample_size", 32),
        two(config, "patch_size", 2),
        channels=channels,
        classes=config.count("num_embeds_ada_norm", 1000),
        learn_sigma=answered != channels,
        ffn_eps=config("norm_eps", 1e-5),
        bias=config("attention_bias", True),
        reached=True,
    )
    config.done("_class_name", "_diffusers_version", "norm_num_groups")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    embed, attention = model.find("encoder.embed"), model.find("encoder.blocks.0.attn.op")
    return {
        "_class_name": "DiTTransformer2DModel",
        "num_attention_heads": attention.heads,
        "attention_head_dim": model.dim // attention.heads,
        "num_layers": len(model.find("encoder.blocks")),
        "in_channels": embed.patches.channels,
        "out_channels": model.find("head.channels"),
        "sample_size": one(embed.patches.image),
        "patch_size": one(embed.patches.patch),
        "num_embeds_ada_norm": embed.classes,
        "norm_eps": model.find("encoder.blocks.0.ffn.pre.eps"),
        "attention_bias": attention.bias,
        "activation_fn": "gelu-approximate",
        "norm_type": "ada_norm_zero",
    }


HF = {"DiTTransformer2DModel": from_hf}
