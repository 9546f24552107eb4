"""Patches: the front end for images. An image becomes one vector a patch, behind tokens that belong to no place.

B batch, C channels, H and W height and width in pixels, P patches, D width, R registers.
Source: Dosovitskiy et al. 2020, arXiv 2010.11929; registers, arXiv 2309.16588.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..step import Step
from .initialise import Init, normal
from .op import Context, Part
from .position import Sinusoidal

Images = Tensor | dict[str, Tensor]


class Grid(Part):
    """A trained vector for each place of the grid of patches; an image of another size sees the grid resampled."""

    antialias: bool = False
    """Whether the bicubic resampling averages over what a smaller grid leaves out (DINOv2 with registers)."""


class Patches(Part):
    """[class token] [registers] [patches, row by row]: one linear map of each patch's pixels, plus positions."""

    image: tuple[int, int]
    """(height, width) in pixels of the images that the positions belong to; others may be given."""
    patch: tuple[int, int]
    """(height, width) of a patch, in pixels; patches do not overlap."""
    channels: int = 3
    """C."""
    class_token: bool = False
    """Whether a learned vector stands in front, for a head to read; of a Grid it has a vector of its own."""
    registers: int = 0
    """R, further learned vectors, without positions, that attention may use as scratch space."""
    mask_token: bool = False
    """Whether a learned vector can stand for patches that the caller hides (masked image modelling)."""
    position: Grid | Sinusoidal | None = None
    """What is added; Sinusoidal: half of the width tells the column, half the row (MAE, DiT), class token at 0."""
    dropout: float = 0.0
    """Share of the result zeroed while training."""

    def check(self) -> None:
        sizes = (*self.image, *self.patch, self.channels)
        self.require(min(sizes) > 0, f"image, patch and channels must be above 0, got {sizes}")
        fits = all(whole % part == 0 for whole, part in zip(self.image, self.patch, strict=True))
        self.require(fits, f"an image of {_times(self.image)} is no whole number of patches of {_times(self.patch)}")
        self.require(self.registers >= 0, f"registers must not be below 0, got {self.registers}")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    @property
    def grid(self) -> tuple[int, int]:
        """(rows, columns) of patches of an image of the size that the positions belong to."""
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def first(self) -> int:
        """Where the patches begin: how many tokens stand before them."""
        return self.class_token + self.registers

    def build(self, dim: int, context: Context) -> PatchesOp:
        return PatchesOp(self, dim)


class PatchesOp(nn.Module):
    """images [B, C, H, W] floating → ([B, class + R + P, D], step); H and W are whole numbers of patches.

    With a mask token also {"images": …, "hidden": [B, P] bool}: the patches that it stands for.
    Raises InputError for images of another shape or dtype.
    """

    matrices = ("weight",)

    def __init__(self, spec: Patches, dim: int) -> None:
        super().__init__()
        self.spec = spec
        learned = isinstance(spec.position, Grid)
        spec.require(
            not isinstance(spec.position, Sinusoidal) or dim % 4 == 0,
            f"sines and cosines of rows and columns need a width that is a multiple of 4, not {dim}",
        )
        places = spec.grid[0] * spec.grid[1] + spec.class_token
        self.weight = nn.Parameter(torch.empty(dim, spec.channels, *spec.patch))
        self.bias = nn.Parameter(torch.empty(dim))
        self.class_token = nn.Parameter(torch.empty(dim)) if spec.class_token else None
        self.registers = nn.Parameter(torch.empty(spec.registers, dim)) if spec.registers else None
        self.mask_token = nn.Parameter(torch.empty(dim)) if spec.mask_token else None
        self.position = nn.Parameter(torch.empty(places, dim)) if learned else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.weight, init.matrix(self.weight[0].numel()), generator)
        self.bias.zero_()
        for token in (self.class_token, self.registers):
            if token is not None:
                normal(token, init.table, generator)
        if self.mask_token is not None:
            self.mask_token.zero_()
        if self.position is not None:
            normal(self.position, init.table if init.position is None else init.position, generator)

    def forward(self, inputs: Images, step: Step) -> tuple[Tensor, Step]:
        images, hidden = self._taken(inputs)
        batch, channels, height, width = images.shape
        h, w = self.spec.patch
        rows, columns = height // h, width // w
        # A convolution whose stride is its kernel: the pixels of a patch side by side, and one matrix product.
        cells = images.reshape(batch, channels, rows, h, columns, w)
        pixels = cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, P, C · h · w]
        x = F.linear(pixels.to(self.weight.dtype), self.weight.flatten(1), self.bias)
        if hidden is not None:
            x = torch.where(hidden[..., None], cast(Tensor, self.mask_token), x)
        place = self._positions(rows, columns, x)
        own, x = (place[:1], x + place[1:]) if self.spec.class_token else (None, x + place)
        first = [] if own is None else [cast(Tensor, self.class_token) + own]
        first += [] if self.registers is None else [self.registers]
        x = torch.cat([*(token.expand(batch, -1, -1) for token in first), x], 1)
        return F.dropout(x, self.spec.dropout, self.training), step

    def _taken(self, inputs: Images) -> tuple[Tensor, Tensor | None]:
        spec = self.spec
        images, hidden = (inputs["images"], inputs.get("hidden")) if isinstance(inputs, dict) else (inputs, None)
        if images.dim() != 4 or images.shape[1] != spec.channels:
            raise InputError(f"images are [B, {spec.channels}, H, W], got {list(images.shape)}")
        if not images.is_floating_point():
            raise InputError(f"images are floating-point, normalised as the model was trained, got {images.dtype}")
        height, width = images.shape[2:]
        if height % spec.patch[0] or width % spec.patch[1] or not height * width:
            raise InputError(
                f"images of {height} × {width} pixels are no whole number of patches of {_times(spec.patch)}: resize"
            )
        if hidden is not None:
            patches = (images.shape[0], height // spec.patch[0] * (width // spec.patch[1]))
            if self.mask_token is None:
                raise InputError("patches are hidden, but the model has no mask token")
            if hidden.dtype != torch.bool or tuple(hidden.shape) != patches:
                raise InputError(f"hidden is bool {list(patches)}, got {hidden.dtype} {list(hidden.shape)}")
        return images, hidden

    def _positions(self, rows: int, columns: int, x: Tensor) -> Tensor:
        """[class + P, D] in the weights' dtype: what is added to the class token and to the patches."""
        kind, grid = self.spec.position, self.spec.grid
        if isinstance(kind, Sinusoidal):
            return self._sines(kind, rows, columns, x)
        if self.position is None:
            return x.new_zeros(1, 1).expand(self.spec.class_token + rows * columns, 1)
        if (rows, columns) == grid:
            return self.position
        own, places = self.position[: self.spec.class_token], self.position[self.spec.class_token :]
        wide = places.reshape(1, *grid, -1).permute(0, 3, 1, 2)  # [1, D, rows, columns]
        wide = wide if wide.dtype == torch.float64 else wide.float()  # narrow types would shift the places
        antialias = isinstance(kind, Grid) and kind.antialias
        wide = F.interpolate(wide, (rows, columns), mode="bicubic", align_corners=False, antialias=antialias)
        return torch.cat([own, wide[0].flatten(1).t().to(self.position.dtype)])

    def _sines(self, kind: Sinusoidal, rows: int, columns: int, x: Tensor) -> Tensor:
        dim = len(self.bias)
        precise = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no fp64
        # The places of a larger or smaller image lie within the range of the trained ones.
        y, z = (
            kind.table(torch.arange(count, dtype=precise, device=x.device) * (own / count), dim // 2, self.weight.dtype)
            for count, own in zip((rows, columns), self.spec.grid, strict=True)
        )
        places = torch.cat([z.expand(rows, -1, -1), y[:, None].expand(-1, columns, -1)], -1).flatten(0, 1)
        return torch.cat([places.new_zeros(1, dim), places]) if self.spec.class_token else places


def _times(sizes: tuple[int, int]) -> str:
    return f"{sizes[0]} × {sizes[1]}"
