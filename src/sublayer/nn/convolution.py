"""A short causal depthwise convolution, as stands before the scans of Mamba and of the gated delta rule.

B batch, L new tokens, C channels, K kernel. Each channel is filtered alone, over its document's own last K inputs.
Source: arXiv 2312.00752, section 3.4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import Leaf, PerSlot, State
from ..step import Shared, Step
from .feed_forward import ACTIVATIONS, Activation
from .initialise import Init, uniform
from .op import Context, Growth, Op, Part


class ShortConvolution(Part):
    """activation(bias + Σ_k weight[:, K − 1 − k] · x[t − k]), k from 0 to K − 1.

    A document sees itself alone, and inputs before its first token count as 0. Padding is skipped: the K last inputs
    are those of real tokens.
    """

    kernel: int = 4
    """K, how many inputs an output sees, its own included."""
    bias: bool = True
    """Whether each channel has one."""
    activation: Activation | None = None
    """What the output goes through."""

    def check(self) -> None:
        self.require(self.kernel > 1, f"kernel={self.kernel} mixes no positions: give 2 or more")

    @property
    def growth(self) -> Growth:
        return Growth("n k d", "1", "n/k")

    def build(self, dim: int, context: Context) -> ShortConvolutionOp:
        return ShortConvolutionOp(self, dim)


class ShortConvolutionOp(Op):
    """[B, L, C] → [B, L, C]; its state is the last K − 1 inputs of a slot. The weight is [C, 1, K], as Conv1d's."""

    matrices = ("weight",)

    def __init__(self, spec: ShortConvolution, channels: int) -> None:
        super().__init__()
        self.spec = spec
        self.weight = nn.Parameter(torch.empty(channels, 1, spec.kernel))
        self.bias = nn.Parameter(torch.empty(channels)) if spec.bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """As torch's Conv1d, which the authors' code leaves as it is."""
        for parameter in self.parameters():
            uniform(parameter, self.spec.kernel**-0.5, generator)

    def state(self) -> dict[str, Leaf]:
        return {"inputs": PerSlot((self.spec.kernel - 1, len(self.weight)))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        before = self.spec.kernel - 1
        past = None if state is None else state["inputs"].read(step).to(x.dtype)
        row = None if step.segment is None else Gathered.read(step, step.segment, before)
        if row is not None:
            x = row.gathered(x)
        known = F.pad(x, (0, 0, before, 0)) if past is None else torch.cat([past, x], 1)
        y = self._filter(known, None if row is None else row.begin)
        if state is not None:
            state["inputs"].write(known[:, -before:] if row is None else row.newest(known, before), step)
        if row is not None:
            y = row.scattered(y)
        return y if self.spec.activation is None else ACTIVATIONS[self.spec.activation](y)

    def _filter(self, known: Tensor, begin: Tensor | None) -> Tensor:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            y = cast(Tensor, cast(Any, _Filtered).apply(known, self.weight, begin))
        else:
            y = _filtered(known, self.weight, begin)
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Gathered:
    """Rows with their real tokens moved to the front, in order."""

    order: Tensor | None  # [B, L] the token at each place; None: no padding stands before a token
    begin: Tensor  # [B, L] the first place of each token's document; far before 0 where an earlier call holds it
    count: Tensor  # [B] real tokens

    @classmethod
    def read(cls, step: Step, segment: Tensor, before: int) -> Gathered:
        real = segment != 0
        starts = (step.shared or Shared()).starts
        order = None
        if torch.compiler.is_compiling() or bool((real[:, 1:] & ~real[:, :-1]).any()):
            order = (~real).long().argsort(stable=True, dim=1)
            starts = None if starts is None else starts.gather(1, order)
        begin = torch.full_like(segment, -before, dtype=torch.long)
        if starts is not None:
            places = torch.arange(segment.shape[1], device=segment.device)
            begin = torch.where(starts, places, -before).cummax(1).values
        return cls(order, begin, real.sum(1))

    def gathered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.gather(1, self.order[..., None].expand_as(x))

    def scattered(self, y: Tensor) -> Tensor:
        return y if self.order is None else y.gather(1, self.order.argsort(1)[..., None].expand_as(y))

    def newest(self, known: Tensor, before: int) -> Tensor:
        """[B, before, C]: the last inputs of the last document, and 0 before it began."""
        cells = self.count[:, None] + torch.arange(before, device=known.device)
        inputs = known.gather(1, cells[..., None].expand(-1, -1, known.shape[2]))
        return inputs.masked_fill((cells - before < self.begin[:, -1:])[..., None], 0)


def _filtered(known: Tensor, weight: Tensor, begin: Tensor | None) -> Tensor:
    """known: [B, K − 1 + L, C], the inputs before the first token among them → [B, L, C].

    A product for each tap: on a CPU 2.4 times as fast as torch's grouped conv1d, backward too.
    """
    before = weight.shape[2] - 1
    y = known[:, before:] * weight[:, 0, before]
    for back in range(1, before + 1):
        y = torch.addcmul(y, shifted_back(known, begin, back, y.shape[1]), weight[:, 0, before - back])
    return y


def shifted_back(known: Tensor, begin: Tensor | None, back: int, length: int) -> Tensor:
    """[B, L, C]: the input `back` tokens before each one, 0 where that is another document's."""
    first = known.shape[1] - length - back
    moved = known[:, first : first + length]
    return moved if begin is None else moved.masked_fill(_hidden(begin, back), 0)


def neighbour(known: Tensor, x: Tensor, row: Gathered | None, spot: int) -> Tensor:
    """[B, L, C]: the input `spot` places on of gathered rows x, 0 where that is outside of the document.

    known: x behind what came before it, which those `spot`s below 0 may reach.
    """
    length = x.shape[1]
    if spot <= 0:
        return shifted_back(known, None if row is None else row.begin, -spot, length)
    ahead = F.pad(x[:, spot:], (0, 0, 0, min(spot, length)))
    if row is None:
        return ahead
    places = torch.arange(length, device=x.device) + spot
    later = F.pad(row.begin[:, spot:], (0, min(spot, length)))
    inside = (later == row.begin) & (places < row.count[:, None])
    return torch.where(inside[..., None], ahead, 0)


def _hidden(begin: Tensor, back: int) -> Tensor:
    places = torch.arange(begin.shape[1], device=begin.device)
    return (places - back < begin)[..., None]


class _Filtered(torch.autograd.Function):
    """Keeps the inputs alone: plain operations would keep each shift, and fill a whole gradient for each slice."""

    @staticmethod
    def forward(known: Tensor, weight: Tensor, begin: Tensor | None) -> Tensor:  # pyright: ignore
        return _filtered(known, weight, begin)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # pyright: ignore
        known, weight, begin = ctx.saved_tensors
        before, length = weight.shape[2] - 1, grad.shape[1]
        d_known, d_weight = torch.zeros_like(known), list[Tensor]()
        for back in range(before, -1, -1):
            shown = grad if begin is None else grad.masked_fill(_hidden(begin, back), 0)
            d_known[:, before - back : before - back + length].addcmul_(shown, weight[:, 0, before - back])
            d_weight.append((grad * shifted_back(known, begin, back, length)).sum((0, 1)))
        return d_known, torch.stack(d_weight, -1)[:, None], None
