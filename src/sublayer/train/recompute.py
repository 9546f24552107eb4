"""Activation recomputation: a pass over a built model that keeps a block's input instead of what is inside it."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..nn.sublayer import ModelOp


def recompute(model: ModelOp) -> None:
    """From now on each block runs forward twice where gradients are wanted, and keeps only its input in between.

    Dropout draws the same zeros both times. Weights, names and results are as before. Source: arXiv 1604.06174.
    """
    for trunk in (model.encoder, model.decoder):
        if trunk is not None:
            for block in trunk.blocks.values():
                block.forward = partial(_forward, block.forward)


def _forward(inner: Any, x: Any, step: Any, state: Any = None) -> Any:
    if state is not None or not torch.is_grad_enabled():
        return inner(x, step, state)
    return checkpoint(inner, x, step, use_reentrant=False)
