"""How Rope reaches past the trained length: one spec for each published way of changing its frequencies.

R rotated dims, i a pair of dims (0 … R/2 − 1); unscaled, pair i turns by theta^(−2i/R) a position.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..errors import SpecError
from ..spec import Spec
from .constant import constant


class _Scaling:
    dynamic = False

    def fit(self, size: int) -> None:
        """Raises SpecError if R = size cannot be scaled so."""

    def magnitude(self) -> float:
        return 1.0

    def frequencies(self, theta: float, size: int) -> list[float]:
        return geometric(theta, size)

    def stretch(self, frequencies: Tensor, lengths: Tensor, theta: float, size: int) -> Tensor:
        """The frequencies [B|1, L, R/2] for documents of these lengths [B|1, L]; static scalings change nothing."""
        return frequencies


class Linear(_Scaling, Spec):
    """Positions divided by factor (position interpolation, arXiv 2306.15595)."""

    factor: float
    """Longest length over trained length."""

    def check(self) -> None:
        self.require(self.factor > 0, f"factor is above 0, got {self.factor}")

    def frequencies(self, theta: float, size: int) -> list[float]:
        return [frequency / self.factor for frequency in geometric(theta, size)]


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
        return geometric(self.base(theta, size), size)

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
        return frequencies * grown.unsqueeze(-1) ** constant(powers, lengths, frequencies.dtype)


class Yarn(_Scaling, Spec):
    """Low frequencies interpolated, high ones kept, a linear ramp between; sharper attention. arXiv 2309.00071."""

    factor: float
    """Longest length over trained length."""
    trained_length: int
    """Tokens of context before the extension."""
    beta_fast: float = 32.0
    """Pairs that turn at least this often within the trained length keep their frequency. Where both betas are equal,
    as Kimi K2's, the ramp is a step."""
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
        self.require(self.beta_fast >= self.beta_slow > 0, "beta_fast is not below beta_slow, and both are above 0")

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
        return [f * (1 - r) + f / self.factor * r for f, r in zip(geometric(theta, size), ramp, strict=True)]


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

        return [stretched(frequency) for frequency in geometric(theta, size)]


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
        return [f / divisor for f, divisor in zip(geometric(theta, size), self.short, strict=True)]

    def stretch(self, frequencies: Tensor, lengths: Tensor, theta: float, size: int) -> Tensor:
        long = tuple(f / divisor for f, divisor in zip(geometric(theta, size), self.long, strict=True))
        beyond = (lengths > self.trained_length).unsqueeze(-1)
        return torch.where(beyond, constant(long, lengths, frequencies.dtype), frequencies)


class Proportional(_Scaling, Spec):
    """Only the fastest pairs of a head turn, as fast as if all did; the others stand still (arXiv 2410.06205)."""

    share: float
    """Share of the pairs that turn."""
    factor: float = 1.0
    """What the frequencies are divided by."""

    def check(self) -> None:
        self.require(0 < self.share <= 1, f"share is above 0 and at most 1, got {self.share}")
        self.require(self.factor > 0, f"factor is above 0, got {self.factor}")

    def frequencies(self, theta: float, size: int) -> list[float]:
        turning = int(self.share * size // 2)
        return [f / self.factor if i < turning else 0.0 for i, f in enumerate(geometric(theta, size))]


Scaling = Proportional | Linear | Ntk | DynamicNtk | Yarn | Llama3 | LongRope


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """YaRN's attention temperature 0.1 · weight · ln(factor) + 1, and 1 up to factor 1 (arXiv 2309.00071, eq. 22)."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def geometric(theta: float, size: int) -> list[float]:
    """Frequencies without scaling, theta^(−2i/R), for R = size."""
    return [theta ** (-2 * i / size) for i in range(size // 2)]


def _require_four(scaling: Spec, size: int) -> None:
    if size < 4:  # the exponent R / (R − 2)
        raise SpecError(f"{type(scaling).__name__}: needs at least 4 rotated dims, got {size}")
