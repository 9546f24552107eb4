"""One optimiser step.

It is the same on one rank and on many: each rank sums the loss of its rows over all micro-batches, and the
gradient of the whole is divided once, by the tokens of the whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from ..nn.moe import balance
from ..nn.sublayer import ModelOp
from .batch import Batch
from .objectives import LossOf
from .optim import Optimizer, clip
from .process import world

Precision = Literal["fp32", "bf16", "fp16"]
AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Update:
    """What one optimiser step was."""

    loss: float
    """Nats a token, over all rows of all ranks; 0 where no token counted."""
    tokens: int
    """Tokens that counted, over all ranks."""
    norm: float
    """Of the whole gradient, before clipping."""
    taken: bool
    """Whether the weights changed: not where no token counted, or where loss or gradient are not finite."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


class Scaler:
    """Loss scaling for fp16, where gradients below 6e-8 vanish: doubled after 2,000 good steps, halved after a bad one.

    What is scaled is a sum over thousands of tokens, so the scale begins small. Source: arXiv 1710.03740, section 3.2.
    """

    LEAST = 2.0**-14
    """Below it, it is not the scale that makes gradients overflow."""

    def __init__(self, scale: float = 16.0, good: int = 0) -> None:
        self.scale, self.good = scale, good

    def adjust(self, finite: bool) -> None:
        self.good = self.good + 1 if finite else 0
        if not finite:
            self.scale = max(self.scale / 2, self.LEAST / 2)
        elif self.good == 2000:
            self.scale, self.good = self.scale * 2, 0


def update(
    model: ModelOp,
    batches: Iterable[Batch],
    objective: LossOf,
    optimizer: Optimizer,
    *,
    limit: float | None = 1.0,
    precision: Precision = "fp32",
    scaler: Scaler | None = None,
) -> Update:
    """One optimiser step over the micro-batches of this rank, in a process group together with the other ranks.

    The gradient is that of sum(losses) / sum(tokens) over all of them, however they were cut, clipped at the norm
    `limit`. The gradients are cleared before and after. `scaler` is needed for fp16.
    """
    model.train()
    optimizer.zero_grad()
    parameters = optimizer.parameters()
    device, scale = parameters[0].device, scaler.scale if scaler is not None else 1.0
    total = torch.zeros(2, dtype=torch.float64, device=device)  # nats, tokens
    for batch in batches:
        with autocast(device, precision):
            loss = objective(model, batch.to(device))
        if loss.sum.requires_grad:
            (loss.sum * scale).backward()
        total[0] += loss.nats
        total[1] += loss.tokens
    _add_ranks([total])
    nats, tokens = total.tolist()
    if tokens == 0:
        balance(model, move=False)
        optimizer.zero_grad()
        return Update(0.0, 0, 0.0, taken=False)
    if world() > 1:  # a rank whose rows hold no token has no gradient, and still has to take part
        having = torch.tensor([float(p.grad is not None) for p in parameters], device=device)
        _add_ranks([having])
        for parameter, count in zip(parameters, having.tolist(), strict=True):
            if count and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        _add_ranks([p.grad for p in parameters if p.grad is not None])
    norm = float(clip(parameters, math.inf if limit is None else limit, 1 / (tokens * scale)))
    finite = math.isfinite(norm) and math.isfinite(nats)
    if finite:
        optimizer.step()
    if scaler is not None:
        scaler.adjust(finite)
    balance(model, lambda load: _add_ranks([load]), move=finite)
    optimizer.zero_grad()
    return Update(nats / tokens, int(tokens), norm, taken=finite)


def _add_ranks(tensors: list[Tensor]) -> None:
    if world() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def autocast(device: torch.device, precision: Precision) -> Any:
    """The context in which matrix products run in `precision`."""
    return torch.autocast(device.type, AUTOCAST.get(precision, torch.bfloat16), enabled=precision in AUTOCAST)
