"""Actions and forecasts: a model's next ids, only bins allowed, as numbers again.

B rows, A dimensions of an action, T values of a series.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data.bins import Bins, Series
from ..data.episodes import pixels
from ..data.examples import padded
from ..errors import UsageError
from ..nn.sublayer import ModelOp
from ..recipes.actions import images_first
from ..state import State
from ..step import Step


def act(
    model: ModelOp,
    images: Tensor | np.ndarray | None,
    instructions: Sequence[Sequence[int]],
    bins: Bins,
    steps: int = 1,
) -> np.ndarray:
    """The likeliest actions, dimension by dimension: float64 [B, steps, A], in the units that bins were made of.

    images: uint8 [B, H, W, C] or [B, I, H, W, C]; None for a model trained without. instructions: the ids of each
    row's text, framed as in training (`tokenizer.encode(text, framed=True)`), at least one. bins: those of the training
    run, in its bins.json. Raises UsageError where they do not fit together.
    """
    ids, segment = _rows(model, instructions, bins.size)
    inputs: Any = ids
    if images is not None:
        given = torch.as_tensor(images)
        given = given[:, None] if given.dim() == 4 else given
        if given.dim() != 5 or len(given) != len(ids):
            raise UsageError(f"images are [B, H, W, C] or [B, I, H, W, C], got {list(given.shape)} for {len(ids)} rows")
        first = next(model.parameters())
        inputs = images_first(model.spec, ids, pixels(given).to(first.device, first.dtype))
        places = inputs["ids"].shape[1] - ids.shape[1]
        segment = torch.cat([segment[:, :1].expand(-1, places), segment], 1)
    count = steps * len(bins.low)
    found = _continued(model, inputs, segment, count, (bins.first, bins.size), lambda logits: logits.argmax(-1))
    return bins.decode(found.view(len(ids), steps, -1).cpu().numpy())


def forecast(
    model: ModelOp, context: Any, horizon: int, series: Series, *, samples: int = 20, temperature: float = 1.0,
    seed: int = 0,
) -> np.ndarray:  # fmt: skip
    """Drawn continuations of series: context [B, T] → float64 [B, samples, horizon], in the series' own units.

    NaN in the context is a missing value. Raises UsageError for sizes that cannot be.
    Source: Chronos, arXiv 2403.07815, section 3.3.
    """
    context = np.asarray(context, np.float64)
    if context.ndim != 2 or not context.size or horizon < 1 or samples < 1 or not temperature > 0:
        wanted = "context [B, T], horizon and samples of at least 1, temperature above 0"
        raise UsageError(f"{wanted}; got {list(context.shape)}, {horizon}, {samples}, {temperature}")
    scale = series.scale(context)
    ids, segment = _rows(model, series.encode(context, scale).repeat(samples, 0).tolist(), series.size)
    generator = torch.Generator(ids.device).manual_seed(seed)

    def draw(logits: Tensor) -> Tensor:
        shares = (logits.double() / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)[:, 0]

    found = _continued(model, ids, segment, horizon, (series.END + 1, series.size), draw)
    values = found.view(len(context), samples, horizon).cpu().numpy()
    return series.decode(values, scale[:, None])


def _rows(model: ModelOp, rows: Sequence[Sequence[int]], size: int) -> tuple[Tensor, Tensor]:
    """(ids [B, L], segment), padded on the right."""
    vocab = model.spec.vocab
    if model.decoder is None or vocab is None or vocab < size:
        raise UsageError(f"the bins' ids end at {size}, and the model's vocabulary at {vocab}")
    if not rows or not all(len(row) for row in rows):
        raise UsageError("each row begins with at least one id")
    device = next(model.parameters()).device
    ids, segment = padded([torch.tensor(row) for row in rows])
    return ids.to(device), segment.to(device)


@torch.inference_mode()
def _continued(
    model: ModelOp, inputs: Any, segment: Tensor, count: int, allowed: tuple[int, int], pick: Callable[[Tensor], Tensor]
) -> Tensor:
    """[B, count] int64: the next ids, each picked of the logits of the allowed ones."""
    B, L = segment.shape
    was, found = model.training, list[Tensor]()
    model.eval()
    try:
        state, step = State.allocate(model, B, L + count), Step(segment=segment)
        last = (segment * torch.arange(L, device=segment.device)).argmax(1)  # rows are padded on the right
        for _ in range(count):
            answer: Any = model(inputs, step, state, output="hidden")
            hidden: Tensor = answer[0] if isinstance(answer, tuple) else answer
            logits: Tensor = model.logits(hidden[torch.arange(B, device=last.device), last])
            found.append(pick(logits[:, allowed[0] : allowed[1]]) + allowed[0])
            inputs, step, last = found[-1][:, None], Step(), torch.zeros_like(last)
    finally:
        model.train(was)
    return torch.stack(found, 1)
