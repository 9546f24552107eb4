"""Bins: numbers as ids of a vocabulary, and back. Joint angles for RT-2, values of a time series for Chronos.

Out of range is clipped, infinities too, as RT-1 and Chronos do; NaN is refused, or is a missing value of a series.
Within the range a number comes back with an error of at most half its bin's width (and what rounding in fp64 adds).

A dimensions of an action, T values of a series.
"""

from __future__ import annotations

import math
from typing import Any, Self

import numpy as np

from ..errors import InputError
from ..spec import Spec

Numbers = np.ndarray[Any, np.dtype[Any]]


class Bins(Spec):
    """`count` bins of equal width for each dimension; all dimensions share the ids first … first + count − 1.

    Source: 256 bins a dimension in RT-1 (Brohan et al. 2022, arXiv 2212.06817, section 5.2) and RT-2 (2307.15818).
    """

    low: tuple[float, ...]
    """The lower end of each dimension's range."""
    high: tuple[float, ...]
    """The upper end."""
    count: int = 256
    """Bins of each dimension."""
    first: int = 0
    """The id of the first bin: how many ids stand before them, for text."""

    def check(self) -> None:
        self.require(len(self.low) == len(self.high) > 0, f"{len(self.low)} lower ends and {len(self.high)} upper ones")
        self.require(
            self.count >= 1 and self.first >= 0, f"count={self.count} of at least 1, first={self.first} from 0"
        )
        for low, high in zip(self.low, self.high, strict=True):
            width = (high - low) / self.count
            wide = math.isfinite(width) and low + width > low and high - width < high
            self.require(wide, f"a range from {low} to {high} has no {self.count} bins in fp64")

    @classmethod
    def spanning(cls, values: Numbers, count: int = 256, first: int = 0, tails: float = 0.01) -> Self:
        """Of values [N, A], between the quantiles tails and 1 − tails of each dimension (OpenVLA, arXiv 2406.09246,
        section 3.2); a dimension that never changes has a range of 1 around its value.

        Raises InputError for no values, or values that are not finite.
        """
        values = np.asarray(values, np.float64)
        if values.ndim != 2 or not values.size or not np.isfinite(values).all():
            raise InputError(f"ranges are taken of finite values [N, A], got {list(values.shape)}")
        if not 0 <= tails < 0.5:
            raise InputError(f"tails={tails} is a share from 0 to below 0.5")
        low, high = np.quantile(values, [tails, 1 - tails], axis=0)
        narrow = ~(high - low > 1e-9 * np.maximum(1, np.abs(high)))
        low, high = np.where(narrow, low - 0.5, low), np.where(narrow, high + 0.5, high)
        return cls(tuple(low.tolist()), tuple(high.tolist()), count, first)

    @property
    def size(self) -> int:
        """Ids in all, those before the bins counted."""
        return self.first + self.count

    @property
    def width(self) -> Numbers:
        """float64 [A]: of a bin."""
        return (np.array(self.high) - np.array(self.low)) / self.count

    def encode(self, values: Any) -> Numbers:
        """[…, A] → int64 ids. Raises InputError for NaN, or for another number of dimensions."""
        values = self._fits(np.asarray(values, np.float64))
        if np.isnan(values).any():
            raise InputError(f"NaN in dimension {int(np.argwhere(np.isnan(values))[0][-1])} is in no bin")
        inside = np.clip(values, self.low, self.high)
        place = np.floor((inside - self.low) / self.width).astype(np.int64)
        return np.clip(place, 0, self.count - 1) + self.first

    def decode(self, ids: Any) -> Numbers:
        """[…, A] → float64, the middle of each bin. Raises InputError for an id that is no bin's."""
        return np.array(self.low) + (self._fits(_places(ids, self.first, self.count)) + 0.5) * self.width

    def _fits(self, values: Numbers) -> Numbers:
        if not values.ndim or values.shape[-1] != len(self.low):
            raise InputError(f"values are […, {len(self.low)}], got {list(values.shape)}")
        return values


class QuantileBins(Spec):
    """Bins between given edges, for one dimension: by quantiles, each holds as many values.

    Chronos names them as the other choice (arXiv 2403.07815, section 3.1): fine where values are dense.
    """

    edges: tuple[float, ...]
    """Ascending, one more than bins."""
    first: int = 0
    """The id of the first bin."""

    def check(self) -> None:
        finite = all(map(math.isfinite, self.edges))
        rising = all(low < high for low, high in zip(self.edges, self.edges[1:], strict=False))
        self.require(len(self.edges) >= 2 and finite and rising, "edges are two or more finite numbers that rise")
        self.require(self.first >= 0, f"first={self.first} is from 0")

    @classmethod
    def of(cls, values: Any, count: int, first: int = 0) -> Self:
        """Of values of any shape; where so many are equal that edges meet, there are fewer bins.

        Raises InputError where fewer than two values differ, or one is not finite.
        """
        values = np.asarray(values, np.float64).ravel()
        if count < 1 or not values.size or not np.isfinite(values).all():
            raise InputError(f"quantiles are taken of finite values, and of 1 bin or more; got {values.size}, {count}")
        edges = np.unique(np.quantile(values, np.linspace(0, 1, count + 1)))
        if len(edges) < 2:
            raise InputError(f"all values are {edges[0]}: quantiles part nothing")
        return cls(tuple(edges.tolist()), first)

    @property
    def count(self) -> int:
        """Bins."""
        return len(self.edges) - 1

    def encode(self, values: Any) -> Numbers:
        """Any shape → int64 ids of it. Raises InputError for NaN."""
        values = np.asarray(values, np.float64)
        if np.isnan(values).any():
            raise InputError("NaN is in no bin")
        place = np.searchsorted(self.edges, values, side="right") - 1
        return np.clip(place, 0, self.count - 1).astype(np.int64) + self.first

    def decode(self, ids: Any) -> Numbers:
        """Any shape → float64, the middle of each bin. Raises InputError for an id that is no bin's."""
        place, edges = _places(ids, self.first, self.count), np.array(self.edges)
        return edges[place] + (edges[place + 1] - edges[place]) / 2


class Series(Spec):
    """A time series as ids: divided by its mean size, then in bins of equal width (Chronos, arXiv 2403.07815, 3.1).

    Ids: PAD 0 where a value is missing, END 1, then the bins. The paper's middles of bins lie evenly from −15 to 15.
    """

    count: int = 4094
    """Bins; with the two special ids, 4,096."""
    limit: float = 15.0
    """The middle of the last bin, in mean sizes; that of the first is −limit."""

    PAD = 0
    END = 1

    def check(self) -> None:
        self.require(self.count >= 2 and 0 < self.limit < math.inf, f"got count={self.count}, limit={self.limit}")

    @property
    def bins(self) -> Bins:
        """Of scaled values [T, 1]."""
        edge = self.limit + self.limit / (self.count - 1)
        return Bins((-edge,), (edge,), self.count, self.END + 1)

    @property
    def size(self) -> int:
        """Ids in all."""
        return self.bins.size

    def scale(self, context: Any) -> Numbers:
        """float64 [..., 1]: the mean of |x| over what is known of context [..., T]; 1 where that is nothing or 0.

        Raises InputError for infinities.
        """
        size = np.abs(np.asarray(context, np.float64))
        if np.isinf(size).any():
            raise InputError("an infinite value has no scale")
        known = ~np.isnan(size)
        total = np.where(known, size, 0).sum(-1, keepdims=True)
        mean = total / np.maximum(known.sum(-1, keepdims=True), 1)
        return np.where(mean > 0, mean, 1.0)

    def encode(self, values: Any, scale: Any) -> Numbers:
        """[..., T] and the scale of their context → int64 ids; NaN is PAD."""
        values = np.asarray(values, np.float64) / scale
        missing = np.isnan(values)
        ids = self.bins.encode(np.where(missing, 0, values)[..., None])[..., 0]
        return np.where(missing, self.PAD, ids)

    def decode(self, ids: Any, scale: Any) -> Numbers:
        """[..., T] → float64 in the series' own unit; NaN where an id is PAD or END."""
        ids = np.asarray(ids)
        special = (ids == self.PAD) | (ids == self.END)
        values = self.bins.decode(np.where(special, self.END + 1, ids)[..., None])[..., 0] * scale
        return np.where(special, np.nan, values)


def _places(ids: Any, first: int, count: int) -> Numbers:
    ids = np.asarray(ids)
    if ids.dtype.kind not in "iu":
        raise InputError(f"ids are whole numbers, got {ids.dtype}")
    outside = (ids < first) | (ids >= first + count)
    if outside.any():
        raise InputError(f"id {ids[outside][0]} is no bin's: those are {first} to {first + count - 1}")
    return ids.astype(np.int64) - first
