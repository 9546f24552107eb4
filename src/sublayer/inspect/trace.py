"""What a forward pass computed inside: nothing is recomputed beside it. B rows, N heads, L queries, M keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..decoding.slots import evaluating
from ..errors import InputError
from ..nn.additive import AdditiveOp
from ..nn.attend import Kernel
from ..nn.attention import AttendingOp
from ..nn.sublayer import ModelOp

Weights = dict[str, list[Tensor]]


def attention(model: ModelOp, ids: Sequence[int] | Tensor) -> dict[str, Tensor]:
    """How much each query took from each key while the model read one text: {layer: [N, L, L]}.

    ids: [L]. The row of a query sums to 1, less what a layer's sinks take. Layers are named as in the model
    ("decoder.blocks.0.attn"). They are the weights that multiplied the values in this very pass, which runs in
    evaluation mode. Raises InputError for no ids, and for a model in which nothing attends.
    """
    ids = torch.as_tensor(ids, dtype=torch.long, device=next(model.parameters()).device)
    if ids.dim() != 1 or not len(ids):
        raise InputError(f"attention is shown over one text: give its token ids [L], got shape {list(ids.shape)}")
    with evaluating(model), torch.no_grad(), watching(model) as seen:
        model(ids[None])
    if not seen:
        raise InputError("nothing attends in this model: it has no attention layer")
    return {name: calls[0][0] for name, calls in seen.items()}


@contextmanager
def watching(model: nn.Module) -> Iterator[Weights]:
    """Within it, the attention weights of every forward pass: {layer: a tensor [B, N, L, M] for each call}.

    Additive attention has one head, N = 1. Attention of scaled products runs in the kernel `reference`, which alone has
    weights to show: with it outputs are the same to the last bit as without watching; those of another kernel differ
    from them by rounding.
    """
    layers = {name: op for name, op in model.named_modules() if isinstance(op, AttendingOp | AdditiveOp)}
    scaled = [op for op in layers.values() if isinstance(op, AttendingOp)]
    kernels: list[Kernel] = [op.kernel for op in scaled]
    watches = [(op, op.watch) for op in layers.values()]
    seen: Weights = {}
    try:
        for op in scaled:
            op.kernel = "reference"
        for name, op in layers.items():
            op.watch = _recorder(seen, name.removesuffix(".op"))
        yield seen
    finally:
        for op, kernel in zip(scaled, kernels, strict=True):
            op.kernel = kernel
        for op, watch in watches:
            op.watch = watch


def _recorder(seen: Weights, name: str) -> Callable[[Tensor], None]:
    return lambda weights: seen.setdefault(name, []).append(weights.detach())
