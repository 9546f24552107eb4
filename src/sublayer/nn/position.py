"""Positions that are not rotary: vectors added to tokens (Sinusoidal, Learned), and what is added to attention
scores by distance (T5Buckets, Shaw, Alibi). Rotary ones are in rope.py.

B batch, L query length, M key length, D model width, N heads, H head size, k largest distance told apart.
Positions are integer tensors [B|1, L] (queries) and [B|1, M] (keys); a distance is key minus query.
"""

from __future__ import annotations

from functools import lru_cache
from operator import index
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from .constant import constant, traced_as_constant
from .initialise import Init, normal
from .op import Context, Part


class Sinusoidal(Part):
    """Sines and cosines of falling frequencies, added to the tokens (Vaswani et al. 2017, section 3.5)."""

    theta: float = 10000.0
    """The longest wavelength is 2π · theta."""
    layout: Literal["interleaved", "half"] = "interleaved"
    """Sine and cosine in turn (the paper), or all sines before all cosines (Marian, tensor2tensor)."""
    reached: bool = False
    """Whether the longest wavelength is one of those used: theta^(−i / (D/2 − 1)) (tensor2tensor, Whisper) rather than
    theta^(−2i / D) (the paper)."""

    def check(self) -> None:
        self.require(self.theta > 0, f"theta is above 0, got {self.theta}")

    def build(self, dim: int, context: Context) -> SinusoidalOp:
        return SinusoidalOp(self, dim)

    @traced_as_constant
    def frequencies(self, dim: int) -> tuple[float, ...]:
        """Of the sines, from the highest on: as many as fit, half the width rounded up."""
        count = (dim + 1) // 2
        steps = max(count - 1, 1) if self.reached else dim / 2
        return tuple(self.theta ** (-i / steps) for i in range(count))

    def table(self, pos: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        """pos: [..] integers. Returns [.., dim] in dtype; None: in fp64, as computed (on MPS fp32).

        Of an odd width the last sine has no cosine.
        """
        precise = torch.float32 if pos.device.type == "mps" else torch.float64  # MPS has no fp64
        angles = pos.to(precise).unsqueeze(-1) * constant(self.frequencies(index(dim)), pos, precise)
        sines, cosines = angles.sin(), angles[..., : dim // 2].cos()
        if self.layout == "half":
            return torch.cat((sines, cosines), -1).to(dtype or precise)
        last = sines[..., dim // 2 :]
        paired = torch.stack((sines[..., : dim // 2], cosines), -1).flatten(-2)
        return torch.cat((paired, last), -1).to(dtype or precise)


class SinusoidalOp(nn.Module):
    """Sinusoidal vectors of a width; no parameters."""

    def __init__(self, spec: Sinusoidal, dim: int) -> None:
        super().__init__()
        self.spec, self.dim = spec, dim

    def forward(self, pos: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """pos: [B|1, L]. Returns [B|1, L, D] in dtype; None: as computed, so cast it to the tokens' before adding."""
        return self.spec.table(pos, self.dim, dtype)


class Learned(Part):
    """A trained vector for each position, added to the tokens (GPT, BERT)."""

    length: int
    """How many positions a document may use; positions 0 … length - 1 are valid."""
    offset: int = 0
    """Rows before that of position 0. RoBERTa and BART have 2: RoBERTa's 514 rows hold 512 tokens."""

    def check(self) -> None:
        self.require(self.length > 0 and self.offset >= 0, "length is above 0 and offset not below 0")

    def build(self, dim: int, context: Context) -> LearnedOp:
        return LearnedOp(self, dim)


class LearnedOp(nn.Module):
    """The table: weight [length + offset, D]."""

    def __init__(self, spec: Learned, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(spec.length + spec.offset, dim))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.weight, init.table if init.position is None else init.position, generator)

    def forward(self, pos: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """pos: [B|1, L]. Returns [B|1, L, D] in dtype; None: in the weight's.

        Raises InputError for a position outside the table; on a GPU or when compiled it is torch's own assertion,
        for looking at the values first would wait for the device in every call.
        """
        rows = pos + self.spec.offset
        if torch.compiler.is_compiling():
            return F.embedding(rows, self.weight).to(dtype)
        try:
            return F.embedding(rows, self.weight).to(dtype)
        except IndexError:
            raise InputError(_beyond(pos, self.spec)) from None


def _beyond(pos: Tensor, spec: Learned) -> str:
    if int(pos.min()) < -spec.offset:
        return f"position {int(pos.min())} is below 0, where the learned positions begin"
    return (
        f"position {int(pos.max())} is beyond the {spec.length} learned positions; "
        f"shorten the input or use a model with more positions"
    )


class T5Buckets(Part):
    """A trained score for each head and bucket of distances: near ones alone, far ones by logarithm (T5).

    Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1; bucket limits as in its code.
    """

    heads: int
    """N, heads of the attention that the bias is added to."""
    bidirectional: bool
    """Half of the buckets for later keys (encoder); else later keys share the bucket of distance 0 (decoder)."""
    buckets: int = 32
    """Rows of the table, both directions together."""
    distance: int = 128
    """Distances from here on share the last bucket."""

    def check(self) -> None:
        self.require(self.heads > 0, f"heads is above 0, got {self.heads}")
        self.require(max(self.buckets, self.distance) <= 65536, "buckets and distance are at most 65536")
        one_way = self.buckets // 2 if self.bidirectional else self.buckets
        self.require(
            one_way >= 2 and not (self.bidirectional and self.buckets % 2),
            f"buckets is at least 2 a direction and even over two, got {self.buckets}",
        )
        self.require(
            self.distance > one_way // 2,
            f"distance is above the {one_way // 2} distances that have a bucket of their own, got {self.distance}",
        )

    def build(self, dim: int, context: Context) -> T5BucketsOp:
        return T5BucketsOp(self, dim)

    @traced_as_constant
    def _of_distances(self) -> tuple[int, ...]:
        return _t5_buckets(self)

    def bucket(self, relative: Tensor) -> Tensor:
        """The bucket of each distance (key minus query): integers [..] to int64 [..]."""
        buckets = constant(self._of_distances(), relative, torch.int64)
        return buckets[relative.clamp(-self.distance, self.distance) + self.distance]


class T5BucketsOp(nn.Module):
    """The table: weight [buckets, N]."""

    def __init__(self, spec: T5Buckets, dim: int) -> None:
        super().__init__()
        self.spec, self.dim = spec, dim
        self.weight = nn.Parameter(torch.empty(spec.buckets, spec.heads))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.weight, self.dim**-0.5, generator)  # T5's

    def forward(self, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """q_pos: [B|1, L]; k_pos: [B|1, M]. Returns the bias [B|1, N, L, M] in dtype; None: in the weight's."""
        bias = F.embedding(self.spec.bucket(_distances(q_pos, k_pos)), self.weight.to(dtype))
        return bias.permute(0, 3, 1, 2).contiguous()  # fused kernels want neighbouring keys side by side


class Shaw(Part):
    """Trained vectors by clipped distance, added to keys and to values. Source: Shaw et al. 2018, arXiv 1803.02155."""

    distance: int
    """k: distances beyond it count as it; 2k + 1 vectors."""
    values: bool = True
    """Values get such vectors too (eq. 3), not only keys (eq. 4)."""

    def check(self) -> None:
        self.require(self.distance > 0, f"distance is above 0, got {self.distance}")

    def build(self, dim: int, context: Context) -> ShawOp:
        """dim: the head size H; all heads share the vectors."""
        return ShawOp(self, dim)


class ShawOp(nn.Module):
    """The tables: key [2k + 1, H] and, with spec.values, value [2k + 1, H]; row 0 is distance -k."""

    value: nn.Parameter | None

    def __init__(self, spec: Shaw, dim: int) -> None:
        super().__init__()
        self.spec = spec
        rows = 2 * spec.distance + 1
        self.key = nn.Parameter(torch.empty(rows, dim))
        self.register_parameter("value", nn.Parameter(torch.empty(rows, dim)) if spec.values else None)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        for table in self.parameters():
            normal(table, init.matrix(table.shape[1]), generator)

    def key_bias(self, q: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """What the key vectors add to q kᵀ: q · key[distance], [B, N, L, M]; times the same scale as the scores.

        q: [B, N, L, H]. The queries meet the 2k + 1 vectors once; no [L, M, H] is made.
        """
        return (q @ self.key.T).gather(-1, self._rows(q_pos, k_pos, q))

    def value_term(self, weights: Tensor, q_pos: Tensor, k_pos: Tensor) -> Tensor:
        """What the value vectors add to the output: Σ over keys of weight · value[distance], [B, N, L, H].

        weights: [B, N, L, M], after the softmax. They are summed by distance in at least fp32: many small ones
        would stand still in bfloat16. Raises InputError if the spec has no value vectors.
        """
        if self.value is None:
            raise InputError("Shaw(values=False) has no value vectors")
        precise = torch.promote_types(weights.dtype, torch.float32)
        sums = torch.zeros(*weights.shape[:-1], len(self.value), dtype=precise, device=weights.device)
        sums = sums.scatter_add(-1, self._rows(q_pos, k_pos, weights), weights.to(precise))
        return sums.to(self.value.dtype) @ self.value

    def _rows(self, q_pos: Tensor, k_pos: Tensor, like: Tensor) -> Tensor:
        rows = _distances(q_pos, k_pos).clamp(-self.spec.distance, self.spec.distance) + self.spec.distance
        return rows.unsqueeze(1).expand(like.shape[0], like.shape[1], -1, -1)


class Alibi(Part):
    """Scores fall with the distance, each head at its own slope; nothing is trained. Source: arXiv 2108.12409."""

    heads: int
    """N, heads of the attention that the bias is added to."""

    def check(self) -> None:
        self.require(self.heads > 0, f"heads is above 0, got {self.heads}")

    def build(self, dim: int, context: Context) -> AlibiOp:
        return AlibiOp(self)

    def bias(self, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """-slope · |distance|: q_pos [B|1, L], k_pos [B|1, M] to [B|1, N, L, M].

        In fp32, or in fp64 for dtype=torch.float64: bfloat16 tells no neighbours apart beyond a distance of 256.
        """
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        slopes = constant(alibi_slopes(self.heads), q_pos, dtype)
        away = _distances(q_pos, k_pos).abs().to(dtype).unsqueeze(1)
        return -slopes.view(-1, 1, 1) * away


class AlibiOp(nn.Module):
    """Alibi as a module; no parameters."""

    def __init__(self, spec: Alibi) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, q_pos: Tensor, k_pos: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """q_pos: [B|1, L]; k_pos: [B|1, M]. Returns the bias [B|1, N, L, M], see `Alibi.bias`."""
        return self.spec.bias(q_pos, k_pos, dtype)


def alibi_slopes(heads: int) -> tuple[float, ...]:
    """Slopes of ALiBi: 2^(-8/n), 2^(-16/n), … for n heads, n a power of two.

    Other counts take those of the power of two below, then every second one of the power above (the authors' code).
    """
    below = 1 << (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    between = [2 ** (-4 * (i + 1) / below) for i in range(0, 2 * below, 2)]
    return tuple(slopes + between[: heads - below])


def _distances(q_pos: Tensor, k_pos: Tensor) -> Tensor:
    """Key minus query: [B|1, L, M]."""
    return k_pos.unsqueeze(-2) - q_pos.unsqueeze(-1)


@lru_cache
def _t5_buckets(spec: T5Buckets) -> tuple[int, ...]:
    """Buckets of the distances -distance … distance.

    Beyond `own` distances with a bucket each, bucket own + j begins at own · (distance / own)^(j / more): compared in
    whole numbers, since a logarithm rounds differently from one device and dtype to the next.
    """
    one_way = spec.buckets // 2 if spec.bidirectional else spec.buckets
    own = one_way // 2
    more = one_way - own

    def bucket(away: int) -> int:
        if away < own:
            return away
        begun = (away**more * own**j >= spec.distance**j * own**more for j in range(1, more))
        return own + sum(begun)

    earlier = [bucket(away) for away in range(spec.distance, 0, -1)]
    if spec.bidirectional:
        later = [one_way + bucket(away) for away in range(1, spec.distance + 1)]
    else:
        later = [0] * spec.distance
    return (*earlier, 0, *later)
