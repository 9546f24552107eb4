"""loss.png: what is drawn where, read back from the figure that is saved."""

import math
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from sublayer.errors import SublayerError
from sublayer.train.metrics import Evaluated, Metrics, Record, Sample
from sublayer.train.plot import plot_loss


def step(number: int, loss: float, tokens: int = 100) -> Metrics:
    return Metrics(number, loss, 1.0, 1e-3, tokens, 0.1)


@pytest.fixture
def axes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """plot_loss, and then the axes of what it has drawn."""
    saved: list[Any] = []
    save = Figure.savefig

    def noted(self: Figure, *args: Any, **options: Any) -> None:
        saved.append(self)
        save(self, *args, **options | {"dpi": 20})

    monkeypatch.setattr(Figure, "savefig", noted)

    def draw(records: list[Record], **options: Any) -> Any:
        plot_loss(tmp_path / "loss.png", records, **options)
        assert (tmp_path / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
        return saved[-1].axes[0]

    return draw


def lines(axes: Any) -> dict[str, Any]:
    return {line.get_label(): line for line in axes.lines}


def test_the_axis_is_tokens_and_evaluations_stand_where_they_were_made(axes: Any) -> None:
    records = [
        Evaluated(0, 6.0, 1.0, 2.5), step(1, 5.0, 100), step(2, 4.0, 300), Evaluated(2, 4.5, 1.0, 2.0), Sample(2, "x"),
        step(3, 3.0, 200), Evaluated(3, 3.5, 1.0, math.nan), step(4, 2.0),
    ]  # fmt: skip
    drawn = axes(records)
    assert lines(drawn)["held out"].get_xydata().tolist() == [[0, 6], [400, 4.5], [600, 3.5]]
    assert drawn.lines[0].get_xydata().tolist() == [[100, 5], [400, 4], [600, 3], [700, 2]]
    assert [line.get_alpha() for line in drawn.lines] == [0.25, None, None]
    assert drawn.get_xlim()[0] == 0
    assert drawn.get_xlim()[1] == pytest.approx(700, rel=0.05)
    assert (drawn.get_xlabel(), drawn.get_ylabel()) == ("tokens trained on", "loss, nats per token")
    assert [text.get_text() for text in drawn.texts] == ["3.500"]


def test_bits_per_byte_are_another_unit_of_the_same(axes: Any) -> None:
    records: list[Record] = [step(1, 5.0), Evaluated(1, 4.0, 1.0, 2.0), step(2, 4.0), Evaluated(2, 3.0, 1.0, math.nan)]
    drawn = axes(records, bytes_per_token=3.0, baselines={"xz -9": 1.75})
    assert drawn.lines[0].get_ydata().tolist() == pytest.approx([5 / math.log(2) / 3, 4 / math.log(2) / 3])
    assert lines(drawn)["held out"].get_xydata().tolist() == [[100, 2]]
    assert drawn.get_ylabel() == "bits per byte"


def test_the_running_mean_is_over_a_fiftieth_and_knows_no_nan(axes: Any) -> None:
    losses = np.random.default_rng(0).normal(3, 1, 1000)
    losses[500] = math.nan
    drawn = axes([step(i + 1, float(loss)) for i, loss in enumerate(losses)])
    mean = lines(drawn)["training, running mean"].get_ydata()
    assert len(mean) == 1000
    assert mean[300] == pytest.approx(losses[290:311].mean())
    assert mean[505] == pytest.approx(np.nanmean(losses[495:516]))
    assert (mean[0], mean[-1]) == pytest.approx((losses[0], losses[-1]))
    assert mean[3] == pytest.approx(losses[:7].mean())
    assert np.isnan(drawn.lines[0].get_ydata()[500])


def test_one_step_is_a_point(axes: Any) -> None:
    assert lines(axes([step(1, 2.0)]))["training, running mean"].get_marker() == "o"
    assert lines(axes([step(1, 2.0), step(2, 1.0)]))["training, running mean"].get_marker() == "None"


def test_a_long_run_is_thinned_and_keeps_its_last_step(axes: Any) -> None:
    drawn = axes([step(i + 1, 3.0 + i) for i in range(9002)])
    x, y = drawn.lines[0].get_data()
    assert len(x) == 3001
    assert (x[-1], y[-1]) == (900_200, 9004)
    assert (x[0], y[0]) == (200, 4)


def test_baselines_are_named_lines_within_the_picture(axes: Any) -> None:
    drawn = axes([step(1, 3.0), step(2, 2.0)], baselines={"5-gram": 1.5, "xz $x$ [b]": 4.0})
    assert [line.get_ydata()[0] for line in drawn.lines[2:]] == [1.5, 4.0]
    assert [text.get_text() for text in drawn.texts] == ["5-gram 1.500", "xz $x$ [b] 4.000"]
    assert not any(text.get_parse_math() for text in drawn.texts)
    low, high = drawn.get_ylim()
    assert low < 1.5 < 4.0 < high


def test_the_first_fall_does_not_set_the_scale(axes: Any) -> None:
    """From 11 to 3 within 20 of 1,000 steps; then from 3 to 2."""
    records: list[Record] = [step(i + 1, 11.0 if i < 20 else 3.0 - i / 1000) for i in range(1000)]
    low, high = axes([Evaluated(0, 11.0, 1.0, 1.0), *records, Evaluated(1000, 2.5, 1.0, 1.0)]).get_ylim()
    assert 2.95 < high < 3.1
    assert 1.9 < low < 2.001
    assert axes([Evaluated(0, 11.0, 1.0, 1.0), *records, Evaluated(500, 4.0, 1.0, 1.0)]).get_ylim()[1] > 4


@pytest.mark.parametrize(
    "records", [[], [Sample(0, "x")], [step(1, math.nan)], [step(1, 2.0)], [step(1, 2.0, 0)], [Evaluated(0, 5.0, 1, 1)]]
)
def test_little_or_nothing_is_drawn_all_the_same(axes: Any, records: list[Record]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low, high = axes(records).get_ylim()
    assert low < high


def test_the_picture_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "loss.png"
    plot_loss(path, [step(1, 2.0)])
    before = path.read_bytes()

    def full(self: Figure, beside: Path, **options: Any) -> None:
        beside.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full)
    with pytest.raises(SublayerError, match="loss.png: cannot be written: No space left"):
        plot_loss(path, [step(1, 3.0)])
    assert path.read_bytes() == before
    assert [each.name for each in tmp_path.iterdir()] == ["loss.png"]


def test_pyplot_is_not_used(axes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps figures until they are closed, and may look for a display."""
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    axes([step(1, 2.0)])
