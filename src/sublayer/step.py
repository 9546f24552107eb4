"""Step: what one forward pass looks at. Batch geometry is this one object; layers keep none of it.

B batch, L new tokens, M keys or memory length, D model width, N heads, R rotated size.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class Place:
    """Where the new tokens of a call lie in the decoding state; made by State.place, used by its handles."""

    rows: slice | Tensor  # the slots: a slice where they are neighbours (a view, no gather), else [B]
    index: Tensor  # [B, L] cell of each new token; distinct in a row
    written: Tensor | None  # [B, L] bool; None: every token is written
    count: Tensor | int  # [B] tokens written, or one number for all rows
    start: int | None  # first cell when it is the same for all rows and all tokens are written, in eager mode
    used: int | None  # cells read back: the longest row in eager mode; None: the whole capacity, when compiling
    memory_used: int | None  # the same for memory


Kept = dict[str, tuple[Tensor, Tensor]]  # keys and values, each [B, M, K, H], by the name of who left them


def _nothing() -> Kept:
    return {}  # a compiler traces no call of a type with parameters


@dataclass(frozen=True, eq=False)
class Shared:
    """What a trunk computes once a forward pass for all of its layers."""

    place: Place | None = None
    starts: Tensor | None = None  # [B, L] bool: another document starts here, so recurrences forget what came before
    document: Tensor | None = None  # [B, L]: documents of a row or slot numbered from 1, 0 for padding; None: one a row
    layout: Any = None  # nn.mask.Layout of self-attention; None: one document a row, positions by index
    cross: Any = None  # nn.mask.Layout of cross-attention
    rotary: tuple[tuple[Tensor, Tensor], ...] = ()  # (cos, sin) [B or 1, L, R/2] for each distinct rotary position
    key_rotary: tuple[tuple[Tensor, Tensor] | None, ...] = ()  # [B, M, R/2] where keys are cached unrotated
    kept: Kept = field(default_factory=_nothing)  # filled layer by layer: what later layers read too


@dataclass(frozen=True, eq=False)
class Step:
    """What one forward pass looks at. Every field is a tensor or None, so that lengths grow without recompiling.

    Raises nothing itself; the model checks shapes where it uses them.
    """

    pos: Tensor | None = None
    """[B, L] int64: each token's position in its document; None: counted from 0, or on from what the state holds."""
    slots: Tensor | None = None
    """[B] int64: the rows of the state that this batch continues; None: the first B rows."""
    segment: Tensor | None = None
    """[B, L] integer: the document of each token in a packed row, in neighbouring runs; 0 is padding; None: one."""
    memory: Tensor | None = None
    """[B, M, D]: what cross-attention reads (an encoder's output)."""
    memory_segment: Tensor | None = None
    """[B, M] integer: the document of each memory vector, in the numbers of `segment`; 0 is padding."""
    condition: Tensor | None = None
    """[B, …]: what modulates the layers (a diffusion time, a class), or where a recurrence starts."""
    bias: Tensor | None = None
    """[B or 1, N or 1, L, M]: added to the scores of self-attention."""
    prefix: Tensor | None = None
    """[B] int64: positions below it are seen by every query of the document (prefix language models)."""
    mask: Tensor | None = None
    """bool, broadcastable to [B, N, L, M]: explicit permission in self-attention, beside the layers' own masks."""
    types: Tensor | None = None
    """[B, L] int64: token types (BERT's sentence A and B)."""
    shared: Shared | None = None
    """What the trunk computed for its layers; never given by the caller."""

    def replace(self, **changes: Any) -> Step:
        """A copy with some fields changed."""
        return replace(self, **changes)


def document_starts(segment: Tensor) -> Tensor:
    """[B, L] bool: tokens whose previous token (padding apart) belongs to another document.

    The first token of a row is not one of them: it continues what its slot holds, or starts from nothing.
    """
    index = torch.arange(segment.shape[1], device=segment.device).expand_as(segment)
    last = torch.where(segment != 0, index, -1).cummax(1).values  # the newest real token up to here
    before = torch.cat([torch.full_like(last[:, :1], -1), last[:, :-1]], 1)
    previous = segment.gather(1, before.clamp(min=0))
    return (segment != 0) & (before >= 0) & (previous != segment)


def document_positions(segment: Tensor, starts: Tensor, first: Tensor | int = 0) -> Tensor:
    """[B, L] int64: the place of each token in its document, padding not counted; a row's first document begins
    at `first` ([B, 1], or 0), the others at 0."""
    rank = (segment != 0).long().cumsum(1) - 1
    start = torch.where(starts, rank, 0).cummax(1).values
    continues = starts.long().cumsum(1) == 0
    return (rank - start + torch.where(continues, first, 0)).clamp(min=0)


def document_lengths(pos: Tensor, document: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """([B, M], [B, L]): one more than the largest position of the document that each key, each query belongs to.

    pos, document: [B, M] of the keys, documents numbered from 1 in order (0: padding); queries: [B, L] documents.
    """
    longest = torch.zeros(pos.shape[0], pos.shape[1] + 2, dtype=torch.long, device=pos.device)
    longest = longest.scatter_reduce(1, document.long(), pos.long() + 1, "amax")
    return longest.gather(1, document.long()), longest.gather(1, queries.long())


for _class in (Place, Shared, Step):
    pytree.register_dataclass(_class, field_names=[field.name for field in fields(_class)], drop_field_names=[])
