"""Recurrent networks: Elman's, long short-term memory, gated recurrent units.

B batch, L new tokens, D model width, H hidden width, G gates, n documents of at most T tokens, S = H, or 2H for an
LSTM: its hidden vector beside its cell.
Source: Elman 1990; Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000; Cho et al. 2014
(arXiv 1406.1078).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import StateError
from ..state import Leaf, PerSlot, State
from ..step import Shared, Step
from .documents import Documents, beginning
from .embed import Embed, EmbedOp
from .initialise import Init
from .op import Context, Growth, Op, Part
from .scan import Carry, keep, resume, scan

Kind = Literal["elman", "lstm", "gru"]
GATES = {"elman": 1, "lstm": 4, "gru": 3}


class Recurrent(Part):
    """One recurrent layer; its output is its hidden vectors. Each document is read from its own beginning.

    elman: h ← tanh(W x + U h). lstm: c ← f · c + i · tanh(…), h ← o · tanh(c). gru: h ← z · h + (1 − z) · tanh(W x +
    r · (U h)), in cuDNN's form: Cho et al. have U (r · h). All as torch.nn has them, gates in its order.
    """

    kind: Kind = "lstm"
    """Which recurrence."""
    hidden: int | None = None
    """H; None: as wide as the input."""
    width: int | None = None
    """Width of its input, where that is not D: hidden vectors of a layer below."""
    direction: Literal["forward", "backward", "both"] = "forward"
    """Which way a document is read; "both": two recurrences, whose outputs stand side by side (2H wide). Only what
    reads forward can decode."""
    begin: int | None = None
    """Which layer of Step.condition [B, documents, layers, S] a document starts from; None: it starts from zeros."""
    bias: bool = True
    """Whether inputs and hidden vectors have a bias each."""

    def check(self) -> None:
        self.require(self.hidden is None or self.hidden > 0, f"hidden must be above 0, got {self.hidden}")
        self.require(self.width is None or self.width > 0, f"width must be above 0, got {self.width}")
        self.require(self.begin is None or self.begin >= 0, f"begin is the place of a layer, got {self.begin}")
        self.require(
            self.begin is None or self.direction == "forward", "only what reads forward starts from Step.condition"
        )

    @property
    def growth(self) -> Growth:
        return Growth("n d²", "n", "n")

    def build(self, dim: int, context: Context) -> RecurrentOp:
        return RecurrentOp(self, self.width or dim)


class Cell(nn.Module):
    """The parameters of one recurrence, named and laid out as torch.nn's but for the gates' names."""

    matrices = ("input", "recurrent")

    def __init__(self, kind: Kind, dim: int, hidden: int, bias: bool = True) -> None:
        super().__init__()
        self.kind: Kind = kind
        self.hidden = hidden
        self.size = 2 * hidden if kind == "lstm" else hidden
        rows = GATES[kind] * hidden
        self.input, self.recurrent = nn.Parameter(torch.empty(rows, dim)), nn.Parameter(torch.empty(rows, hidden))
        self.input_bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.recurrent_bias = nn.Parameter(torch.empty(rows)) if bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """Matrices as torch's, uniform in ± H^−1/2. Biases 0, but 1 to remember by at first: an LSTM's forget gate
        (Gers et al. 2000; Jozefowicz et al. 2015)."""
        for weight in (self.input, self.recurrent):
            drawn = torch.rand(weight.shape, generator=generator) * 2 - 1
            weight.copy_(drawn * self.hidden**-0.5)
        for bias in (self.input_bias, self.recurrent_bias):
            if bias is not None:
                bias.zero_()
        if self.kind == "lstm" and self.input_bias is not None:
            self.input_bias[self.hidden : 2 * self.hidden] = 1.0

    def given(self, x: Tensor) -> Tensor:
        """[…, D] → […, G · H]: what the inputs of all steps bring to the gates, in one product."""
        return F.linear(x, self.input, self.input_bias)

    def move(self, given: Tensor, carry: Tensor) -> Tensor:
        """One step: what `given` says of its input [n, G · H], the carry [n, S] → the next carry, h first."""
        h = carry[:, : self.hidden]
        asked = F.linear(h, self.recurrent, self.recurrent_bias)
        if self.kind == "gru":
            (r, z, new), (r_h, z_h, new_h) = given.chunk(3, -1), asked.chunk(3, -1)
            new = torch.tanh(new + torch.sigmoid(r + r_h) * new_h)
            return torch.lerp(new, h, torch.sigmoid(z + z_h))
        gates = given + asked
        if self.kind == "elman":
            return torch.tanh(gates)
        take, forget, new, show = gates.chunk(4, -1)
        cell = torch.sigmoid(forget) * carry[:, self.hidden :] + torch.sigmoid(take) * torch.tanh(new)
        return torch.cat([torch.sigmoid(show) * torch.tanh(cell), cell], -1)

    def read(
        self, x: Tensor, carry: Tensor, documents: Documents | None, *, last: bool, back: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """[B, L, D] from carries [n, S] → (hidden vectors [B, L, H], the last carries [n, S], where they are wanted).

        torch's own kernels, on documents padded to the longest, or to the longest of about their length where padding
        would be most of the work. back: each document from its last token to its first.
        """
        if documents is None:
            y, ends = self._kernel((x.flip(1) if back else x,), carry, batch_first=True)
            return y.flip(1) if back else y, ends
        wasteful = 0 < 4 * len(documents.cells) < len(documents.row) * documents.longest
        ys, cells, ends = list[Tensor](), list[Tensor](), carry if last else None
        for numbers, part in documents.alike() if wasteful else [(slice(None), documents)]:
            y, now = self._read(x, carry[numbers], part, last, back)
            ys.append(y)
            cells.append(part.cells)
            if ends is not None and now is not None:
                ends = now if isinstance(numbers, slice) else ends.index_copy(0, numbers, now)
        wide = ys[0].new_zeros(x.shape[0] * x.shape[1], self.hidden)
        return wide.index_copy(0, torch.cat(cells), torch.cat(ys)).view(*x.shape[:2], -1), ends

    def _read(
        self, x: Tensor, carry: Tensor, documents: Documents, last: bool, back: bool
    ) -> tuple[Tensor, Tensor | None]:
        """(hidden vectors [tokens, H], …): documents padded at their ends, or packed by length where an LSTM's last
        cells are wanted, of which the padded kernel keeps only those behind the padding."""
        equal = bool((documents.length == documents.longest).all())
        if last and not equal and self.kind == "lstm" and len(documents.cells):
            order, sizes, place = documents.packed(back)
            tokens = x.flatten(0, 1)[documents.cells]
            packed = torch.empty_like(tokens).index_copy(0, place, tokens)
            y, ends = self._kernel((packed, sizes.cpu()), carry[order])
            return y[place], carry.index_copy(0, order, ends)
        rows = documents.split(x)
        y, ends = self._kernel((documents.reversed(rows) if back else rows,), carry, batch_first=True)
        if not equal:
            ends = (
                torch.where((documents.length > 0)[:, None], documents.last(y), carry) if self.kind != "lstm" else carry
            )
        return (documents.reversed(y) if back else y).flatten(0, 1)[documents.spots], ends

    def _kernel(self, x: tuple[Tensor, ...], carry: Tensor, batch_first: bool | None = None) -> tuple[Tensor, Tensor]:
        weights = [self.input, self.recurrent, self.input_bias, self.recurrent_bias]
        weights = [weight for weight in weights if weight is not None]
        hidden: Any = carry[None]
        if self.kind == "lstm":
            hidden = tuple(part.contiguous() for part in hidden.chunk(2, -1))
        layout = () if batch_first is None else (batch_first,)
        kernel = {"elman": torch.rnn_tanh, "lstm": torch.lstm, "gru": torch.gru}[self.kind]
        y, *last = cast(Any, kernel)(*x, hidden, weights, len(weights) == 4, 1, 0.0, self.training, False, *layout)
        return y, torch.cat(last, -1)[0]


class RecurrentOp(Op):
    """[B, L, width] → [B, L, H], or 2H for both directions. Raises StateError where what reads backward has a state."""

    def __init__(self, spec: Recurrent, dim: int) -> None:
        super().__init__()
        self.spec = spec
        hidden = spec.hidden or dim
        self.cell = Cell(spec.kind, dim, hidden, spec.bias) if spec.direction != "backward" else None
        self.back = Cell(spec.kind, dim, hidden, spec.bias) if spec.direction != "forward" else None
        self.size = cast(Cell, self.cell or self.back).size
        self.leaves: dict[str, Leaf] = {"carry": PerSlot((self.size,))}

    def state(self) -> dict[str, Leaf]:
        return self.leaves if self.spec.direction == "forward" else {}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        if self.cell is None or self.back is not None:
            if state is not None:
                raise StateError("a recurrence that reads backward cannot be continued: call the model without a state")
            return self._read(x, step, last=False)[0]
        (carry,) = resume(self.leaves, x, step, state)
        first = started(self.spec.begin, step, carry, state)
        if x.shape[1] == 1 or (step.segment is not None and torch.compiler.is_compiling()):
            y, carry = self._scan(self.cell, x, step, first)
        elif step.segment is None:
            y, carry = self.cell.read(x, first, None, last=True)
        else:
            documents = Documents.of(step.segment)
            begin = None
            if self.spec.begin is not None:
                begin = beginning(step, self.spec.begin, documents.row, documents.number)
            begin = torch.zeros_like(first[documents.row]) if begin is None else begin
            begin = torch.where((documents.place == 0)[:, None], first[documents.row], begin)
            y, carry = self.cell.read(x, begin, documents, last=state is not None)
            carry = None if carry is None else carry[documents.newest]
        if carry is not None:
            keep(self.leaves, (carry,), step, state)
        return y

    def _scan(self, cell: Cell, x: Tensor, step: Step, first: Tensor) -> tuple[Tensor, Tensor]:
        given = cell.given(x)

        def move(i: int, carry: Carry) -> tuple[Tensor, Carry]:
            moved = cell.move(given[:, i], carry[0])
            return moved[:, : cell.hidden], (moved,)

        y, (carry,) = scan(move, (first,), x.shape[1], step, begins(self.spec.begin, step, first))
        return y, carry

    def read(self, x: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """(y, the last carry of each document [B, documents, S]): where the reading ended, backward if both ways."""
        y, last = self._read(x, step, last=True)
        assert last is not None
        return y, last

    def _read(self, x: Tensor, step: Step, *, last: bool) -> tuple[Tensor, Tensor | None]:
        documents = None if step.segment is None else Documents.of(step.segment)
        begin = x.new_zeros(len(x) if documents is None else len(documents.row), self.size)
        ys, ends = list[Tensor](), None
        for cell in (self.cell, self.back):
            if cell is not None:
                y, ends = cell.read(x, begin, documents, last=last, back=cell is self.back)
                ys.append(y)
        if ends is not None:
            ends = ends[:, None] if documents is None else documents.by_row(ends)
        return torch.cat(ys, -1), ends


def started(layer: int | None, step: Step, carry: Tensor, state: State | None) -> Tensor:
    """[B, S]: what the rows continue from: their carry, or in an empty slot what Step.condition says."""
    place = (step.shared or Shared()).place
    rows = torch.arange(len(carry), device=carry.device)
    numbers = None if step.segment is None else _first(step.segment)
    begin = None if layer is None else beginning(step, layer, rows, numbers)
    if begin is None or state is None or place is None:
        return carry if begin is None else begin
    return torch.where(state.length[place.rows, None] == 0, begin, carry)


def begins(layer: int | None, step: Step, carry: Tensor) -> Callable[[int], Carry] | None:
    """What `scan` takes: token i → what a document that starts there starts from."""
    if layer is None or step.condition is None or step.segment is None:
        return None
    segment, rows = step.segment, torch.arange(len(carry), device=carry.device)

    def begin(i: int) -> Carry:
        return (cast(Tensor, beginning(step, layer, rows, segment[:, i])),)

    return begin


def _first(segment: Tensor) -> Tensor:
    """[B]: the number of each row's first token that is no padding, 0 where there is none."""
    return segment.gather(1, (segment != 0).int().argmax(1, keepdim=True))[:, 0]


class Reader(Embed):
    """A front end that reads: tokens through recurrent layers, with `dropout` after each of them too.

    It leaves the last state of each document, layer by layer, in Step.condition [B, documents, layers, S], where a
    decoder's recurrence may start (Sutskever et al. 2014).
    """

    layers: tuple[Recurrent, ...] = ()
    """From the tokens on; they share H and the kind of recurrence."""

    def check(self) -> None:
        super().check()
        self.require(bool(self.layers), "a reader has at least one layer")
        sizes = {(layer.kind, layer.hidden) for layer in self.layers}
        self.require(len(sizes) < 2, f"the layers of a reader share kind and hidden, got {sorted(map(str, sizes))}")

    def build(self, dim: int, context: Context) -> ReaderOp:
        return ReaderOp(self, dim, context)


class ReaderOp(EmbedOp):
    """ids [B, M] → ([B, M, H or 2H], step with the condition)."""

    def __init__(self, spec: Reader, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        widths = [dim]
        for layer in spec.layers:
            widths.append((layer.hidden or widths[-1]) * (2 if layer.direction == "both" else 1))
        self.layers = nn.ModuleList(
            layer.build(width, context) for layer, width in zip(spec.layers, widths, strict=False)
        )
        sizes = {cast(RecurrentOp, layer).size for layer in self.layers}
        spec.require(len(sizes) == 1, "the layers of a reader leave states of one size: give them the same hidden")

    def forward(self, ids: Tensor, step: Step, shared: Tensor | None = None) -> tuple[Tensor, Step]:
        x, step = super().forward(ids, step, shared)
        ends = list[Tensor]()
        for layer in self.layers:
            x, last = cast(RecurrentOp, layer).read(x, step)
            x = F.dropout(x, self.spec.dropout, self.training)
            ends.append(last)
        return x, step.replace(condition=torch.stack(ends, 2))
