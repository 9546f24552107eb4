"""Training in its plainest form: packed windows, next-token loss, AdamW. B batch, L window length, V vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..nn.sublayer import ModelOp
from ..step import Step

Windows = tuple[Tensor, Tensor]  # ids and segments, each [windows, L]


def pack(documents: Sequence[Sequence[int]], length: int, eos: int) -> Windows:
    """Documents, each ended by eos, one after the other in rows of `length`; the last row is padded (segment 0).

    Segments number the documents, so that attention and recurrences keep them apart.
    """
    if not documents:
        raise InputError("no documents to pack")
    ids = torch.cat([torch.tensor([*document, eos]) for document in documents])
    segment = torch.repeat_interleave(torch.tensor([len(document) + 1 for document in documents]))
    rows = -(-len(ids) // length)
    padded = (F.pad(each, (0, rows * length - len(ids))).view(rows, length) for each in (ids, segment + 1))
    return next(padded), next(padded)


def next_token_loss(model: nn.Module, ids: Tensor, segment: Tensor) -> tuple[Tensor, int]:
    """(sum in nats, tokens): each token predicts the next one of its document. No such token: (0, 0)."""
    labels = torch.where((segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] != 0), ids[:, 1:], -100)
    logits = model(ids[:, :-1], Step(segment=segment[:, :-1]))
    loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
    return loss, int((labels != -100).sum())


def train(
    model: ModelOp,
    windows: Windows,
    steps: int,
    *,
    batch: int = 16,
    rate: float = 3e-3,
    seed: int = 0,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Runs `steps` of AdamW over windows in random order; rate warms up over a tenth and falls linearly to 0.

    Only matrices decay. `report` is told the step and its loss in nats per token.
    """
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / max(steps // 10, 1), (steps - step) / steps)
    )
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in range(steps):
        rows = torch.randint(len(windows[0]), (batch,), generator=generator)
        loss, tokens = next_token_loss(model, windows[0][rows], windows[1][rows])
        (loss / max(tokens, 1)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        report(step, loss.item() / max(tokens, 1))
    model.eval()


@torch.inference_mode()
def bits_per_byte(model: nn.Module, windows: Windows, eos: int, batch: int = 16) -> float:
    """Code length of what a byte model predicts in held-out windows, in bits per byte predicted (eos is no byte).

    The first token of a window or document, which nothing predicts, counts on neither side.
    """
    nats, count = 0.0, 0
    for ids, segment in zip(windows[0].split(batch), windows[1].split(batch), strict=True):
        loss, tokens = next_token_loss(model, ids, segment)
        ends = (ids[:, 1:] == eos) & (segment[:, 1:] == segment[:, :-1]) & (segment[:, 1:] != 0)
        nats, count = nats + loss.item(), count + tokens - int(ends.sum())
    return nats / math.log(2) / max(count, 1)
