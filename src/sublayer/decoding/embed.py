"""Vectors of texts, to be compared by cosine: what an encoder with a head that pools answers.

B texts that are read together, D model width.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..errors import InputError, UsageError
from ..nn.head import Pooled, of_documents
from ..nn.sublayer import ModelOp, TrunkOp
from ..step import Step
from ..text.tokenizer import Tokenizer
from ..weights.pooling import Pooling
from .request import longest
from .slots import evaluating


def embed(
    model: ModelOp,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    pooling: Pooling | None = None,
    *,
    batch: int = 32,
    progress: Callable[[int, int, float], object] | None = None,
) -> Tensor:
    """The vectors of texts, [texts, D] in fp32 on the CPU, in their order.

    pooling: what `read_pooling` found; None: by the model's own head, which has to be one that pools, as the objective
    contrastive leaves it. A text is read between the special tokens that its model expects. Those longer than
    pooling.length are cut, keeping the special tokens at their end, with a warning that says how many. batch: texts
    that are read together, those of like length. progress(texts done, texts, share): after each batch.

    Raises UsageError for a model of two trunks, or without a head that pools where pooling is None; InputError naming
    the text that is empty or longer than the positions that the model has learned.
    """
    if (model.encoder is None) == (model.decoder is None):
        raise UsageError("the model reads a text and answers another; vectors of texts take an encoder alone")
    if pooling is None and not isinstance(model.spec.head, Pooled):
        raise UsageError("the model's head does not pool: say how it does, as in pooling=Pooling('mean')")
    if batch < 1:
        raise UsageError(f"batch is at least 1, got {batch}")
    rows = _rows(model, tokenizer, texts, pooling)
    if pooling is not None:
        model = model.with_head(Pooled(pooling.pool, normalise=pooling.normalise))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    found = torch.empty(len(rows), model.spec.dim)
    device, done = next(model.parameters()).device, 0
    with evaluating(model), torch.inference_mode():
        while done < len(rows):
            chosen = order[done : done + batch]
            lengths = torch.tensor([len(rows[i]) for i in chosen])
            ids = pad_sequence([torch.tensor(rows[i]) for i in chosen], batch_first=True)
            step = Step(segment=(torch.arange(ids.shape[1]) < lengths[:, None]).long().to(device))
            answer: Any = model(ids.to(device), step)
            answer = answer[0] if isinstance(answer, tuple) else answer  # auxiliary losses are for training
            found[chosen] = of_documents(answer, step).float().cpu()
            done += len(chosen)
            if progress is not None:
                progress(done, len(rows), done / len(rows))
    return found


def _rows(model: ModelOp, tokenizer: Tokenizer, texts: Sequence[str], pooling: Pooling | None) -> list[list[int]]:
    pooling = pooling or Pooling()
    rows = [tokenizer.encode(pooling.prefix + text, framed=True) for text in texts]
    longer = 0
    if pooling.length is not None:
        longer = sum(len(row) > pooling.length for row in rows)
        rows = [_cut(row, pooling.length, tokenizer) for row in rows]
    if longer:
        warnings.warn(f"{longer} of {len(rows)} texts have more than {pooling.length} tokens: cut", stacklevel=3)
    most, of = longest(cast(TrunkOp, model.encoder or model.decoder), None)
    for index, row in enumerate(rows):
        if not row:
            raise InputError(f"text {index} is empty")
        if most is not None and len(row) > most:
            raise InputError(f"text {index}: {len(row)} tokens are more than {of}")
    return rows


def _cut(row: list[int], length: int, tokenizer: Tokenizer) -> list[int]:
    """A row of at most `length` ids, which ends with the special tokens that it ended with."""
    if len(row) <= length:
        return row
    behind = next((i for i, token in enumerate(reversed(row)) if tokenizer.token_bytes(token)), 0)
    behind = min(behind, length)
    return row[: length - behind] + row[len(row) - behind :]
