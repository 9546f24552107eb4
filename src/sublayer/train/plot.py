"""loss.png: what a run has learned, over the tokens it was trained on."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SublayerError
from ..files import replacing
from .metrics import Evaluated, Metrics, Record

GREY, BLUE, ORANGE = "#7d8590", "#3b82d6", "#e8833a"  # seen on white as on black
POINTS = 4000  # more columns than the picture has


def plot_loss(
    path: Path | str,
    records: Sequence[Record],
    *,
    baselines: Mapping[str, float] | None = None,
    bytes_per_token: float | None = None,
    unit: str = "nats",
    answer: str = "token",
) -> None:
    """Draws training loss (each step faintly, a running mean clearly) and held-out loss as a PNG.

    In nats a token, or the objective's unit and answer; with bytes_per_token, the bytes of text that a token stands
    for, in bits a byte. baselines: what others reach, in the same unit, by name. The steep fall of the first steps may
    lie above the picture.
    Raises SublayerError where the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure((8, 4.5), layout="constrained")
    axes: Any = figure.add_subplot()
    tokens, losses, held = _series(records, bytes_per_token)
    faint, clear = _thinned(tokens, losses), _thinned(tokens, _smooth(losses))
    axes.plot(*faint, color=BLUE, alpha=0.25, linewidth=0.8)
    marker = "o" if len(clear[0]) == 1 else None  # a line of one point is none
    axes.plot(*clear, color=BLUE, linewidth=1.6, marker=marker, label="training, running mean")
    if held:
        axes.plot(*zip(*held, strict=True), "o-", color=ORANGE, linewidth=1, markersize=4, label="held out")
        x, y = held[-1]
        axes.annotate(f"{y:.3f}", (x, y), (0, 6), textcoords="offset points", color=ORANGE, ha="right", va="bottom")
    for name, value in (baselines or {}).items():
        axes.axhline(value, color=GREY, linestyle="--", linewidth=1)
        place = {"ha": "right", "va": "bottom", "color": GREY, "fontsize": 9}
        axes.text(0.995, value, f"{name} {value:.3f}", transform=axes.get_yaxis_transform(), parse_math=False, **place)
    points = [*zip(*clear, strict=True), *held]
    axes.set_ylim(*_limits(points, [*(baselines or {}).values()]))
    axes.set_xlim(0, 1.015 * float(tokens[-1]) if tokens.any() else 1.0)
    axes.set_xlabel(f"{answer}s trained on", color=GREY)
    axes.set_ylabel("bits per byte" if bytes_per_token else f"loss, {unit} per {answer}", color=GREY)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axes.tick_params(colors=GREY, length=0)
    axes.grid(color=GREY, alpha=0.2)
    axes.spines[:].set_visible(False)
    figure.legend(frameon=False, labelcolor=GREY, loc="outside upper right", ncols=2)
    try:
        with replacing(path) as beside, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a box stands for it
            figure.savefig(beside, format="png", dpi=150, transparent=True)
    except OSError as error:
        raise SublayerError(f"{path}: cannot be written: {error.strerror}") from None


def _series(
    records: Sequence[Record], bytes_per_token: float | None
) -> tuple[np.ndarray, np.ndarray, list[tuple[float, float]]]:
    """Tokens up to each step and its loss, and (tokens, loss) of each evaluation."""
    steps = [made for made in records if isinstance(made, Metrics)]
    tokens = np.cumsum([made.tokens for made in steps], dtype=np.float64)
    losses = np.array([made.loss for made in steps], dtype=np.float64)
    if bytes_per_token:
        losses /= math.log(2) * bytes_per_token
    numbers = np.array([made.step for made in steps])
    held: list[tuple[float, float]] = []
    for made in records:
        if isinstance(made, Evaluated):
            value = made.bits_per_byte if bytes_per_token else made.held_loss
            done = int(np.searchsorted(numbers, made.step, side="right"))
            if math.isfinite(value):
                held.append((float(tokens[done - 1]) if done else 0.0, value))
    return tokens, losses, held


def _smooth(values: np.ndarray) -> np.ndarray:
    """The mean of a fiftieth of the series around each value, fewer at its ends; values not finite are left out."""
    half = len(values) // 100
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    # As far to one side as to the other, or the ends would lie above and below the curve.
    reach = np.minimum(half, np.minimum(np.arange(len(values)), np.arange(len(values))[::-1]))
    low, high = np.arange(len(values)) - reach, np.arange(len(values)) + reach + 1
    found = counts[high] - counts[low]
    return np.where(found > 0, (sums[high] - sums[low]) / np.maximum(found, 1), np.nan)


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Every so many points, the last one included, so that there are no more than can be seen."""
    every = -(-len(x) // POINTS) if len(x) else 1
    return x[::-1][::every][::-1], y[::-1][::every][::-1]


def _limits(points: Sequence[tuple[float, float]], baselines: Sequence[float]) -> tuple[float, float]:
    """Of the vertical axis: from the least value to the largest after a twentieth of the tokens."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite and not baselines:
        return 0.0, 1.0
    start = 0.05 * max((x for x, _ in finite), default=0.0)
    low = min([*(y for _, y in finite), *baselines])
    high = max([*(y for x, y in finite if x >= start), *baselines])
    margin = 0.06 * (high - low) or 0.1
    return low - margin, high + margin
