"""Actions as language: images, an instruction and joint angles in one stream (RT-2, Brohan et al. 2023, arXiv
2307.15818).

A causal decoder of the Llama line. An image's patches enter through one linear map and stand where the id PATCH is; an
angle is one of 256 bins, whose ids follow those of text. The stream is causal throughout, as in PaLM-E, RT-2's decoder
(arXiv 2303.03378), and OpenVLA (2406.09246); with Step.prefix images see themselves both ways, as in PaliGemma. RT-2
and OpenVLA put trained vision towers before the patches, which are not here.

>>> actions(256, 6, 8, 8, hidden=768, vocab=512, image=64, patch=8).parameters()
5443072
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..nn.embed import Embed, EmbedOp
from ..nn.initialise import Init
from ..nn.op import Context
from ..nn.patches import Grid, Patches
from ..nn.rope import Rope
from ..nn.sublayer import Model
from ..step import Step
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf
from .llama import ROPE, llama
from .vit import Sides, sides

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "actions", "to_hf"]

PATCH = -1
"""The id where a patch of an image stands; it is in no vocabulary."""


class ImagesAndTokens(Embed):
    """One stream of token ids and patches: each id PATCH takes the next patch of the row's images, in their order."""

    patches: Patches | None = None
    """How images become patches: without tokens before them."""

    def check(self) -> None:
        super().check()
        self.require(self.patches is not None and self.patches.first == 0, "needs patches, with no tokens before them")
        self.require(self.position is None and not self.types, "positions are the layers' own, and there are no types")

    def build(self, dim: int, context: Context) -> ImagesAndTokensOp:
        return ImagesAndTokensOp(self, dim, context)


class ImagesAndTokensOp(EmbedOp):
    """{"ids": [B, L] int64, "images": [B, C, H, W] or [B, I, C, H, W] floating}, or ids alone → ([B, L, D], step).

    Packed documents have their images in the order of the row. A row may have more patches than places for them; with
    fewer it raises InputError, on CPU, as for ids outside the vocabulary.
    """

    def __init__(self, spec: ImagesAndTokens, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        assert spec.patches is not None
        self.patches = spec.patches.build(dim, context)

    def forward(self, ids: Tensor | dict[str, Tensor], step: Step, shared: Tensor | None = None) -> tuple[Tensor, Step]:
        if isinstance(ids, Tensor):
            return super().forward(ids, step, shared)
        if ids.keys() != {"ids", "images"}:
            raise InputError(f'inputs are ids, or {{"ids", "images"}}, got {sorted(ids)}')
        ids, images = ids["ids"], ids["images"]
        if images.dim() not in (4, 5) or len(images) != len(ids):
            raise InputError(
                f"images are [B, C, H, W] or [B, I, C, H, W], got {list(images.shape)} for {len(ids)} rows"
            )
        here = ids == PATCH
        x, step = super().forward(ids.masked_fill(here, 0), step, shared)
        patches, _ = self.patches(images.flatten(0, -4), step)
        patches = patches.reshape(len(ids), -1, x.shape[-1])  # [B, I · P, D]
        number = here.long().cumsum(1)
        if not torch.compiler.is_compiling() and ids.device.type == "cpu" and number.numel():
            most = int(number.max())
            if most > patches.shape[1]:
                raise InputError(f"a row has {most} places for patches, and its images have {patches.shape[1]}")
        index = (number - 1).clamp(min=0, max=patches.shape[1] - 1)
        patches = patches.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
        return torch.where(here[..., None], patches, x), step


def actions(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    image: Sides = 224,
    patch: Sides = 14,
    rope: Rope = ROPE,
    *,
    channels: int = 3,
    eps: float = 1e-5,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; vocab counts the ids of text and the bins of actions behind them.

    image and patch are sides in pixels, or (height, width). A learned grid tells places in an image, and rotary
    positions count the whole stream. RT-2 begins from trained models; new ones here begin with matrices by their width
    and, untied, with tables at 0.5, so that places and words are not small beside patches of pixels from −1 to 1.
    """
    trunk = llama(dim, layers, heads, kv_heads, hidden, vocab, rope, eps=eps, dropout=dropout, tied=tied)
    patches = Patches(sides(image), sides(patch), channels, position=Grid())
    init = Init("fan_in", residual="depth", embedding=None if tied else 0.5)
    return trunk.override(**{"decoder.embed": ImagesAndTokens(vocab, patches=patches), "init": init})


def images_first(model: Model, ids: Tensor, images: Tensor) -> dict[str, Tensor]:
    """What the model reads: before ids [B, L], a place for each patch of the row's images [B, I, C, H, W].

    Raises InputError for a model without patches.
    """
    front = model.embedding
    if not isinstance(front, ImagesAndTokens) or front.patches is None:
        raise InputError("the model reads no images beside its tokens: take the recipe actions")
    height, width = front.patches.patch
    places = images.shape[1] * (images.shape[-2] // height) * (images.shape[-1] // width)
    return {"ids": F.pad(ids, (places, 0), value=PATCH), "images": images}


SIZES: dict[str, dict[str, Any]] = {
    "actions-small": {"dim": 256, "layers": 6, "heads": 8, "kv_heads": 8, "hidden": 768, "vocab": 512,
                      "image": 64, "patch": 8},
    # OpenVLA's trunk, Llama 2's; its actions take 256 ids of text over, and here they have their own
    "actions-7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocab": 32000 + 256},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 97, "image": 4,
                        "patch": 4}  # fmt: skip
EXEMPT: dict[str, str] = {}
