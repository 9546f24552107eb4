"""What updates an alignment and its pairs, which read each other (Evoformer: Jumper et al. 2021, Nature 596; algorithms
of its supplement).

B alignments, S sequences, L residues, C width of cells, P of pairs, N heads, H head size, R rows of either stream.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import State
from ..step import Step
from .attend import Kernel, attend
from .initialise import Init
from .mask import Mask
from .norm import LayerNorm
from .op import Context, Extras, Growth, Op, Part
from .projection import Projection

Streams = dict[str, Tensor]
"""msa [B, S, L, C], a vector for each residue of each sequence; pair [B, L, L, P], one for each two residues; and
present bool [B, S, L], where it is given: the cells that are no padding."""
Stream = Literal["msa", "pair"]


# --- places ---


class NormedStreams(Part):
    """LayerNorm of some streams; the others pass."""

    streams: tuple[Stream, ...]
    """Which."""
    pair: int
    """P, the width of pairs."""
    norm: LayerNorm = LayerNorm()

    def build(self, dim: int, context: Context) -> NormedStreamsOp:
        return NormedStreamsOp(self, dim, context)


class NormedStreamsOp(nn.ModuleDict):
    """Streams → streams."""

    def __init__(self, spec: NormedStreams, dim: int, context: Context) -> None:
        widths = {"msa": dim, "pair": spec.pair}
        super().__init__({name: spec.norm.build(widths[name], context) for name in spec.streams})

    def forward(self, x: Streams, step: Step) -> Streams:
        return x | {name: norm(x[name], step) for name, norm in self.items()}


class SharedDropout(Part):
    """Dropout of whole lines of a branch: what is dropped is the same all along an axis (section 1.11.6)."""

    share: float
    axis: Literal[1, 2]
    """1: the same for all rows, 2: for all columns."""

    def check(self) -> None:
        self.require(0 <= self.share < 1, f"share is from 0 to below 1, got {self.share}")

    def build(self, dim: int, context: Context) -> SharedDropoutOp:
        return SharedDropoutOp(self)


class SharedDropoutOp(nn.Module):
    """[B, R, L, C] → [B, R, L, C]."""

    def __init__(self, spec: SharedDropout) -> None:
        super().__init__()
        self.spec = spec

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        if not self.training or self.spec.share == 0:
            return x
        return x * F.dropout(torch.ones_like(x.narrow(self.spec.axis, 0, 1)), self.spec.share)


class Gate(Projection):
    """Its sigmoid begins at 0.73 everywhere: weights 0, biases 1 (section 1.11.4)."""

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.zero_()
        self.bias.fill_(1)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).sigmoid()


# --- ops ---


class AxialAttention(Part):
    """Gated attention along the rows or the columns of a stream, with a bias from the pairs or none: MSA row and
    column attention (algorithms 7 and 8), triangle attention around the starting and the ending node (13 and 14)."""

    stream: Stream
    along: Literal["rows", "columns"]
    heads: int
    pair: int
    """P, the width of pairs."""
    head_size: int = 32
    biased: bool = True
    """Whether scores get a bias from the pairs, in columns from the pairs turned around."""

    @property
    def growth(self) -> Growth:
        return Growth("r n² d", "1", "1")

    def check(self) -> None:
        self.require(self.heads > 0 and self.head_size > 0, "heads and head_size must be above 0")

    def build(self, dim: int, context: Context) -> AxialAttentionOp:
        return AxialAttentionOp(self, dim if self.stream == "msa" else self.pair)


class AxialAttentionOp(Op):
    """Streams → {stream: [B, R, L, C]}. Padding is seen by nothing."""

    residual_outputs = ("out",)
    kernel: Kernel = "auto"

    def __init__(self, spec: AxialAttention, dim: int) -> None:
        super().__init__()
        self.spec, inner = spec, spec.heads * spec.head_size
        self.q, self.k, self.v = (Projection(dim, inner, bias=False) for _ in range(3))
        self.gate, self.out = Gate(dim, inner), Projection(inner, dim)
        self.bias = Projection(spec.pair, spec.heads, bias=False) if spec.biased else None

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams:
        cells, pair, keys = x[self.spec.stream], x["pair"], self._keys(x, step)
        if self.spec.along == "columns":
            cells, pair = cells.transpose(1, 2), pair.transpose(1, 2)
        q, k, v = (f(cells).unflatten(-1, (-1, self.spec.head_size)).transpose(2, 3) for f in (self.q, self.k, self.v))
        if self.bias is None:
            seen = None if keys is None else keys.expand(*q.shape[:2], -1).flatten(0, 1)
            y = self._attend(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), None, seen).reshape(q.shape)
        else:  # one by one: all rows of an alignment share its bias, which then need not be copied for each
            biases = self.bias(pair).permute(0, 3, 1, 2)[:, None].unbind()
            masks = [None] * len(biases) if keys is None else keys.unbind()
            y = torch.stack([self._attend(*each) for each in zip(q, k, v, biases, masks, strict=True)])
        y = self.out(y.transpose(2, 3).flatten(3) * self.gate(cells))
        return {self.spec.stream: y.transpose(1, 2) if self.spec.along == "columns" else y}

    def _keys(self, x: Streams, step: Step) -> Tensor | None:
        """bool [B, R or 1, L]: the keys of a row that are no padding; None: all. Rows of padding get what they may."""
        real = None if step.segment is None else (step.segment != 0)[:, None]
        present = x.get("present") if self.spec.stream == "msa" else None
        if self.spec.stream == "msa" and self.spec.along == "columns":
            return None if present is None else present.transpose(1, 2)
        return real if present is None else present if real is None else present & real

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None) -> Tensor:
        """[R, N, L, H]; bias [1, N, L, L], keys [R or 1, L]."""
        mask = None if keys is None else Mask(allowed=keys[:, None, None])
        return attend(q, k, v, mask, scale=self.spec.head_size**-0.5, bias=bias, kernel=self.kernel)


class OuterProductMean(Part):
    """Pairs from cells: the outer product of two residues' vectors, its mean over the sequences (algorithm 10)."""

    pair: int
    """P, the width of pairs."""
    rank: int = 32
    """Width of the vectors that are multiplied."""

    @property
    def growth(self) -> Growth:
        return Growth("r n² h²", "1", "1")

    def build(self, dim: int, context: Context) -> OuterProductMeanOp:
        return OuterProductMeanOp(self, dim)


class OuterProductMeanOp(Op):
    """Streams → {"pair": [B, L, L, P]}. The mean is over the sequences in which neither residue is padding."""

    residual_outputs = ("out",)

    def __init__(self, spec: OuterProductMean, dim: int) -> None:
        super().__init__()
        self.left, self.right = Projection(dim, spec.rank), Projection(dim, spec.rank)
        self.out = Projection(spec.rank**2, spec.pair)

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams:
        left, right, present = self.left(x["msa"]), self.right(x["msa"]), _present(x, step, "msa")
        count: Tensor | int = left.shape[1]
        if present is not None:
            real = present.to(left.dtype)
            left, right = left * real[..., None], right * real[..., None]
            count = torch.einsum("bsi,bsj->bij", real, real).clamp(min=1)[..., None]
        return {"pair": self.out(torch.einsum("bsic,bsjd->bijcd", left, right).flatten(3) / count)}


class TriangleMultiplication(Part):
    """The pair ij from the two other edges of all triangles, multiplied: outgoing, ik and jk (algorithm 11), or
    incoming, ki and kj (12)."""

    edges: Literal["outgoing", "incoming"]
    pair: int
    """P, the width of pairs."""
    hidden: int = 128
    """Width of what is multiplied."""
    norm: LayerNorm = LayerNorm()
    """Of the sum over triangles."""

    @property
    def growth(self) -> Growth:
        return Growth("n³ d", "1", "1")

    def build(self, dim: int, context: Context) -> TriangleMultiplicationOp:
        return TriangleMultiplicationOp(self, context)


class TriangleMultiplicationOp(Op):
    """Streams → {"pair": [B, L, L, P]}. Edges to padding count as zero."""

    residual_outputs = ("out",)

    def __init__(self, spec: TriangleMultiplication, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.left, self.right = Projection(spec.pair, spec.hidden), Projection(spec.pair, spec.hidden)
        self.left_gate, self.right_gate = Gate(spec.pair, spec.hidden), Gate(spec.pair, spec.hidden)
        self.norm = spec.norm.build(spec.hidden, context)
        self.gate, self.out = Gate(spec.pair, spec.pair), Projection(spec.hidden, spec.pair)

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams:
        pair, present = x["pair"], _present(x, step, "pair")
        left, right = self.left_gate(pair) * self.left(pair), self.right_gate(pair) * self.right(pair)
        if present is not None:
            left, right = left * present[..., None], right * present[..., None]
        equation = "bikc,bjkc->bijc" if self.spec.edges == "outgoing" else "bkic,bkjc->bijc"
        triangles = self.norm(torch.einsum(equation, left, right), step)
        return {"pair": self.gate(pair) * self.out(triangles)}


class OnStream(Part):
    """An op of vectors, on the vectors of one stream."""

    stream: Stream
    op: Part
    pair: int
    """P, the width of pairs."""

    def build(self, dim: int, context: Context) -> OnStreamOp:
        return OnStreamOp(self, dim, context)


class OnStreamOp(nn.Module):
    """Streams → {stream: […, C]}."""

    def __init__(self, spec: OnStream, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.op = spec.op.build(dim if spec.stream == "msa" else spec.pair, context)

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams | tuple[Streams, Extras]:
        return {self.spec.stream: self.op(x[self.spec.stream], step)}


def _present(x: Streams, step: Step, name: Stream) -> Tensor | None:
    """bool [B, R, L]: the cells of a stream that are no padding; None: all."""
    real = None if step.segment is None else step.segment != 0
    if name == "pair":
        return None if real is None else real[:, :, None] & real[:, None]
    present = x.get("present")
    if present is None or real is None:
        return present if real is None else real[:, None].expand(x["msa"].shape[:3])
    return present & real[:, None]
