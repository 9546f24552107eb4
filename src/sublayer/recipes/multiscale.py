"""MegaByte (Yu et al. 2023, arXiv 2305.07185): a multi-scale language model over bytes.

A global trunk reads patches of P bytes, a local trunk the bytes of one patch, each conditioned on the global output of
the patches before. Attention over n bytes costs n²/P² and n·P, and the wide feed-forward layers run once a patch.
Token i answers what follows it, so it stands at place i mod P of a patch of answers: token 0 and then every P-th
completes what the global trunk reads next. The paper's padding patch is here P − 1 trained vectors and the document's
first token; at place 0 the local trunk reads a trained vector, for the token there has been through the global trunk.

It stands beside bytes and BPE in a plain decoder; `sublayer train` trains each of them from its own `run.toml`:

    tokenizer.kind = "bytes"    model.recipe = "multiscale"   the bytes of a patch at once
    tokenizer.kind = "bytes"    model.recipe = "llama"        every byte a step of the whole model
    tokenizer.kind = "bpe"      model.recipe = "llama"        a byte-pair token a step, of learned length

>>> multiscale(1024, 24, 16, global_dim=2048, global_layers=24, global_heads=32).parameters()
1513605120
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SpecError
from ..nn.attention import Attention
from ..nn.embed import Embed, look_up
from ..nn.feed_forward import FeedForward
from ..nn.geometry import share
from ..nn.initialise import Init, normal
from ..nn.mask import Layout
from ..nn.norm import LayerNorm
from ..nn.op import Context, Op, Part, scoped
from ..nn.position import Learned
from ..nn.projection import Projection, table
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from ..state import Leaf, PerToken, State
from ..step import Place, Shared, Step, document_starts
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "multiscale", "to_hf"]


def multiscale(
    dim: int,
    layers: int,
    heads: int,
    vocab: int = 257,
    context: int = 8192,
    *,
    global_dim: int,
    global_layers: int,
    global_heads: int,
    patch: int = 8,
    dropout: float = 0.0,
) -> Model:
    """The architecture; dim, layers and heads are the local trunk's, global_dim is the width of a whole patch.

    vocab: the 256 bytes and what ends a text; context: how many bytes a document may have. The head is tied to the
    local trunk's bytes.
    """

    def blocks(dim: int, layers: int, heads: int, window: int | None = None) -> tuple[Block, ...]:
        attention = Attention(heads, bias=True, window=window, dropout=dropout)
        ffn = FeedForward(4 * dim, "gelu", bias=True)
        block = Block((pre_norm("attn", attention, LayerNorm(), dropout), pre_norm("ffn", ffn, LayerNorm(), dropout)))
        return repeat(block, layers)

    embed = PatchedBytes(
        vocab,
        position=Learned(context),
        dropout=dropout,
        patch=patch,
        width=global_dim,
        blocks=blocks(global_dim, global_layers, global_heads),
        last=LayerNorm(),
    )
    trunk = Trunk(embed, blocks(dim, layers, heads, window=patch), LayerNorm())
    return Model(dim, decoder=trunk, tied=True, init=Init(0.02))


class PatchedBytes(Embed):
    """Bytes to the stream of a trunk that reads each patch alone: the byte, and what a global trunk says of the patch.

    Sections 2.1 to 2.3 of the paper. `position` is added to what the global trunk reads. The trunk's attention has to
    be self-attention: its documents are the patches.
    """

    patch: int = 8
    """P, bytes of a patch."""
    width: int = 512
    """Of the global trunk: P vectors of width / P side by side."""
    blocks: tuple[Block, ...] = ()
    """The global trunk's layers."""
    last: Part | None = None
    """The global trunk's last norm."""

    def check(self) -> None:
        super().check()
        self.require(self.patch > 0, f"patch must be above 0, got {self.patch}")
        self.require(self.width % self.patch == 0, f"width={self.width} is not a multiple of patch={self.patch}")
        plain = self.scale == 1.0 and self.types == 0 and self.norm is None
        self.require(plain, "patched bytes have no scale, no types and no norm")

    def build(self, dim: int, context: Context) -> Any:
        return PatchedBytesOp(self, dim)


class PatchedBytesOp(Op):
    """ids [B, L] → ([B, L, D], step whose documents are patches). B rows, L bytes, K patches, P bytes of a patch,
    M bytes known, C width of a byte in the global trunk.

    State: the bytes, and what the global trunk said of a patch, at the byte that began it. So nothing is recurrent,
    and a slot may be cut in the middle of a patch. Without a completed patch in a call the global trunk does not run.
    """

    def __init__(self, spec: PatchedBytes, dim: int) -> None:
        super().__init__()
        self.spec, self.dim = spec, dim
        own, inner = spec.width // spec.patch, Context()
        self.tokens = table(spec.vocab, dim)
        self.begin = nn.Parameter(torch.empty(dim))
        self.bytes = table(spec.vocab, own)
        self.before = nn.Parameter(torch.empty(spec.patch - 1, own))
        self.position = spec.position.build(own, inner) if spec.position else None
        self.trunk = GlobalTrunkOp(spec, inner)
        self.down = Projection(own, dim, bias=False)
        self.rotary = inner.rotary

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.begin, init.table, generator)
        normal(self.before, init.table, generator)

    def state(self) -> dict[str, Leaf]:
        return {"bytes": PerToken((), torch.int64), "said": PerToken((self.spec.patch, self.dim))}

    def forward(self, ids: Tensor, step: Step, state: State | None = None) -> tuple[Tensor, Step]:
        P, shared = self.spec.patch, step.shared or Shared()
        x = look_up(self.tokens, ids, "token id", "vocabulary")
        pos = torch.arange(ids.shape[1], device=ids.device)[None] if step.pos is None else step.pos
        real = None if step.segment is None else step.segment != 0
        if real is not None or state is not None:
            pos = pos.expand_as(ids)
        place = pos % P
        full = place == 0 if real is None else (place == 0) & real  # such a token completes what the global trunk reads
        cell, known = self._known(ids, real, step, state)
        patches = self._patches(full, real, shared.place, state)
        if state is not None and shared.place is not None:
            state.note(shared.place, pos, patches)
        said = self._said(known, cell.expand_as(full), full, step.replace(pos=pos), state)
        if state is not None:
            row, at = torch.arange(len(ids), device=ids.device)[:, None], (cell - place).clamp(0, said.shape[1] - 1)
            own = said[row, at, place] if said.shape[1] else torch.zeros_like(x)  # nothing but padding so far
        else:
            at = ((full.long().cumsum(1) - 1).clamp(min=0) * P + place).expand_as(ids)
            own = said.flatten(1, 2).gather(1, at[..., None].expand_as(x))
        x = torch.where((place == 0)[..., None], self.begin, x) + own
        x = F.dropout(x, self.spec.dropout, self.training)
        return x, step.replace(pos=pos, shared=replace(shared, document=patches))

    def _patches(self, full: Tensor, real: Tensor | None, place: Place | None, state: State | None) -> Tensor:
        """[B|1, L]: the patches of a row or slot numbered from 1; 0 for padding."""
        number = full.long().cumsum(1)
        if state is not None and place is not None:
            held = state.length[place.rows][:, None] > 0
            number = number + torch.where(held, state.last(place)[1], 0)
        number = number.clamp(min=1)
        return number if real is None else torch.where(real, number, 0)

    def _known(self, ids: Tensor, real: Tensor | None, step: Step, state: State | None) -> tuple[Tensor, Tensor]:
        """([B|1, L], [B, M]): the cell of each byte, and the bytes by cell: those of a document side by side."""
        if state is not None and step.shared is not None and step.shared.place is not None:
            state["bytes"].write(ids, step)
            return step.shared.place.index, state["bytes"].read(step)
        if real is None:
            return torch.arange(ids.shape[1], device=ids.device)[None], ids
        order = (~real).long().argsort(stable=True, dim=1)
        return (real.long().cumsum(1) - 1).clamp(min=0), ids.gather(1, order)

    def _said(self, known: Tensor, cell: Tensor, full: Tensor, step: Step, state: State | None) -> Tensor:
        """What the global trunk says of the patches of this call, [B, K, P, D]; with a state, by the cells of the bytes
        that completed what it read, [B, M, P, D]."""
        chosen, taken = _chosen(full)
        if chosen.shape[1]:
            pos = cast(Tensor, step.pos).gather(1, chosen)
            x = self._read(known, cell.gather(1, chosen), pos)
            inner = self._geometry(x, pos, chosen, taken, step, state)
            x = self.trunk(x, inner, scoped(state, "trunk"))
            said = self.down(x.unflatten(-1, (self.spec.patch, -1)))
            if state is None:
                return said
            state["said"].write(said, inner)
        assert state is not None
        return state["said"].read(step).to(self.begin.dtype)

    def _read(self, known: Tensor, cell: Tensor, pos: Tensor) -> Tensor:
        """[B, K, P · C]: the P bytes that end with these cells; before its document began, the trained vectors."""
        P = self.spec.patch
        back = torch.arange(P - 1, -1, -1, device=known.device)
        cells = (cell[..., None] - back).clamp(0, known.shape[1] - 1).expand(len(known), -1, -1)
        pos = pos[..., None] - back
        x = self.bytes(known.gather(1, cells.flatten(1))).unflatten(1, (-1, P))
        if self.position is not None:
            x = x + self.position(pos.clamp(min=0).flatten(1)).unflatten(1, (-1, P)).to(x.dtype)
        before = torch.cat([self.before, self.before.new_zeros(1, x.shape[-1])])
        x = torch.where((pos < 0)[..., None], before, x).flatten(2)
        return F.dropout(x, self.spec.dropout, self.training)

    def _geometry(self, x: Tensor, pos: Tensor, chosen: Tensor, taken: Tensor, step: Step, state: State | None) -> Step:
        """The step of the global trunk: one token a patch, kept in the cell of the byte that completed it."""
        P, shared = self.spec.patch, step.shared or Shared()
        place, layout, document = shared.place, None, shared.document
        if state is not None and place is not None:
            place = replace(place, index=place.index.gather(1, chosen), written=taken, start=None)
            k_pos, patches = state.keys(place)
            completes = (k_pos % P == 0) & (patches != 0)
            number = 1 + (completes & (k_pos == 0)).long().cumsum(1)
            document = torch.where(taken, number.gather(1, place.index.clamp(max=number.shape[1] - 1)), 0)
            layout = Layout(pos // P, k_pos // P, document, torch.where(completes, number, 0))
        elif document is not None:
            document = torch.where(taken, document.gather(1, chosen), 0)
        elif len(taken) > 1:  # positions of the caller's own, which may differ from row to row
            document = taken.long()
        starts = None if document is None else document_starts(document)
        inner = Step(pos=pos // P, segment=document, shared=Shared(place, starts, document))
        inner = share(inner, x, None, cast(Any, self.rotary), None)
        return inner if layout is None else inner.replace(shared=replace(cast(Shared, inner.shared), layout=layout))


class GlobalTrunkOp(Op):
    """[B, K, P · C] → [B, K, P · C]. Raises SpecError for layers with auxiliary losses, which a front end passes on to
    nobody."""

    def __init__(self, spec: PatchedBytes, context: Context) -> None:
        super().__init__()
        self.every = spec.patch
        self.blocks = nn.ModuleDict({str(i): block.build(spec.width, context) for i, block in enumerate(spec.blocks)})
        self.norm = spec.last.build(spec.width, context) if spec.last else None

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        blocks = scoped(state, "blocks")
        for name, block in self.blocks.items():
            x, extras = block(x, step, scoped(blocks, name))
            if extras:
                raise SpecError(
                    f"the global trunk of patched bytes cannot hold layers with losses ({', '.join(extras)})"
                )
        return x if self.norm is None else self.norm(x, step)


def _chosen(full: Tensor) -> tuple[Tensor, Tensor]:
    """([B|1, K], [B|1, K]): which bytes of each row complete a patch, in order, and whether the place is taken.

    When compiling every byte stands there, for how many it will be is not known.
    """
    if torch.compiler.is_compiling():
        return torch.arange(full.shape[1], device=full.device).expand_as(full), full
    most = int(full.sum(1).max())
    chosen = (~full).long().argsort(stable=True, dim=1)[:, :most]
    return chosen, full.gather(1, chosen)


# The sizes that the paper names for its long texts, with the depths and widths of GPT-3's 1.3B and 350M.
SIZES: dict[str, dict[str, Any]] = {
    "megabyte-1.3b-350m": {"dim": 1024, "layers": 24, "heads": 16, "global_dim": 2048, "global_layers": 24,
                           "global_heads": 32},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 24, "layers": 2, "heads": 2, "vocab": 61, "context": 64, "global_dim": 32, "global_layers": 2,
    "global_heads": 4, "patch": 4,
}  # fmt: skip
EXEMPT: dict[str, str] = {}
