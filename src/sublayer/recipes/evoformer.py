"""Evoformer, the trunk of AlphaFold 2 (Jumper et al. 2021, Nature 596; supplementary algorithms 3 to 14).

Two streams read each other: an alignment's cells, a vector for each residue of each sequence, and pairs, a vector for
each two residues. Attention runs along rows (with a bias from the pairs) and along columns; pairs get the mean outer
product of the cells, and are updated over triangles: the pair ij by all pairs ik and jk.

Not here: recycling, templates, the stack of extra sequences, and what follows (single vectors, structure module).

>>> evoformer(**SIZES["evoformer-48"]).parameters()
87883735
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import InputError
from ..nn.feed_forward import FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.op import Context, Part
from ..nn.pairs import (
    AxialAttention,
    NormedStreams,
    OnStream,
    OuterProductMean,
    SharedDropout,
    Stream,
    Streams,
    TriangleMultiplication,
)
from ..nn.projection import Projection, table
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from ..step import Step
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "evoformer", "to_hf"]

# B alignments, S sequences, L residues, C width of cells, P of pairs.
AMINO_ACIDS = "ARNDCQEGHILKMFPSTWYV"
"""The ids 0 to 19; then 20 is an unknown one, 21 a gap, 22 a masked cell."""
UNKNOWN, GAP, MASKED = 20, 21, 22


# --- the front end ---


class RelativeDistance(Part):
    """A vector for each distance along the chain, and one each way for all beyond `reach` (algorithms 4 and 5)."""

    reach: int = 32

    def check(self) -> None:
        self.require(self.reach >= 0, f"reach must not be below 0, got {self.reach}")

    def build(self, dim: int, context: Context) -> RelativeDistanceOp:
        return RelativeDistanceOp(self, dim)


class RelativeDistanceOp(nn.Module):
    """Positions [B or 1, L] → [B or 1, L, L, dim]."""

    def __init__(self, spec: RelativeDistance, dim: int) -> None:
        super().__init__()
        self.reach, self.table = spec.reach, table(2 * spec.reach + 1, dim)

    def forward(self, pos: Tensor) -> Tensor:
        return self.table((pos[:, :, None] - pos[:, None]).clamp(-self.reach, self.reach) + self.reach)


class EmbedAlignment(Part):
    """Cells and pairs of an alignment and its target (algorithm 3).

    AlphaFold's linear maps of one-hot vectors are tables here, which have the maps' biases in their rows.
    """

    pair: int
    """P, the width of pairs."""
    classes: int = 23
    """What a cell may be: an amino acid, an unknown one, a gap, masked."""
    residues: int = 21
    """What a residue of the target may be: an amino acid, or an unknown one."""
    features: int = 0
    """Numbers given for each cell beside its class (26 in AlphaFold: deletions and the profile of a cluster)."""
    position: RelativeDistance = RelativeDistance()
    """How pairs know how far apart they are along the chain."""

    def check(self) -> None:
        sizes = min(self.pair, self.classes, self.residues)
        self.require(sizes > 0, f"pair, classes and residues must be above 0, got {sizes}")
        self.require(self.features >= 0, f"features must not be below 0, got {self.features}")

    def build(self, dim: int, context: Context) -> EmbedAlignmentOp:
        return EmbedAlignmentOp(self, dim, context)


class EmbedAlignmentOp(nn.Module):
    """{"msa": [B, S, L] int64, "target": [B, L] int64} → ({"pair": [B, L, L, P], "msa": [B, S, L, C]}, step).

    Further inputs: "present" [B, S, L] bool, the cells that are no padding (None: all), and "features" [B, S, L, F].
    Residues of padding are those of Step.segment, as everywhere; their positions, Step.pos, are counted from 0 unless
    given (where a chain has a gap). Raises InputError for inputs that do not fit, and for several documents in a row.
    """

    def __init__(self, spec: EmbedAlignment, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.msa, self.target = table(spec.classes, dim), table(spec.residues, dim)
        self.left, self.right = table(spec.residues, spec.pair), table(spec.residues, spec.pair)
        self.position = spec.position.build(spec.pair, context)
        self.features = Projection(spec.features, dim) if spec.features else None

    def forward(self, inputs: Streams, step: Step) -> tuple[Streams, Step]:
        self._check(inputs, step)
        target = inputs["target"]
        msa = self.msa(inputs["msa"]) + self.target(target)[:, None]
        if self.features is not None:
            msa = msa + self.features(inputs["features"].to(msa.dtype))
        pos = step.pos if step.pos is not None else torch.arange(target.shape[1], device=target.device)[None]
        pair = self.left(target)[:, :, None] + self.right(target)[:, None] + self.position(pos)
        stream = {"pair": pair, "msa": msa}  # the pairs first, for their shape is that of a batch of rows
        return (stream | {"present": inputs["present"]} if "present" in inputs else stream), step

    def _check(self, inputs: Streams, step: Step) -> None:
        known = {"msa", "target", "present", *(("features",) if self.spec.features else ())}
        needed = known - {"present"}
        if not isinstance(inputs, dict) or not needed <= set(inputs) <= known:
            raise InputError(
                f'an alignment is {{"msa": …, "target": …}}: it needs {sorted(needed)}, and may have present'
            )
        ids, target = inputs["msa"], inputs["target"]
        if ids.dim() != 3 or target.shape != (ids.shape[0], ids.shape[2]):
            raise InputError(f"msa is [B, S, L] and target [B, L], got {list(ids.shape)} and {list(target.shape)}")
        for name, last in (("present", ()), ("features", (self.spec.features,))):
            if name in inputs and inputs[name].shape != (*ids.shape, *last):
                raise InputError(f"{name} is {list(inputs[name].shape)}, the alignment {list(ids.shape)}")
        if torch.compiler.is_compiling() or ids.device.type != "cpu":
            return
        for name, given, classes in (("msa", ids, self.spec.classes), ("target", target, self.spec.residues)):
            bad = given[(given < 0) | (given >= classes)]
            if len(bad):
                raise InputError(f"{name}: class {int(bad[0])} is none of 0 … {classes - 1}")
        if step.segment is not None and int(step.segment.max()) > 1:
            raise InputError("several alignments cannot share a row: a pair belongs to one")


# --- the head ---


class AlignmentHead(Part):
    """What the cells are, and how far apart two residues are (sections 1.9.8 and 1.9.9)."""

    pair: int
    """P, the width of pairs."""
    classes: int = 23
    """Of a cell."""
    bins: int = 64
    """Of the distance between two residues."""

    def build(self, dim: int, context: Context) -> AlignmentHeadOp:
        return AlignmentHeadOp(self, dim)


class AlignmentHeadOp(nn.Module):
    """Streams → {"msa": [B, S, L, classes], "distogram": [B, L, L, bins]}; a distance is the same both ways."""

    def __init__(self, spec: AlignmentHead, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.msa, self.distogram = Zero(dim, spec.classes), Zero(spec.pair, spec.bins)

    def forward(self, x: Streams, step: Step | None = None, table: Tensor | None = None) -> Streams:
        half = self.distogram(x["pair"])
        return {"msa": self.msa(x["msa"]), "distogram": half + half.transpose(1, 2)}


class Zero(Projection):
    """Begins as zero."""

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.zero_()
        self.bias.zero_()


# --- the architecture ---


def evoformer(
    dim: int,
    layers: int,
    heads: int,
    pair: int,
    pair_heads: int,
    *,
    head_size: int = 32,
    rank: int = 32,
    triangle: int | None = None,
    widening: int = 4,
    features: int = 0,
    reach: int = 32,
    bins: int = 64,
    dropout: float = 0.0,
    pair_dropout: float = 0.0,
    eps: float = 1e-5,
) -> Model:
    """The architecture: dim and heads of the cells, pair and pair_heads of the pairs.

    rank: of the outer product; triangle: width of the triangle multiplication, None being `pair`; widening: of the
    transitions. dropout is of row attention, pair_dropout of triangles. Matrices begin by their width, what writes
    into a stream and the head as zero, gates open.
    """
    norm, triangle = LayerNorm(eps), pair if triangle is None else triangle

    def part(name: str, op: Part, *streams: Stream, share: float = 0.0, axis: Literal[1, 2] = 1) -> Sublayer:
        scale = SharedDropout(share, axis) if share else 1.0
        return Sublayer(name, op, pre=NormedStreams(streams, pair, norm), scale=scale)

    def attention(stream: Stream, along: Literal["rows", "columns"], biased: bool = True) -> AxialAttention:
        return AxialAttention(stream, along, heads if stream == "msa" else pair_heads, pair, head_size, biased)

    def transition(stream: Stream, width: int) -> OnStream:
        return OnStream(stream, FeedForward(widening * width, "relu", bias=True), pair)

    block = Block((
        part("row", attention("msa", "rows"), "msa", "pair", share=dropout),
        part("column", attention("msa", "columns", biased=False), "msa"),
        part("transition", transition("msa", dim), "msa"),
        part("outer", OuterProductMean(pair, rank), "msa"),
        part("outgoing", TriangleMultiplication("outgoing", pair, triangle, norm), "pair", share=pair_dropout),
        part("incoming", TriangleMultiplication("incoming", pair, triangle, norm), "pair", share=pair_dropout),
        part("starting", attention("pair", "rows"), "pair", share=pair_dropout),
        part("ending", attention("pair", "columns"), "pair", share=pair_dropout, axis=2),
        part("pair_transition", transition("pair", pair), "pair"),
    ))  # fmt: skip
    embed = EmbedAlignment(pair, features=features, position=RelativeDistance(reach))
    trunk, head = Trunk(embed, repeat(block, layers)), AlignmentHead(pair, bins=bins)
    return Model(dim, encoder=trunk, head=head, init=Init("fan_in", residual=0.0))


SIZES: dict[str, dict[str, Any]] = {
    "evoformer-48": {
        "dim": 256,
        "layers": 48,
        "heads": 8,
        "pair": 128,
        "pair_heads": 4,
        "features": 26,
        "dropout": 0.15,
        "pair_dropout": 0.25,
    }
}
TINY: dict[str, Any] = {"dim": 24, "layers": 2, "heads": 2, "pair": 16, "pair_heads": 2, "head_size": 8, "rank": 4}
TINY |= {"widening": 2, "reach": 3, "bins": 6}
EXEMPT = {
    "incremental": "it writes no sequence",
    "packing": "a pair belongs to one alignment, so several in a row would need pairs between them",
}
