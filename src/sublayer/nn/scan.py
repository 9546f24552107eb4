"""Scan: a recurrence over a call's tokens, one after the other, as packed rows, padding and decoding ask of every one.

B batch, L new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..state import Leaf, State
from ..step import Shared, Step
from .mask import plain

Carry = tuple[Tensor, ...]
"""What a recurrence hands from token to token: tensors [B, …]."""


def scan(
    move: Callable[[int, Carry], tuple[Tensor, Carry]],
    carry: Carry,
    length: int,
    step: Step,
    begin: Callable[[int], Carry] | None = None,
) -> tuple[Tensor, Carry]:
    """([B, L, …], carry): the outputs of move(i, carry) → (output [B, …], carry) for i = 0 … L-1, and the last carry.

    Where another document starts at token i, it starts from begin(i), or from zeros. Padding leaves the carry as it is;
    its outputs mean nothing.
    """
    starts, segment = (step.shared or Shared()).starts, step.segment
    some_start, some_padding = _columns(starts, length), _columns(None if segment is None else segment == 0, length)
    outputs: list[Tensor] = []
    for i in range(length):
        if starts is not None and some_start[i]:
            fresh = begin(i) if begin is not None else (0.0,) * len(carry)
            carry = tuple(_where(starts[:, i], new, old) for new, old in zip(fresh, carry, strict=True))
        y, moved = move(i, carry)
        if segment is not None and some_padding[i]:
            moved = tuple(_where(segment[:, i] != 0, new, old) for new, old in zip(moved, carry, strict=True))
        carry = moved
        outputs.append(y)
    return torch.stack(outputs, 1), carry


def resume(leaves: Mapping[str, Leaf], x: Tensor, step: Step, state: State | None = None) -> Carry:
    """What the state holds of an op's PerSlot leaves for the rows of x, in x's dtype; zeros without a state."""
    if state is None:
        return tuple(x.new_zeros(len(x), *leaf.shape) for leaf in leaves.values())
    return tuple(state[name].read(step).to(x.dtype) for name in leaves)


def keep(leaves: Mapping[str, Leaf], carry: Carry, step: Step, state: State | None = None) -> None:
    """Writes the last carry where `resume` reads it; nothing without a state."""
    if state is not None:
        for name, value in zip(leaves, carry, strict=True):
            state[name].write(value, step)


def _columns(cells: Tensor | None, length: int) -> list[bool]:
    """Which of the L columns hold any of the cells; all may, where reading them would wait for the device."""
    if cells is None or torch.compiler.is_compiling() or cells.device.type != "cpu":
        return [True] * length
    return plain(cells.any(0))


def _where(chosen: Tensor, new: Tensor | float, old: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, *(1,) * (old.dim() - 1)), new, old)
