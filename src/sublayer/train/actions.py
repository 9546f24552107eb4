"""Behaviour cloning: the actions that followed an observation, as the next tokens of one stream.

B rows, L length, I images of an observation, P patches of an image, A dimensions of an action.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.examples import padded
from ..errors import UsageError
from ..nn.sublayer import Model, ModelOp
from ..recipes.actions import images_first
from ..step import Step
from .batch import Batch
from .language import next_token
from .loss import IGNORED, Loss
from .objectives import Objective, Reads, refuse_sighted


class BehaviourCloning(Objective):
    """Each bin of the actions that followed an image and an instruction, which are read and not told (RT-2, arXiv
    2307.15818, section 3.2). Without images and instructions it is the next value of a time series."""

    kind: ClassVar[str] = "behaviour_cloning"
    reads: ClassVar[Reads] = "episodes"
    uses: ClassVar[tuple[str, ...]] = ("prefix", "judge", "length", "held")
    bins: int = 256
    """Bins of each dimension of an action."""
    tails: float = 0.01
    """Share of the training actions beyond each end of a dimension's range, which are clipped."""
    steps: int = 1
    """How many steps' actions are told from one observation."""
    smoothing: float = 0.0
    """Label smoothing."""

    def check(self) -> None:
        self.require(self.bins >= 2 and self.steps >= 1, f"bins={self.bins} is 2 or more, steps={self.steps} 1 or more")
        self.require(0 <= self.tails < 0.5, f"tails is a share from 0 to below 0.5, got {self.tails}")
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def fits(self, model: Model) -> None:
        if model.decoder is None or model.encoder is not None or model.head is None:
            raise UsageError(f"objective: {self.kind} trains decoders with a head, and nothing else")
        refuse_sighted(self, model)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return next_token(model, _in_stream(model.spec, batch), smoothing=self.smoothing)


def told(
    instructions: Sequence[Sequence[int]], actions: Sequence[Sequence[int]], images: Tensor | None = None
) -> Batch:
    """The batch of some observations: each row's instruction and then its actions, of which each is asked.

    The first action is told by the token before it, so without images a row needs an instruction or asks one less.
    images: float [B, I, C, H, W]; their places in the stream are made when the model is known.
    """
    rows = [torch.tensor([*text, *done]) for text, done in zip(instructions, actions, strict=True)]
    ids, segment = padded(rows)
    labels = torch.full_like(ids, IGNORED)
    for i, (row, text) in enumerate(zip(rows, instructions, strict=True)):
        labels[i, max(len(text) - 1, 0) : len(row) - 1] = row[max(len(text), 1) :]
    inputs = ids if images is None else {"ids": ids, "images": images}
    return Batch(inputs, labels, Step(segment=segment))


def _in_stream(model: Model, batch: Batch) -> Batch:
    """The same with a place for each patch before the ids."""
    if isinstance(batch.inputs, Tensor):
        return batch
    inputs: Any = images_first(model, batch.inputs["ids"], batch.inputs["images"])
    places = inputs["ids"].shape[1] - batch.labels.shape[1]
    step, labels = batch.step, F.pad(batch.labels, (places, 0), value=IGNORED)
    if step.segment is not None:
        step = step.replace(segment=torch.cat([step.segment[:, :1].expand(-1, places), step.segment], 1))
    return replace(batch, inputs=inputs, labels=labels, step=step)
