"""Rotary positions: Rope, its length scalings, the rotation itself, and config.json of transformers read and written.

B batch, L length, N heads, H head size, R rotated dims (at most H), i a pair of dims (0 … R/2 − 1).
Source: Su et al. 2021, arXiv 2104.09864, eq. 34: pair i at position p turns by the angle p · theta^(−2i/R).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..errors import InputError, SpecError
from ..spec import Spec

Pairing = Literal["half", "interleaved"]


class Rope(Spec):
    """Rotary position embedding of queries and keys; see `tables` and `rotate`."""

    theta: float = 10000.0
    """Base of the frequencies. 10000 is the paper's; models of long context train with larger ones."""
    size: int | None = None
    """R, how many leading dims of each head are rotated; None rotates the whole head."""
    pairing: Pairing = "half"
    """Which dims turn together: "half" i and i + R/2 (GPT-NeoX, transformers), "interleaved" 2i and 2i + 1 (paper)."""
    scaling: Scaling | None = None
    """How the frequencies are changed to reach past the trained length; None: not at all."""

    def check(self) -> None:
        self.require(self.theta > 1, f"theta is a base above 1, got {self.theta}")
        if self.size is not None:
            self.require(
                self.size > 0 and self.size % 2 == 0,
                f"size counts rotated dims in pairs: even and above 0, got {self.size}",
            )
            if self.scaling is not None:
                self.scaling.fit(self.size)

    @property
    def dynamic(self) -> bool:
        """The frequencies depend on the document's own length: cache keys unrotated, rotate them when read."""
        return self.scaling is not None and self.scaling.dynamic

    @property
    def attention_factor(self) -> float:
        """What cos and sin are multiplied by (so scores by its square); 1 unless YaRN or LongRoPE asks."""
        return 1.0 if self.scaling is None else self.scaling.magnitude()

    def rotated(self, head_size: int) -> int:
        """R for this head size. Raises SpecError where it does not fit."""
        size = head_size if self.size is None else self.size
        if size > head_size:
            raise SpecError(f"Rope.size: {size} rotated dims do not fit a head of size {head_size}")
        if size % 2:
            raise SpecError(f"Rope: the head size {head_size} is odd; give an even size to rotate a part of it")
        if self.scaling is not None:
            self.scaling.fit(size)
        return size

    def frequencies(self, head_size: int) -> tuple[float, ...]:
        """R/2 angles per position; of a dynamic scaling those of a document within the trained length."""
        return _frequencies(self, head_size)

    def tables(
        self, pos: Tensor, head_size: int, *, lengths: Tensor | None = None, dtype: torch.dtype = torch.float32
    ) -> tuple[Tensor, Tensor]:
        """cos and sin of the angles at integer positions, times the attention factor; each [B|1, L, R/2].

        pos: [B|1, L]. lengths: [B|1, L], the length of the document that each token belongs to; only a dynamic
        scaling reads it, token by token, so neighbours in a batch or a packed row never change each other.
        Angles and results are in fp32 whatever the model's dtype, in fp64 for dtype=torch.float64.
        Raises InputError if a dynamic scaling gets no lengths.
        """
        dtype = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = _constant(_frequencies(self, head_size), pos, dtype)
        if self.scaling is not None and self.dynamic:
            if lengths is None:
                raise InputError(f"{type(self.scaling).__name__} needs lengths, the length of each token's document")
            frequencies = self.scaling.stretch(frequencies, lengths, self.theta, self.rotated(head_size))
        angles = pos.to(dtype).unsqueeze(-1) * frequencies
        factor = self.attention_factor
        return (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, pairing: Pairing = "half") -> Tensor:
    """x with the pairs of its first R dims turned by the tables' angles; the other dims pass unchanged.

    x: [B, N, L, H] or [B, L, H]; cos, sin: [B|1, L, R/2] from `Rope.tables`, broadcast over heads.
    Returns x's shape and dtype, computed in at least fp32. Raises InputError if R is beyond H.
    """
    size = 2 * cos.shape[-1]
    if size > x.shape[-1]:
        raise InputError(f"rotary tables for {size} dims do not fit heads of size {x.shape[-1]}")
    while cos.dim() < x.dim():
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    turning = x[..., :size].to(torch.promote_types(x.dtype, cos.dtype))
    if pairing == "half":
        a, b = turning.chunk(2, -1)
        turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    else:
        a, b = turning.reshape(*turning.shape[:-1], -1, 2).unbind(-1)
        turned = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    turned = turned.to(x.dtype)
    return turned if size == x.shape[-1] else torch.cat((turned, x[..., size:]), -1)


def pairing_permutation(head_size: int, size: int | None = None) -> Tensor:
    """Indices p [H] with interleaved[j] = half[p[j]] within a head; the way back is p.argsort().

    Only the first size dims move (None: all). A query or key projection is permuted by `repair`.
    """
    size = head_size if size is None else size
    pairs = torch.arange(size).view(2, -1).T.flatten()
    return torch.cat((pairs, torch.arange(size, head_size)))


def repair(rows: Tensor, head_size: int, size: int | None = None, *, to: Pairing) -> Tensor:
    """A q or k projection [heads · H, …] (or its bias) of one pairing turned into the other; values are unchanged.

    It takes the head size and no head count, so grouped keys cannot be permuted with the queries' count.
    """
    order = pairing_permutation(head_size, size).to(rows.device)
    if to == "half":
        order = order.argsort()
    return rows.reshape(-1, head_size, *rows.shape[1:]).index_select(1, order).reshape(rows.shape)


# Scalings: each has `frequencies` (of the trained length), `magnitude` (the attention factor) and `fit`.


class _Scaling:
    dynamic = False

    def fit(self, size: int) -> None:
        """Raises SpecError if R = size cannot be scaled so."""

    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        return _geometric(theta, size)

    def stretch(self, frequencies: Tensor, lengths: Tensor, theta: float, size: int) -> Tensor:
        """Dynamic scalings: the frequencies [B|1, L, R/2] for documents of these lengths [B|1, L]."""
        raise NotImplementedError


class Linear(_Scaling, Spec):
    """Positions divided by factor (position interpolation, arXiv 2306.15595)."""

    factor: float
    """Longest length over trained length."""

    def check(self) -> None:
        self.require(self.factor > 0, f"factor is above 0, got {self.factor}")

    def frequencies(self, theta: float, size: int) -> list[float]:
        return [frequency / self.factor for frequency in _geometric(theta, size)]


class Ntk(_Scaling, Spec):
    """A larger base, theta · factor^(R/(R−2)): the lowest frequency is interpolated, the highest kept.

    Source: "NTK-aware scaled RoPE" (bloc97, 2023); written down in arXiv 2309.00071, section 3.1.
    """

    factor: float
    """Longest length over trained length."""

    def check(self) -> None:
        self.require(self.factor > 0, f"factor is above 0, got {self.factor}")

    def fit(self, size: int) -> None:
        _require_four(self, size)

    def frequencies(self, theta: float, size: int) -> list[float]:
        return _geometric(self.base(theta, size), size)

    def base(self, theta: float, size: int) -> float:
        return theta * self.factor ** (size / (size - 2))


class DynamicNtk(_Scaling, Spec):
    """Ntk with the factor that the document's own length asks for; plain up to the trained length.

    Source: emozilla, 2023; the formula is that of transformers: s = factor · length / trained − (factor − 1).
    """

    factor: float
    """How fast the base grows with the length: s = 1 + factor · (length − trained) / trained."""
    trained_length: int
    """Tokens up to which the frequencies are the trained ones."""

    dynamic = True

    def check(self) -> None:
        self.require(self.factor > 0 and self.trained_length > 0, "factor and trained_length are above 0")

    def fit(self, size: int) -> None:
        _require_four(self, size)

    def stretch(self, frequencies: Tensor, lengths: Tensor, theta: float, size: int) -> Tensor:
        # (theta · s^(R/(R−2)))^(−2i/R) = theta^(−2i/R) · s^(−2i/(R−2)); s is exactly 1 within the trained length.
        beyond = (lengths - self.trained_length).clamp(min=0).to(frequencies.dtype)
        grown = 1 + beyond * (self.factor / self.trained_length)
        powers = tuple(-2 * i / (size - 2) for i in range(size // 2))
        return frequencies * grown.unsqueeze(-1) ** _constant(powers, lengths, frequencies.dtype)


class Yarn(_Scaling, Spec):
    """Low frequencies interpolated, high ones kept, a linear ramp between; sharper attention. arXiv 2309.00071."""

    factor: float
    """Longest length over trained length."""
    trained_length: int
    """Tokens of context before the extension."""
    beta_fast: float = 32.0
    """Pairs that turn at least this often within the trained length keep their frequency."""
    beta_slow: float = 1.0
    """Pairs that turn at most this often are interpolated by the whole factor."""
    attention_factor: float | None = None
    """Multiplies cos and sin; where given it replaces all that follows from factor and the two mscales."""
    mscale: float | None = None
    """DeepSeek: weight of ln(factor) in the attention factor's numerator; counts only beside mscale_all_dim."""
    mscale_all_dim: float | None = None
    """DeepSeek: the same for its denominator."""
    truncate: bool = True
    """The ramp's ends are rounded outward to whole pairs, as in the paper's code."""

    def check(self) -> None:
        self.require(self.factor > 0 and self.trained_length > 0, "factor and trained_length are above 0")
        self.require(self.beta_fast > self.beta_slow > 0, "beta_fast is above beta_slow, and both above 0")

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return yarn_magnitude(self.factor, self.mscale) / yarn_magnitude(self.factor, self.mscale_all_dim)
        return yarn_magnitude(self.factor)

    def frequencies(self, theta: float, size: int) -> list[float]:
        def pair_turning(turns: float) -> float:  # the (fractional) pair with so many turns in the trained length
            return size * math.log(self.trained_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair_turning(self.beta_fast), pair_turning(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, size - 1)
        width = high - low or 0.001  # an empty ramp is a step, as in the paper's code
        ramp = [min(max((i - low) / width, 0.0), 1.0) for i in range(size // 2)]
        return [f * (1 - r) + f / self.factor * r for f, r in zip(_geometric(theta, size), ramp, strict=True)]


class Llama3(_Scaling, Spec):
    """Long wavelengths interpolated, short ones kept, a smooth passage between (Llama 3.1's reference code)."""

    factor: float
    """What the long wavelengths are stretched by."""
    low_frequency_factor: float
    """Wavelengths above trained_length / this are stretched by the whole factor."""
    high_frequency_factor: float
    """Wavelengths below trained_length / this are kept."""
    trained_length: int
    """Tokens of context before the extension."""

    def check(self) -> None:
        self.require(self.factor > 0 and self.trained_length > 0, "factor and trained_length are above 0")
        self.require(
            self.high_frequency_factor > self.low_frequency_factor > 0,
            "high_frequency_factor is above low_frequency_factor, and both above 0",
        )

    def frequencies(self, theta: float, size: int) -> list[float]:
        def stretched(frequency: float) -> float:
            turns = self.trained_length * frequency / (2 * math.pi)
            keep = (turns - self.low_frequency_factor) / (self.high_frequency_factor - self.low_frequency_factor)
            keep = min(max(keep, 0.0), 1.0)
            return frequency * (keep + (1 - keep) / self.factor)

        return [stretched(frequency) for frequency in _geometric(theta, size)]


class LongRope(_Scaling, Spec):
    """A searched divisor for every pair: one set within the trained length, one beyond it. arXiv 2402.13753."""

    short: tuple[float, ...]
    """R/2 divisors for documents up to trained_length."""
    long: tuple[float, ...]
    """R/2 divisors for longer documents."""
    trained_length: int
    """Tokens of context before the extension; a document of one more uses the long set throughout."""
    factor: float | None = None
    """Longest length over trained length; gives the attention factor sqrt(1 + ln factor / ln trained_length)."""
    attention_factor: float | None = None
    """Multiplies cos and sin; where given it replaces what follows from factor. With neither it is 1."""

    dynamic = True

    def check(self) -> None:
        self.require(len(self.short) == len(self.long), f"{len(self.short)} short divisors but {len(self.long)} long")
        self.require(all(divisor > 0 for divisor in self.short + self.long), "divisors are above 0")
        self.require(self.trained_length > 1, f"trained_length is above 1, got {self.trained_length}")

    def fit(self, size: int) -> None:
        if len(self.short) != size // 2:
            raise SpecError(f"LongRope: {len(self.short)} divisors for {size // 2} rotated pairs")

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor is None or self.factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.trained_length))

    def frequencies(self, theta: float, size: int) -> list[float]:
        return [f / divisor for f, divisor in zip(_geometric(theta, size), self.short, strict=True)]

    def stretch(self, frequencies: Tensor, lengths: Tensor, theta: float, size: int) -> Tensor:
        long = tuple(f / divisor for f, divisor in zip(_geometric(theta, size), self.long, strict=True))
        beyond = (lengths > self.trained_length).unsqueeze(-1)
        return torch.where(beyond, _constant(long, lengths, frequencies.dtype), frequencies)


Scaling = Linear | Ntk | DynamicNtk | Yarn | Llama3 | LongRope


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature 0.1 · weight · ln(factor) + 1, and 1 up to factor 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _geometric(theta: float, size: int) -> list[float]:
    return [theta ** (-2 * i / size) for i in range(size // 2)]


def _require_four(scaling: Spec, size: int) -> None:
    if size < 4:  # the exponent R / (R − 2)
        raise SpecError(f"{type(scaling).__name__}: needs at least 4 rotated dims, got {size}")


# Frequencies are kept here, per spec, head size, device and dtype, and never in a module: a module's `.to(bfloat16)`
# or building on meta cannot touch them. They are Python floats first, so a compiler takes them for constants.


@torch.compiler.assume_constant_result  # pyright: ignore[reportUnknownMemberType]
def _frequencies(rope: Rope, head_size: int) -> tuple[float, ...]:
    return _computed_frequencies(rope, head_size)


@lru_cache(maxsize=1024)
def _computed_frequencies(rope: Rope, head_size: int) -> tuple[float, ...]:
    size = rope.rotated(head_size)
    scaling = rope.scaling
    return tuple(_geometric(rope.theta, size) if scaling is None else scaling.frequencies(rope.theta, size))


def _constant(values: tuple[float, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """The values on like's device; kept between calls, but for compilers and fake tensors, which make their own."""
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return torch.tensor(values, dtype=dtype, device=like.device)
    return _kept(values, dtype, like.device)


@lru_cache(maxsize=1024)
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # else the first caller's mode would follow the tensor into training
        return torch.tensor(values, dtype=dtype, device=device)
