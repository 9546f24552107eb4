"""Op and Part: the module that a layer runs, and the spec that builds it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..spec import Spec
from ..state import Leaf, State
from .initialise import Init

Tree = Tensor | dict[str, Tensor]
Extras = dict[str, Tensor]


class Op(nn.Module):
    """What a sublayer runs: `forward(x, step, state=None) -> y`, or (y, extras) with auxiliary losses by name.

    `state()` declares what the op keeps while decoding; the op reads and writes it through the view it is given and
    allocates nothing. `residual_outputs` names the child linears, or own matrices, that write into the residual
    stream: some recipes start those smaller. `matrices` names parameters of the op's own that are weights of linear
    maps: they decay in training, as a linear's do, and its other parameters do not. `idle` counts the parameters that
    a token does not go through (experts it is not sent to). `every`: what is inside runs once in so many tokens.
    """

    residual_outputs: tuple[str, ...] = ()
    matrices: tuple[str, ...] = ()
    idle: int = 0
    every: int = 1

    def state(self) -> dict[str, Leaf]:
        """The declared leaves, by name; empty for an op without memory."""
        return {}

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """Sets parameters that are the op's own (not those of linears, embeddings and norms inside it)."""


@dataclass(frozen=True)
class Context:
    """What only the whole model knows while its parts are built."""

    memory: int | None = None
    """Width of the memory that cross-attention reads."""
    vocab: int | None = None
    """Rows of the embedding table, where there is one."""
    tied: bool = False
    """Whether the head is handed that table."""
    shared: bool = False
    """Whether the trunk's embedding is handed the decoder's table, and has none of its own."""
    rotary: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])
    """The distinct (rotary spec, head size) of one trunk; their tables are computed once a forward pass."""

    kept: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])
    """(kv heads, head size) of the keys and values that earlier layers of the trunk keep for later ones, by name."""

    def number(self, position: Spec, head_size: int) -> int:
        """The place of a rotary position among the trunk's shared tables."""
        key = (position, head_size)
        if key not in self.rotary:
            self.rotary.append(key)
        return self.rotary.index(key)


class Growth(NamedTuple):
    """How an op that mixes positions grows with length n, in the terms of Vaswani et al. 2017, table 1."""

    work: str
    """Operations a layer, such as "n² d"; d is the width, k a kernel or rank, w a window, s a state size."""
    steps: str
    """Operations that must follow one another while training."""
    path: str
    """The longest way between two positions: layers, or the steps of a recurrence that is not linear."""


class Part(Spec):
    """A spec that builds a module: `build(dim, context)` for a residual stream of width dim."""

    @property
    def growth(self) -> Growth | None:
        """How it grows with length; None for what mixes no positions."""
        return None

    def build(self, dim: int, context: Context) -> nn.Module:
        """The module, with parameters on the current default device. Raises SpecError for sizes that do not fit."""
        raise SpecError(f"{type(self).__name__} builds no module by itself")


def scoped(state: State | None, name: str) -> State | None:
    """The view of a child, where there is a state."""
    return None if state is None else state.at(name)


def bounded(x: Tensor) -> Tensor:
    """x within what float16 can hold, where an overflow would be NaN a layer later; other dtypes as they are.

    T5's feed-forward layers, trained in bfloat16, reach beyond float16's 65504.
    """
    return x.clamp(-65504.0, 65504.0) if x.dtype == torch.float16 else x
