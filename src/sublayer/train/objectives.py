"""Objectives: functions (model, batch) → Loss(sum, tokens), each with the collator that makes its batches.

B rows, L length, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UsageError, nearest
from ..nn.sublayer import ModelOp
from ..step import Step
from .loss import IGNORED, Loss, head_loss

if TYPE_CHECKING:
    from ..data.batches import Rows

Objective = Callable[[ModelOp, "Batch"], Loss]


@dataclass(frozen=True)
class Batch:
    """What one forward pass of an objective reads."""

    ids: Tensor
    """[B, L] int64."""
    labels: Tensor
    """[B, L] int64: what each position predicts; -100 where nothing counts."""
    segment: Tensor | None
    """[B, L]: the document of each token, 0 for padding; None: a row is one document without padding."""

    def to(self, device: torch.device | str) -> Batch:
        """The same on another device."""
        moved = {field.name: getattr(self, field.name) for field in fields(self)}
        return replace(self, **{name: t.to(device, non_blocking=True) for name, t in moved.items() if t is not None})


def next_tokens(rows: Rows, end: int | None, *, segments: bool = True) -> Batch:
    """The batch that predicts each next token of rows (ids and segments [B, L + 1]).

    A document begins with `end`, so what follows a document's last token can be told too: it is `end`. Without such a
    token (None) nothing is asked there. segments=False: rows are read as running text, across documents.
    """
    ids, labels, segment = rows.ids[:, :-1], rows.ids[:, 1:], rows.segment
    asked = segment[:, 1:] != 0
    if not segments:
        segment = segment.clamp(max=1)
    elif end is None:
        asked = asked & (segment[:, 1:] == segment[:, :-1])
    else:
        asked = asked & ((segment[:, 1:] == segment[:, :-1]) | (labels == end))
    if not bool(asked.all()):
        labels = labels.masked_fill(~asked, IGNORED)
    inner = segment[:, :-1]
    return Batch(ids, labels, None if bool((inner == 1).all()) else inner)


def next_token(model: ModelOp, batch: Batch, *, z_loss: float = 0.0, smoothing: float = 0.0) -> Loss:
    """The code length of each next token, in nats, plus z_loss · logsumexp², plus what the model's ops add."""
    found = model(batch.ids, Step(segment=batch.segment), output="hidden")
    hidden, extras = found if isinstance(found, tuple) else (found, {})
    loss = head_loss(model, hidden, batch.labels, z_loss=z_loss, label_smoothing=smoothing)
    for value in extras.values():
        # An auxiliary loss is a mean over the tokens of its call: times their number, it is a sum as the rest.
        loss = Loss(loss.sum + value * loss.tokens, loss.tokens, loss.extra + value.detach() * loss.tokens)
    return loss


OBJECTIVES: dict[str, tuple[Callable[..., Loss], Callable[..., Batch]]] = {"next_token": (next_token, next_tokens)}


def objective(name: str, **options: Any) -> tuple[Objective, Callable[..., Batch]]:
    """(objective with its options, collator) by name. Raises UsageError with the nearest name for an unknown one."""
    if name not in OBJECTIVES:
        raise UsageError(f"train.objective: unknown {name!r}{nearest(name, OBJECTIVES)}")
    function, collate = OBJECTIVES[name]
    return partial(function, **options), collate
