"""Frames: the front end for sound. Two convolutions over time, the second of which halves it (Whisper, 2212.04356).

B batch, T frames, F features of a frame, M = T / 2 vectors, D width.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..step import Step
from .initialise import Init, normal
from .op import Context, Part
from .position import Sinusoidal


class Frames(Part):
    """gelu(convolution) twice, each of kernel 3, the second of stride 2; then sinusoids are added."""

    features: int
    """F, the numbers a frame has (mel bands)."""
    length: int
    """The most vectors that it gives: half of the frames of the longest recording."""
    position: Sinusoidal = Sinusoidal(layout="half", reached=True)
    """What tells the places apart."""
    dropout: float = 0.0
    """Share of the result zeroed while training."""

    def check(self) -> None:
        self.require(self.features > 0 and self.length > 0, "features and length must be above 0")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> FramesOp:
        return FramesOp(self, dim)


class FramesOp(nn.Module):
    """frames [B, T, F] floating → ([B, ceil(T / 2), D], step). Step.segment marks padded frames, on the right, with 0.

    Raises InputError for frames of another shape or dtype, too many of them, and several recordings in a row.
    """

    def __init__(self, spec: Frames, dim: int) -> None:
        super().__init__()
        self.spec, self.dim = spec, dim
        self.first = Convolution(spec.features, dim, 1)
        self.second = Convolution(dim, dim, 2)

    def forward(self, frames: Tensor, step: Step) -> tuple[Tensor, Step]:
        self._check(frames, step)
        heard = None if step.segment is None else (step.segment != 0)[:, None]
        x = frames.to(self.first.weight.dtype).transpose(1, 2)
        for layer in (self.first, self.second):
            x = F.gelu(layer(x if heard is None else x.masked_fill(~heard, 0)))
        x = x.transpose(1, 2)
        pos = torch.arange(x.shape[1], device=x.device)
        x = x + self.spec.position.table(pos, self.dim, x.dtype)
        segment = None if step.segment is None else step.segment[:, ::2]
        return F.dropout(x, self.spec.dropout, self.training), step.replace(segment=segment, pos=None)

    def _check(self, frames: Tensor, step: Step) -> None:
        if frames.dim() != 3 or frames.shape[2] != self.spec.features or not frames.is_floating_point():
            raise InputError(
                f"frames are floating-point [B, T, {self.spec.features}], got {frames.dtype} {list(frames.shape)}"
            )
        if (frames.shape[1] + 1) // 2 > self.spec.length:
            raise InputError(f"{frames.shape[1]} frames are more than the model's {2 * self.spec.length}: cut them")
        if step.segment is not None and not torch.compiler.is_compiling():
            changes = step.segment[:, 1:] - step.segment[:, :-1]
            if bool((changes > 0).any() | ((changes < 0) & (step.segment[:, 1:] != 0)).any()):
                raise InputError("a row of frames is one recording, padded on the right")


class Convolution(nn.Conv1d):
    """Kernel 3 over time, [B, in, T] → [B, out, T / stride], zeros beyond the ends; nothing is drawn here."""

    def __init__(self, inward: int, outward: int, stride: int) -> None:
        cast(Any, super()).__init__(inward, outward, 3, stride, padding=1)

    def reset_parameters(self) -> None:
        pass

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.weight, init.matrix(self.weight[0].numel()), generator)
        if self.bias is not None:
            self.bias.zero_()
