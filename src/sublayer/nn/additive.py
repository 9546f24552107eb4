"""Additive attention inside a recurrence: each step asks the memory with the last hidden vector, then moves.

B batch, L new tokens, M memory length, D model width, H hidden width, G gates, A width of the alignment, E width of a
memory vector, S the size of a state (H, or 2H for an LSTM).
Source: Bahdanau, Cho and Bengio 2015 (arXiv 1409.0473), sections 3.1 and A.1.2, A.2.2.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import InputError
from ..state import Leaf, PerMemory, PerSlot, State
from ..step import Shared, Step
from .mask import Mask
from .op import Context, Growth, Op, Part
from .projection import Projection
from .recurrent import Cell, Kind, begins, started
from .scan import Carry, keep, resume, scan


class Additive(Part):
    """s_i = cell([x_i, c_i], s_{i−1}), where c_i = Σ_j α_ij m_j and α_i = softmax_j(v · tanh(W s_{i−1} + U m_j)).

    Its output is s_i, or with `maxout` the deep output of section A.2.2: the larger of each two neighbours in
    O [s_{i−1}, x_i, c_i].
    """

    kind: Kind = "gru"
    """Which recurrence."""
    hidden: int | None = None
    """H; None: as wide as the input."""
    align: int | None = None
    """A; None: H."""
    memory: int | None = None
    """E, where what the encoder gives is not D wide."""
    width: int | None = None
    """Width of its input, where that is not D: hidden vectors of a layer below."""
    begin: int = 0
    """Which layer of Step.condition [B, documents, layers, S] a document starts from; zeros where there is none."""
    bridge: bool = True
    """Whether it starts from tanh of a linear map of that state, not from the state itself."""
    maxout: int | None = None
    """Width of the deep output; None: the output is s_i, H wide."""
    bias: bool = True
    """Whether cell, bridge and deep output have biases."""

    def check(self) -> None:
        for name in ("hidden", "align", "memory", "width", "maxout"):
            size = getattr(self, name)
            self.require(size is None or size > 0, f"{name} must be above 0, got {size}")
        self.require(self.begin >= 0, f"begin is the place of a layer, got {self.begin}")

    @property
    def growth(self) -> Growth:
        return Growth("n m d + n d²", "n", "n")

    def build(self, dim: int, context: Context) -> AdditiveOp:
        return AdditiveOp(self, self.width or dim, self.memory or context.memory or dim)


class AdditiveOp(Op):
    """[B, L, width] → [B, L, H], or the width of the deep output. Raises InputError without a memory to read."""

    def __init__(self, spec: Additive, dim: int, memory: int) -> None:
        super().__init__()
        self.spec = spec
        self.watch: Callable[[Tensor], None] | None = None  # is told the weights of each call, [B, 1, L, M]
        self.width, self.hidden = dim, spec.hidden or dim
        align = spec.align or self.hidden
        self.cell = Cell(spec.kind, dim + memory, self.hidden, spec.bias)
        self.query = Projection(self.hidden, align, bias=False)
        self.key = Projection(memory, align, bias=False)
        self.energy = Projection(align, 1, bias=False)
        self.bridge = Projection(self.cell.size, self.cell.size, spec.bias) if spec.bridge else None
        self.readout = Projection(self.hidden + dim + memory, 2 * spec.maxout, spec.bias) if spec.maxout else None
        self.carried: dict[str, Leaf] = {"carry": PerSlot((self.cell.size,))}
        self.leaves: dict[str, Leaf] = {"key": PerMemory((align,)), "value": PerMemory((memory,))}

    def state(self) -> dict[str, Leaf]:
        return self.carried | self.leaves

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        key, value, hidden = self._memory(x, step, state)
        (carry,) = resume(self.carried, x, step, state)
        step = self._bridged(step)
        first, begin = started(self.spec.begin, step, carry, state), begins(self.spec.begin, step, carry)
        of_memory = self.cell.input[:, self.width :]
        given = F.linear(x, self.cell.input[:, : self.width], self.cell.input_bias).unbind(1)
        hides = None if hidden is None else hidden.unbind(1)
        before: list[Tensor] = []
        shares: list[Tensor] = []

        def move(i: int, carry: Carry) -> tuple[Tensor, Carry]:
            s = carry[0][:, : self.hidden]
            scores = self.energy(torch.tanh(self.query(s)[:, None] + key))[..., 0]
            if hides is not None:
                scores = scores.masked_fill(hides[i], torch.finfo(scores.dtype).min)
            share = scores.softmax(-1)
            context = torch.bmm(share[:, None], value)[:, 0]
            moved = self.cell.move(given[i] + F.linear(context, of_memory), carry[0])
            before.append(s)
            shares.append(share)
            return moved[:, : self.hidden], (moved,)

        y, last = scan(move, (first,), x.shape[1], step, begin)
        asked, weights = torch.stack(before, 1), torch.stack(shares, 1)
        keep(self.carried, last, step, state)  # not before `asked`, which may see the state's own storage
        if self.watch is not None:
            self.watch(weights[:, None])
        if self.readout is None:
            return y
        wide = self.readout(torch.cat([asked, x, torch.bmm(weights, value)], -1))
        return wide.unflatten(-1, (-1, 2)).amax(-1)

    def _memory(self, x: Tensor, step: Step, state: State | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(key [B, M, A], value [B, M, E], what is hidden [B, L, M]); keys are computed once, into the state."""
        shared = step.shared or Shared()
        if step.memory is None and state is not None:
            key, value = (state[name].read(step).to(x.dtype) for name in self.leaves)
        elif step.memory is not None:
            key, value = x.new_empty(0), step.memory
        else:
            key = value = x.new_empty(len(x), 0, 0)
        if value.shape[1] == 0:
            raise InputError("additive attention needs Step.memory (or source=…), or a state that holds one")
        seen = Mask(layout=shared.cross).materialise(x.shape[1], value.shape[1], x.device)
        hidden = None if seen is None else ~seen[:, 0]
        if step.memory is not None:
            if hidden is not None and state is None:  # a state is given it free of padding, and later calls see more
                value = value.masked_fill(hidden.all(1)[..., None], 0)  # NaN that nobody sees reaches nobody
            key = self.key(value)
            keep(self.leaves, (key, value), step, state)
        return key, value, None if hidden is None else hidden.expand(len(x), x.shape[1], -1)

    def _bridged(self, step: Step) -> Step:
        """The step with its states taken across the bridge."""
        if self.bridge is None or step.condition is None:
            return step
        layer = step.condition[:, :, self.spec.begin]
        states = torch.tanh(self.bridge(layer))[:, :, None]
        return step.replace(condition=states.expand(-1, -1, self.spec.begin + 1, -1))
