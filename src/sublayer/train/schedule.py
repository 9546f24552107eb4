"""Learning rates over time: pure functions of the step, so that a resumed run needs no state to go on with them."""

from __future__ import annotations

import math
from typing import Literal

from ..spec import Spec

Shape = Literal["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


class Schedule(Spec):
    """The share of the peak rate at each step: a linear warm-up, then the shape. No step has rate 0."""

    shape: Shape = "cosine"
    """After the warm-up. "constant"; "linear" and "cosine": falling to `final` at the end of the run; "wsd": constant,
    then falling over the last `cooldown` of the run as 1 − sqrt does (arXiv 2405.18392); "inverse_sqrt":
    falling as 1 / sqrt(step) whatever the length of the run (Vaswani et al. 2017, eq. 3)."""
    warmup: int = 100
    """Steps before the peak; Adam's first estimates of the mean square are too rough for it."""
    final: float = 0.0
    """The share that linear, cosine and wsd head for; 0 was best in arXiv 2502.15938, nanoGPT takes 0.1."""
    cooldown: float | None = None
    """Share of the run in which wsd falls; None: 0.2, with which arXiv 2405.18392 matched cosine."""

    def check(self) -> None:
        falls = self.shape in ("linear", "cosine", "wsd")
        self.require(self.warmup >= 0, f"warmup is a number of steps, got {self.warmup}")
        self.require(0 <= self.final <= 1, f"final is a share of the peak rate from 0 to 1, got {self.final}")
        self.require(falls or self.final == 0, f"final={self.final} has no meaning for shape={self.shape!r}")
        self.require(
            self.cooldown is None or 0 < self.cooldown <= 1,
            f"cooldown is a share of the run above 0 and at most 1, got {self.cooldown}",
        )
        self.require(
            self.shape == "wsd" or self.cooldown is None, f"cooldown={self.cooldown} has no meaning but for shape='wsd'"
        )

    def factor(self, step: int, steps: int) -> float:
        """The share of the peak rate at `step`, counted from 0, of a run of `steps`."""
        if self.shape == "inverse_sqrt":
            return inverse_sqrt(step, self.warmup)
        if step < self.warmup:
            return (step + 1) / (self.warmup + 1)
        start = self.warmup
        if self.shape == "wsd":
            start = max(start, steps - round((0.2 if self.cooldown is None else self.cooldown) * steps))
        done = min(max((step - start) / max(steps - start, 1), 0.0), 1.0)
        return self.final + (1 - self.final) * _left(self.shape, done)


def _left(shape: Shape, done: float) -> float:
    """What is left of the fall after a share `done` of it."""
    if shape == "linear":
        return 1 - done
    if shape == "cosine":
        return (1 + math.cos(math.pi * done)) / 2
    return 1 - math.sqrt(done) if shape == "wsd" else 1.0


def inverse_sqrt(step: int, warmup: int) -> float:
    """min((step + 1) / warmup, sqrt(warmup / (step + 1))): 2017's rate (eq. 3) as a share of its peak."""
    number, warmup = step + 1, max(warmup, 1)  # the paper counts steps from 1
    return min(number / warmup, math.sqrt(warmup / number))


def transformer_rate(dim: int, warmup: int) -> float:
    """The peak of 2017's rate, reached at step `warmup`: dim^−1/2 · warmup^−1/2 (Vaswani et al. 2017, eq. 3)."""
    return (dim * warmup) ** -0.5
