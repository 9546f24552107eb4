"""The k-quants, Q2_K to Q6_K: matrices in 2 to 6 bits a value, of which the gguf package can only read.

256 neighbours of a row are a super-block, cut into groups of 16 or 32. A value is stored as a level q of its group:

    Q2_K, Q4_K, Q5_K    x = d·c·q − e·k    q from 0 up
    Q3_K, Q6_K          x = d·c·q          q on both sides of 0

with d and e of the super-block, in F16, and whole numbers c and k of the group, in 4, 6 or 8 bits. What is stored is to
have a small sum of squared errors, in three steps: each group's scale and minimum are fitted freely; they become c and
k, once d and e are known; then d and e are fitted to the c, k and q that were found.
Source: the format's description in ggml's header of blocks, https://github.com/ggml-org/llama.cpp/pull/1684.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

BLOCK = 256
SMALLEST = 2.0**-24  # that F16 can hold


@dataclass(frozen=True)
class Form:
    bits: int
    """Of a level."""
    group: int
    """Values that share a scale."""
    codes: int
    """The largest c, and k; of a signed scale, the largest −c."""
    signed: bool = False
    """Whether levels and scales have a sign, and there is no minimum."""


FORMS = {
    "Q2_K": Form(2, 16, 15),
    "Q3_K": Form(3, 16, 32, signed=True),
    "Q4_K": Form(4, 32, 63),
    "Q5_K": Form(5, 32, 63),
    "Q6_K": Form(6, 16, 128, signed=True),
}
STEPS = torch.linspace(-1, 1, 11).tolist()  # levels more, or fewer, that the span of a group is cut into


@torch.no_grad()
def quantize(values: Tensor, kind: str) -> Tensor:
    """[rows, width] float32, finite, width a multiple of 256 → [rows, bytes] uint8, as `kind` ("Q4_K") stores them.

    Takes memory of some six times the values.
    """
    form = FORMS[kind]
    # What is less than half the smallest step comes back as 0 anyway. Values of a group stand in a column, so that
    # sums over them add whole rows.
    x = hardshrink(values, SMALLEST / 2).reshape(-1, form.group).t().contiguous()
    d, e, c, k, q = _fit_signed(x, form) if form.signed else _fit(x, form)
    q = q.t().reshape(-1, BLOCK)
    d, e = (half.half().view(-1, 1).view(torch.uint8) for half in (d, e))
    return torch.cat(_STORED[kind](d, e, c, k, q), 1).view(len(values), -1)


# --- scales and minimums ---
#
# B super-blocks, G groups in each, N values in a group. x, q: [N, B·G]; of groups: [B·G]; d, e: [B].

Fitted = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # d, e, and as uint8 c, k [B, G] and q


def _fit(x: Tensor, form: Form) -> Fitted:
    """x = d·c·q − e·k. Inside, x is less its group's mean, which keeps sums exact where a group is far from 0."""
    n, top, groups = form.group, 2**form.bits - 1, BLOCK // form.group
    mean = x.mean(0)
    x = x - mean
    squares = (x * x).sum(0)
    q, qx = torch.empty_like(x), torch.empty_like(x)

    def sums(scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of q, q·x and q·q, with q the nearest levels of low + scale·q."""
        inverse = _over(1, scale)
        torch.addcmul((-low * inverse).expand_as(x), x, inverse, out=q)
        q.round_().clamp_(0, top)
        return q.sum(0), torch.mul(q, x, out=qx).sum(0), torch.mul(q, q, out=qx).sum(0)

    def error(scale: Tensor, low: Tensor, sq: Tensor, sqx: Tensor, sqq: Tensor) -> Tensor:
        return squares + scale * (scale * sqq - 2 * sqx + 2 * low * sq) + n * low * low

    # Freely: levels are cut from the span in several ways; for the levels of each, the best scale and minimum follow.
    lowest = torch.minimum(x.amin(0), -mean)  # a minimum is never above 0, which is −mean here
    span = x.amax(0) - lowest
    best = _Best(squares + n * mean * mean, torch.zeros_like(mean), -mean)

    def improve(scale: Tensor, low: Tensor) -> None:
        sq, sqx, sqq = found = sums(scale, low)
        scale = _over(n * sqx, n * sqq - sq * sq)
        low = -scale * sq / n
        above = low > -mean
        scale = torch.where(above, _over(sqx + mean * sq, sqq), scale)
        low = torch.where(above, -mean, low)
        best.take(error(scale, low, *found), scale, low)

    for step in STEPS:
        improve(span / (top + step), lowest)
    improve(*best.values)

    # As whole numbers.
    scale, low = best.values
    d, e = (_largest(v, groups, form.codes) for v in (scale, -low - mean))
    best = _Best(torch.full_like(mean, torch.inf), *[torch.zeros_like(mean)] * 5)
    k = _over(-low - mean, _each(e, groups)).round_().clamp_(0, form.codes)
    for c in _around(_over(scale, _each(d, groups)), 0, form.codes):
        scale = c * _each(d, groups)
        sq, sqx, sqq = found = sums(scale, -k * _each(e, groups) - mean)
        nearest = _over(scale * sq / n - mean, _each(e, groups)).round_().clamp_(0, form.codes)
        best.take(error(scale, -nearest * _each(e, groups) - mean, *found), c, nearest, *found)

    # d and e once more, by least squares over the super-block: two equations in two unknowns.
    c, k, sq, sqx, sqq = best.values
    cc, ck, kk = _total(c * c * sqq, groups), _total(c * k * sq, groups), _total(k * k * n, groups)
    cx, kx = _total(c * (sqx + mean * sq), groups), _total(k * n * mean, groups)
    determinant = cc * kk - ck * ck
    fitted = _half((cx * kk - ck * kx) / determinant), _half((cx * ck - cc * kx) / determinant)
    good = (determinant > 1e-6 * cc * kk) & (fitted[0] > 0) & (fitted[1] > 0)
    d, e = torch.where(good, fitted[0], d), torch.where(good, fitted[1], e)
    sums(c * _each(d, groups), -k * _each(e, groups) - mean)
    return d, e, _stored(c, groups), _stored(k, groups), q.to(torch.uint8)


def _fit_signed(x: Tensor, form: Form) -> Fitted:
    """x = d·c·q, q from −2^(bits − 1) to one less above; c and q are stored from 0 up."""
    low, groups = -(2 ** (form.bits - 1)), BLOCK // form.group
    q, qx = torch.empty_like(x), torch.empty_like(x)

    def sums(scale: Tensor) -> tuple[Tensor, Tensor]:
        torch.mul(x, _over(1, scale), out=q).round_().clamp_(low, -low - 1)
        return torch.mul(q, x, out=qx).sum(0), torch.mul(q, q, out=qx).sum(0)

    # Freely. The value farthest from 0 gets the lowest level, for there is one more of them below 0 than above.
    farthest = torch.where(x.amax(0) > -x.amin(0), x.amax(0), x.amin(0))
    best = _Best(torch.zeros_like(farthest), torch.zeros_like(farthest))

    def improve(scale: Tensor) -> None:
        sqx, sqq = sums(scale)
        best.take(-_over(sqx * sqx, sqq), _over(sqx, sqq))

    for step in STEPS:
        improve(farthest / (low + step))
    improve(*best.values)

    # As whole numbers, and likewise the largest scale gets the lowest.
    (scale,) = best.values
    d = -_largest(scale, groups, form.codes)
    best = _Best(torch.full_like(scale, torch.inf), *[torch.zeros_like(scale)] * 3)
    for c in _around(_over(scale, _each(d, groups)), -form.codes, form.codes - 1):
        scale = c * _each(d, groups)
        sqx, sqq = sums(scale)
        best.take(scale * (scale * sqq - 2 * sqx), c, sqx, sqq)

    # d once more.
    c, sqx, sqq = best.values
    fitted = _half(_over(_total(c * sqx, groups), _total(c * c * sqq, groups)))
    d = torch.where(fitted != 0, fitted, d)
    sums(c * _each(d, groups))
    c = _stored(c + form.codes, groups)
    return d, d, c, c, (q - low).to(torch.uint8)  # of which the second d and c are not stored


class _Best:
    """The values with the least error so far, group by group."""

    def __init__(self, error: Tensor, *values: Tensor) -> None:
        self.error, self.values = error, values

    def take(self, error: Tensor, *values: Tensor) -> None:
        better = error < self.error
        self.error = torch.where(better, error, self.error)
        self.values = tuple(torch.where(better, new, old) for new, old in zip(values, self.values, strict=True))


def _over(a: Tensor | int, b: Tensor) -> Tensor:
    """a / b; 0 where b is."""
    return (a / b).nan_to_num_(0.0, 0.0, 0.0)


def _half(x: Tensor) -> Tensor:
    return x.half().float()


def _largest(scales: Tensor, groups: int, codes: int) -> Tensor:
    """[B]: what to count the scales of a super-block in, so that the farthest from 0 is `codes`, or less: F16 is coarse
    for the smallest, and a step that is rounded up can be counted fewer times, but one that is rounded down no more."""
    of = scales.view(-1, groups)
    step = of.gather(1, of.abs().argmax(1, keepdim=True))[:, 0] / codes
    rounded = step.half()
    further = (rounded.view(torch.int16) + 1).view(torch.half)
    return torch.where(rounded.abs() < step.abs(), further, rounded).float()


def _around(codes: Tensor, low: int, top: int) -> Iterator[Tensor]:
    for neighbour in (0, -1, 1):
        yield (codes.round() + neighbour).clamp_(low, top)


def _each(of_blocks: Tensor, groups: int) -> Tensor:
    return of_blocks.repeat_interleave(groups)


def _total(of_groups: Tensor, groups: int) -> Tensor:
    return of_groups.view(-1, groups).sum(1)


def _stored(codes: Tensor, groups: int) -> Tensor:
    return codes.view(-1, groups).to(torch.uint8)


# --- bytes ---


def _packed(numbers: Tensor, bits: int, run: int) -> Tensor:
    """[B, …] uint8 below 2^bits, 8 / bits to a byte: a run of them in its lowest bits, the next run above it."""
    shared = numbers.reshape(len(numbers), -1, 8 // bits, run)
    return sum((shared[:, :, i] << bits * i for i in range(1, 8 // bits)), shared[:, :, 0]).flatten(1)


def _scales(c: Tensor, k: Tensor) -> Tensor:
    """Eight c and eight k of 6 bits in 12 bytes: the later four are cut in two, their upper bits above the first."""
    first = [codes[:, :4] | (codes[:, 4:] >> 4 << 6) for codes in (c, k)]
    return torch.cat([*first, (c[:, 4:] & 15) | (k[:, 4:] << 4)], 1)


_STORED = {
    "Q2_K": lambda d, e, c, k, q: (c | (k << 4), _packed(q, 2, 32), d, e),
    "Q3_K": lambda d, e, c, k, q: (
        _packed(q >> 2, 1, 32), _packed(q & 3, 2, 32), _packed(c & 15, 4, 8), _packed(c >> 4, 2, 4), d,
    ),
    "Q4_K": lambda d, e, c, k, q: (d, e, _scales(c, k), _packed(q, 4, 32)),
    "Q5_K": lambda d, e, c, k, q: (d, e, _scales(c, k), _packed(q >> 4, 1, 32), _packed(q & 15, 4, 32)),
    "Q6_K": lambda d, e, c, k, q: (_packed(q & 15, 4, 64), _packed(q >> 4, 2, 32), c ^ 128, d),
}  # fmt: skip
