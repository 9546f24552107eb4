"""How well a model predicts text: nats a token, perplexity, bits per byte."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from ..nn.sublayer import ModelOp
from .objectives import Batch, Objective
from .update import Precision, autocast


@dataclass(frozen=True)
class Score:
    """How well a model predicts text."""

    nats: float
    """Code length of all that was predicted."""
    tokens: int
    """How many tokens that was."""
    bytes: int
    """Bytes of the text; 0 where they are not known."""

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / max(self.tokens, 1)

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700.0))

    @property
    def bits_per_byte(self) -> float:
        """Bits of code a byte of text, which compares models whose tokens differ; the ends of documents count too."""
        return self.nats / math.log(2) / self.bytes if self.bytes else math.nan


@torch.inference_mode()
def evaluate(
    model: ModelOp, batches: Iterable[Batch], objective: Objective, precision: Precision = "fp32"
) -> tuple[float, int]:
    """(nats, tokens) of all that the batches ask, the model being in evaluation mode."""
    device = next(model.parameters()).device
    total = torch.zeros(2, dtype=torch.float64, device=device)
    with evaluating(model):
        for batch in batches:
            with autocast(device, precision):
                loss = objective(model, batch.to(device))
            total[0] += loss.nats
            total[1] += loss.tokens
    nats, tokens = total.tolist()
    return nats, int(tokens)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, and the former one after it."""
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)
