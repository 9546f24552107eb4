"""Objectives on images: their class, and the noise that was added to them.

B images, C channels, H and W height and width.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.images import Pictures
from ..decoding.diffuse import STEPS, signal_share
from ..errors import InputError, UsageError
from ..nn.sublayer import Model, ModelOp
from .batch import Batch
from .examples import class_loss
from .loss import Loss
from .objectives import Objective, Reads


class OnImages(Objective):
    """Base of what is trained on labelled images."""

    reads: ClassVar[Reads] = "images"
    uses: ClassVar[tuple[str, ...]] = ("judge", "size", "channels", "augment", "held")

    def collate(self, pictures: Pictures, classes: int, generator: torch.Generator) -> Batch:
        """The batch of some images; `classes` is how many there are."""
        raise UsageError(f"objective: {self.kind} makes no batches")


class ImageClassification(OnImages):
    """One of C classes for an image; its model's head pools."""

    kind: ClassVar[str] = "image_classification"
    answer: ClassVar[str] = "image"
    smoothing: float = 0.0
    """Label smoothing."""

    def check(self) -> None:
        self.require(0 <= self.smoothing < 1, f"smoothing is a share from 0 to below 1, got {self.smoothing}")

    def collate(self, pictures: Pictures, classes: int, generator: torch.Generator) -> Batch:
        return Batch(pictures.images, pictures.labels)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        return class_loss(model, batch, self.smoothing)


class Diffusion(OnImages):
    """What was added to an image, from the sum: noise (DDPM, arXiv 2006.11239, eq. 14), or the velocity from image to
    noise on a straight line between them (flow matching, arXiv 2210.02747, eq. 23; rectified flow, 2209.03003).

    The model takes {"images", "time", "classes"} and answers in the images' shape, as DiT does. Its time runs from 0
    (image) to 1,000 (noise) in both forms. The loss is the mean squared error of a value.
    """

    kind: ClassVar[str] = "diffusion"
    unit: ClassVar[str] = "squared error"
    answer: ClassVar[str] = "value"
    target: Literal["noise", "velocity"] = "noise"
    """What is answered."""
    no_class: float = 0.1
    """Share of images shown without their class, for guidance without a classifier (arXiv 2207.12598)."""

    def check(self) -> None:
        self.require(0 <= self.no_class <= 1, f"no_class is a share from 0 to 1, got {self.no_class}")

    def fits(self, model: Model) -> None:
        taken = getattr(model.embedding, "classes", None)
        if taken is None:
            raise UsageError(f"objective: {self.kind} trains models of noised images with a time and a class, as dit")
        images = getattr(getattr(model.embedding, "patches", None), "channels", None)
        answers = getattr(model.head, "channels", images)
        if answers != images:
            raise UsageError(
                f"objective: {self.kind}, but the model answers {answers} channels to images of {images}: "
                "model.learn_sigma=false gives one that answers in their shape"
            )

    def collate(self, pictures: Pictures, classes: int, generator: torch.Generator) -> Batch:
        images, B = pictures.images, len(pictures.labels)
        noise = torch.randn(images.shape, generator=generator)
        if self.target == "noise":
            time = torch.randint(STEPS, (B,), generator=generator).float()
            kept = signal_share(time).view(-1, 1, 1, 1)
            noised, answer = kept.sqrt() * images + (1 - kept).sqrt() * noise, noise
        else:
            time = torch.rand(B, generator=generator) * STEPS
            share = (time / STEPS).view(-1, 1, 1, 1)
            noised, answer = (1 - share) * images + share * noise, noise - images
        hidden = torch.rand(B, generator=generator) < self.no_class
        told = pictures.labels.masked_fill(hidden, classes)
        return Batch({"images": noised, "time": time, "classes": told}, answer)

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        found: Any = model(batch.inputs)
        made, extras = found if isinstance(found, tuple) else (found, {})
        if made.shape != batch.labels.shape:
            raise InputError(
                f"the model answers {list(made.shape)} to images {list(batch.labels.shape)}: give one that answers in"
                " their shape (for dit: model.learn_sigma = false)"
            )
        error = F.mse_loss(made.float(), batch.labels, reduction="sum")
        extra = sum(extras.values()) * made.numel()
        return Loss(error + extra, made.numel(), extra.detach() if isinstance(extra, Tensor) else extra)
