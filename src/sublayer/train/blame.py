"""The search for the module that first made a number that is not finite."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..nn.sublayer import ModelOp
from .objectives import Batch, Objective
from .update import Precision, autocast


def blame(model: ModelOp, batches: Iterable[Batch], objective: Objective, precision: Precision = "fp32") -> str:
    """Names the first module that made a number that is not finite out of finite ones, running the batches again.

    One line: in the forward pass a module's output, in the backward pass a module's gradient. Anything that a weight
    already held is named as such.
    """
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            return f"the weight {name} is not finite itself"
    found: list[str] = []
    names = {module: name or "the model" for name, module in model.named_modules()}

    def forward(module: nn.Module, given: Any, kwargs: Any, made: Any) -> None:
        if not found and _finite((given, kwargs)) and not _finite(made):
            found.append(f"the output of {names[module]} ({type(module).__name__})")

    def backward(module: nn.Module, inward: Any, outward: Any) -> None:
        if not found and _finite(outward) and not _finite(inward):
            found.append(f"the gradient through {names[module]} ({type(module).__name__})")

    hooks: list[Any] = []
    device = next(model.parameters()).device
    try:
        for module in names:
            hooks.append(module.register_forward_hook(forward, with_kwargs=True))
            hooks.append(module.register_full_backward_hook(backward))
        for batch in batches:
            with autocast(device, precision):
                loss = objective(model, batch.to(device))
            if not found and not bool(loss.sum.isfinite()):
                found.append("the loss of finite hidden vectors: the head's logits")
            if not found and loss.sum.requires_grad:
                with warnings.catch_warnings():  # an embedding has no gradient of its input, which torch remarks on
                    warnings.simplefilter("ignore", UserWarning)
                    loss.sum.backward()
            if found:
                break
    finally:
        for hook in hooks:
            hook.remove()
        weights = [name for name, p in model.named_parameters() if p.grad is not None and not _finite(p.grad)]
        model.zero_grad(set_to_none=True)
    if not found and weights:
        return f"the gradient of {weights[0]}"
    return found[0] if found else "nothing that a second run shows"


def _finite(tree: Any) -> bool:
    """Whether all floating-point tensors somewhere in it are finite."""
    leaves = [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]
    return all(bool(leaf.isfinite().all()) for leaf in leaves if leaf.is_floating_point())
