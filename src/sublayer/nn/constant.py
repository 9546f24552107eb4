"""Constant tables (rotary frequencies, slopes, buckets) on the device that asks, kept between calls.

They lie here and never in a module: `.to(bfloat16)` or building on meta cannot touch them. They are Python numbers
first, so a compiler takes them for constants.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor


def constant(values: tuple[float, ...], like: Tensor, dtype: torch.dtype) -> Tensor:
    """The values [len] in dtype on like's device. Never write into the result: it is shared.

    Compilers and fake tensors get a tensor of their own, for theirs must not outlive them.
    """
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return torch.tensor(values, dtype=dtype, device=like.device)
    return _kept(values, dtype, like.device)


@lru_cache(maxsize=1024)
def _kept(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # else the first caller's mode would follow the tensor into training
        return torch.tensor(values, dtype=dtype, device=device)


Function = TypeVar("Function", bound=Callable[..., Any])


def traced_as_constant(function: Function) -> Function:
    """Marks a function of Python values whose result a compiled graph keeps as a constant. What it reads of a spec, it
    reads as the spec's method: torch 2.11 takes no spec for an argument.

    torch.compiler.assume_constant_result does the same, but imports the compiler: a second, where nothing is compiled.
    """
    cast(Any, function)._dynamo_marked_constant = True
    return function
