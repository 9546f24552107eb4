"""How well a model answers: nats a token, perplexity, bits per byte, accuracy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..decoding.slots import evaluating
from ..nn.sublayer import ModelOp
from .batch import Batch
from .objectives import LossOf
from .update import Precision, autocast


@dataclass(frozen=True)
class Score:
    """How well a model answers what held-out data asks."""

    nats: float
    """Code length of all that was predicted."""
    tokens: int
    """How many tokens that was."""
    bytes: int
    """Bytes of the text; 0 where they are not known."""
    right: int | None = None
    """How many of `tokens` were answered right, where that was counted (classes, tags)."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def bits(self) -> float:
        """Bits a token."""
        return self.loss / math.log(2)

    @property
    def accuracy(self) -> float:
        """Share of right answers; NaN where that was not counted."""
        return math.nan if self.right is None else self.right / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits of code a byte of text, which compares models whose tokens differ; the ends of documents count too."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan

    def described(self, unit: str = "nats", answer: str = "token") -> str:
        """In words: what is known of it; unit and answer are the objective's."""
        if self.right is not None:
            return f"{self.accuracy:.2%} of {self.tokens:,} held-out answers right, {self.loss:.4f} nats each"
        said = f"{self.loss:.4f} {unit} a {answer}"
        if unit == "nats":
            said += f", perplexity {self.perplexity:.2f}"
        return f"{said}, {self.bits_per_byte:.4f} bits per byte on held-out text" if self.bytes else f"{said}, held out"


@torch.inference_mode()
def evaluate(model: ModelOp, batches: Iterable[Batch], objective: LossOf, precision: Precision = "fp32") -> Score:
    """The score on all that the batches ask, without bytes, the model being in evaluation mode."""
    device = next(model.parameters()).device
    total = torch.zeros(3, dtype=torch.float64, device=device)
    counted = False
    with evaluating(model):
        for batch in batches:
            with autocast(device, precision):
                loss = objective(model, batch.to(device))
            total[0] += loss.nats
            total[1] += loss.tokens
            if loss.right is not None:
                total[2] += loss.right
                counted = True
    nats, tokens, right = total.tolist()
    return Score(nats, int(tokens), 0, int(right) if counted else None)
