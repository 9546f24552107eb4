"""Numbers as ids: errors of at most half a bin, what is out of range, what is no number."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.data.bins import Bins, QuantileBins, Series
from sublayer.errors import InputError, SpecError
from sublayer.spec import Spec

SLACK = 1e-12  # of the range: rounding in fp64


@settings(max_examples=60, deadline=None)
@given(
    low=st.floats(-1e6, 1e6), span=st.floats(1e-3, 1e6), count=st.integers(1, 300),
    shares=st.lists(st.floats(0, 1), min_size=1, max_size=20),
)  # fmt: skip
def test_a_number_comes_back_within_half_a_bin(low: float, span: float, count: int, shares: list[float]) -> None:
    bins = Bins((low,), (low + span,), count, first=7)
    values = np.clip(low + span * np.array(shares)[:, None], low, low + span)
    ids = bins.encode(values)
    assert ids.min() >= 7
    assert ids.max() < 7 + count
    assert np.abs(bins.decode(ids) - values).max() <= float(bins.width[0]) / 2 + SLACK * (abs(low) + span)
    assert (np.diff(ids[np.argsort(values[:, 0]), 0]) >= 0).all()


def test_ids_and_middles_are_those_written_out() -> None:
    """Four bins of each of two ranges: edges belong to the bin above, the last one to the last bin."""
    bins = Bins((0.0, -1.0), (4.0, 1.0), 4, first=10)
    assert bins.encode([[0, -1], [0.99, -0.51], [1, -0.5], [4, 1]]).tolist() == [[10, 10], [10, 10], [11, 11], [13, 13]]
    assert bins.decode([[10, 10], [13, 13]]).tolist() == [[0.5, -0.75], [3.5, 0.75]]
    assert bins.size == 14
    every = np.stack([np.arange(10, 14)] * 2, 1)
    assert np.array_equal(bins.encode(bins.decode(every)), every)


def test_what_is_out_of_range_is_clipped_and_nan_is_refused() -> None:
    bins = Bins((0.0,), (1.0,), 8)
    assert bins.encode([[-3], [7], [np.inf], [-np.inf]])[:, 0].tolist() == [0, 7, 7, 0]
    with pytest.raises(InputError, match="NaN in dimension 0"):
        bins.encode([[np.nan]])
    with pytest.raises(InputError, match=r"values are \[…, 1\], got \[2\]"):
        bins.encode([0.0, 1.0])
    with pytest.raises(InputError, match="id 8 is no bin's: those are 0 to 7"):
        bins.decode([[8]])
    with pytest.raises(InputError, match="whole numbers"):
        bins.decode([[1.5]])


@pytest.mark.parametrize(
    ("low", "high", "count"),
    [((0.0,), (0.0,), 4), ((1.0,), (0.0,), 4), ((0.0,), (1.0, 2.0), 4), ((1e16,), (1e16 + 2,), 256),
     ((0.0,), (1.0,), 0), ((-1.7e308,), (1.7e308,), 1)],
)  # fmt: skip
def test_ranges_that_hold_no_bins_are_refused(low: tuple[float, ...], high: tuple[float, ...], count: int) -> None:
    with pytest.raises(SpecError):
        Bins(low, high, count)


def test_ranges_are_the_quantiles_of_each_dimension() -> None:
    values = np.stack([np.linspace(0, 100, 1001), np.full(1001, 3.0)], 1)
    bins = Bins.spanning(values, 16, first=5)
    assert bins.low == pytest.approx((1.0, 2.5))
    assert bins.high == pytest.approx((99.0, 3.5))
    assert Spec.from_json(bins.to_json()) == bins
    with pytest.raises(InputError, match="finite values"):
        Bins.spanning(values * np.nan)


def test_quantile_bins_hold_as_many_values_each() -> None:
    values = np.random.default_rng(0).exponential(size=4000)
    bins = QuantileBins.of(values, 8, first=2)
    ids = bins.encode(values)
    assert np.bincount(ids, minlength=10)[2:].tolist() == [500] * 8
    edges = np.array(bins.edges)
    widths = np.diff(edges)[ids - 2]
    assert (np.abs(bins.decode(ids) - values) <= widths / 2 * (1 + 1e-12)).all()
    assert bins.encode([-1.0, 1e9, np.inf]).tolist() == [2, 9, 9]
    assert QuantileBins.of([1, 1, 1, 1, 2, 3], 6).count < 6
    with pytest.raises(InputError, match="all values are 1.0"):
        QuantileBins.of([1, 1], 3)
    with pytest.raises(InputError, match="NaN"):
        bins.encode(np.nan)


def test_a_series_is_scaled_by_the_mean_size_of_its_context() -> None:
    """The paper's equations, written out: nearest of the middles from −15 to 15."""
    series = Series(count=50)
    context = np.array([[2.0, -4.0, np.nan, 6.0], [0.0, 0.0, 0.0, 0.0]])
    scale = series.scale(context)
    assert scale.tolist() == [[4.0], [1.0]]
    assert series.scale([np.nan]).tolist() == [1.0]
    middles = np.linspace(-15, 15, 50)
    ids = series.encode(context, scale)
    expected = [2 + int(np.abs(middles - x / 4).argmin()) for x in (2.0, -4.0, 6.0)]
    assert ids[0].tolist() == [*expected[:2], series.PAD, expected[2]]
    back = series.decode(ids, scale)
    assert np.isnan(back[0, 2])
    assert back[0, [0, 1, 3]].tolist() == pytest.approx([4 * middles[i - 2] for i in expected])
    assert np.isnan(series.decode([series.END], 1.0)).all()
    assert series.encode([1e9, -1e9], 1.0).tolist() == [51, 2]
    assert series.size == 52
    assert Series().size == 4096
    with pytest.raises(InputError, match="infinite"):
        series.scale([np.inf])


def test_a_series_comes_back_within_half_a_bin() -> None:
    values = np.random.default_rng(1).normal(size=(3, 200)) * 1000
    series = Series(count=301)
    scale = series.scale(values)
    error = np.abs(series.decode(series.encode(values, scale), scale) - values)
    assert (error <= scale * series.bins.width / 2 * (1 + 1e-9)).all()
