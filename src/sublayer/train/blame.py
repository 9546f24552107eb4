"""The search for the module that first made a number that is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..nn.sublayer import ModelOp
from .batch import Batch
from .objectives import LossOf
from .update import Precision, autocast


def blame(
    model: ModelOp, batches: Iterable[Batch], objective: LossOf, precision: Precision = "fp32"
) -> tuple[str, int | None]:
    """(what, which batch): the first module that made a number that is not finite out of finite ones, and where.

    The batches are run again, not compiled: in the forward pass a module's output is found, in the backward pass a
    module's gradient. What a weight already held is named as such, without a batch.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weight {name} is not finite itself", None
    found: list[str] = []
    names = {module: name or "the model" for name, module in model.named_modules()}

    def forward(module: nn.Module, given: Any, kwargs: Any, made: Any) -> None:
        if not found and _finite((given, kwargs)) and not _finite(made):
            found.append(f"the output of {names[module]} ({type(module).__name__})")

    def backward(module: nn.Module, inward: Any, outward: Any) -> None:
        if not found and _finite(outward) and not _finite(inward):
            found.append(f"the gradient through {names[module]} ({type(module).__name__})")

    hooks: list[Any] = []
    device, run = next(model.parameters()).device, 0
    try:
        for module in names:
            hooks.append(module.register_forward_hook(forward, with_kwargs=True))
            hooks.append(module.register_full_backward_hook(backward))
        for batch in batches:
            run += 1
            with torch.compiler.set_stance("force_eager"), autocast(device, precision):
                loss = objective(model, batch.to(device))
            if not found and not bool(loss.sum.isfinite()):
                found.append("the loss of finite hidden vectors: the head's logits")
            if not found and loss.sum.requires_grad:
                with warnings.catch_warnings():  # an embedding has no gradient of its input, which torch remarks on
                    warnings.simplefilter("ignore", UserWarning)
                    loss.sum.backward()
            weights = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
            if not found and weights:
                found.append(f"the gradient of {weights[0]}")
            if found:
                break
    finally:
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
    return (found[0], run - 1) if found else ("nothing that a second run shows", None)


def _finite(tree: Any) -> bool:
    """Whether all floating-point tensors somewhere in it are finite."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return all(bool(leaf.isfinite().all()) for leaf in leaves if leaf.is_floating_point())
