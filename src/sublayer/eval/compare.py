"""How far one model's predictions are from another's on the same text: what quantising, pruning or tuning changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..decoding.slots import evaluating
from ..errors import UsageError
from ..nn.sublayer import ModelOp
from ..train.batch import Batch
from ..train.evaluate import Score
from ..train.loss import IGNORED, rows_of_a_chunk
from .text import Texts, batches, fit


@dataclass(frozen=True)
class Comparison:
    """A model beside a reference, over the tokens that texts ask."""

    score: Score
    """The model's own."""
    reference: Score
    divergence: float
    """Nats a token: the mean of KL(reference ‖ model), the code length that the model adds to the reference's own
    where the text is drawn from the reference."""
    agreement: float
    """Share of the tokens where both find the same one likeliest."""


@torch.no_grad()
def compare(
    model: ModelOp,
    reference: ModelOp,
    texts: Texts,
    *,
    length: int,
    stride: int | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, share: None,
) -> Comparison:
    """Asks both models for the same tokens in the same windows, as `score` does; softmax is in fp32 at least.

    Raises UsageError as `score`, and for models of different vocabularies.
    """
    if model.spec.vocab != reference.spec.vocab:
        raise UsageError(
            f"the model has {model.spec.vocab} ids, the other {reference.spec.vocab}: "
            "predictions are compared over the same tokens"
        )
    fit(model.spec, texts, length)
    fit(reference.spec, texts, length)
    sums = torch.zeros(5, dtype=torch.float64)
    with evaluating(model), evaluating(reference):
        for batch in batches(texts, length, stride, progress):
            sums += _sums(model, reference, batch)
    nats, nats_of_reference, divergence, same, tokens = sums.tolist()
    own, other = (Score(found, int(tokens), texts.bytes) for found in (nats, nats_of_reference))
    return Comparison(own, other, divergence / tokens, same / tokens)


def _sums(model: ModelOp, reference: ModelOp, batch: Batch) -> Tensor:
    """float64 [5], of a batch: nats of either, KL, how often both agree, tokens."""
    asked = batch.labels != IGNORED
    labels = batch.labels[asked]
    hidden = [_hidden(one, batch)[asked.to(next(one.parameters()).device)] for one in (model, reference)]
    device = hidden[0].device
    rows = rows_of_a_chunk(len(labels), 2 * (model.spec.vocab or 1), device)
    sums = torch.zeros(5, dtype=torch.float64)
    for ids, mine, other in zip(labels.to(device).split(rows), *(part.split(rows) for part in hidden), strict=True):
        found, wanted = _logs(model, mine), _logs(reference, other).to(device)
        code = [-one.gather(1, ids[:, None]).double().sum() for one in (found, wanted)]
        each = wanted.exp() * (wanted - found)
        divergence = each.masked_fill(wanted.isneginf(), 0).double().sum()  # what cannot be adds nothing
        same = (found.argmax(1) == wanted.argmax(1)).sum()
        sums += torch.stack([*code, divergence, same, same.new_tensor(len(ids))]).cpu()
    return sums


def _hidden(model: ModelOp, batch: Batch) -> Tensor:
    """[B, L, D]"""
    batch = batch.to(next(model.parameters()).device)
    found = model(batch.inputs, batch.step, output="hidden")
    return found[0] if isinstance(found, tuple) else found


def _logs(model: ModelOp, hidden: Tensor) -> Tensor:
    """Logarithms of probabilities [rows, V]."""
    logits = model.logits(hidden)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
