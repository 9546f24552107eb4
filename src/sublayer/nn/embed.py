"""Front ends: what turns a model's input into the residual stream. Each returns (x, step), for it may change lengths.

B batch, L length, D width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError
from ..step import Step
from .op import Context, Part
from .position import Learned, Sinusoidal
from .projection import table


class Embed(Part):
    """Token ids to vectors: scale · table[id], plus absolute positions and token types, then a norm."""

    vocab: int
    """V, the rows of the table."""
    scale: float = 1.0
    """What the table's vectors are multiplied by (sqrt(D) in the 2017 model and in Gemma)."""
    position: Learned | Sinusoidal | None = None
    """Absolute positions that are added; None where attention brings its own."""
    types: int = 0
    """Rows of the token-type table; 0: no types."""
    norm: Part | None = None
    """Applied to the sum."""
    dropout: float = 0.0
    """Share of the result zeroed while training."""

    def check(self) -> None:
        self.require(self.vocab > 0, f"vocab must be above 0, got {self.vocab}")
        self.require(self.types >= 0, f"types must not be below 0, got {self.types}")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> EmbedOp:
        return EmbedOp(self, dim, context)


class EmbedOp(nn.Module):
    """ids [B, L] int64 → ([B, L, D], step). Raises InputError, on CPU, for ids outside the vocabulary, and for token
    types where there are none.

    An embedding that is shared has no tokens of its own and is handed the other trunk's table [V, D].
    """

    def __init__(self, spec: Embed, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.tokens = None if context.shared else table(spec.vocab, dim)
        self.position = spec.position.build(dim, context) if spec.position else None
        self.types = table(spec.types, dim) if spec.types else None
        self.norm = spec.norm.build(dim, context) if spec.norm else None

    def forward(self, ids: Tensor, step: Step, shared: Tensor | None = None) -> tuple[Tensor, Step]:
        rows = self.tokens if self.tokens is not None else shared
        if rows is None:
            raise InputError("the embedding reads the decoder's table: call the whole model, or its encode")
        x = look_up(rows, ids, "token id", "vocabulary")
        if self.spec.scale != 1.0:
            # Rounded to x's dtype first, as the published models were trained.
            x = x * torch.tensor(self.spec.scale, dtype=x.dtype, device=x.device)
        if self.position is not None:
            pos = step.pos if step.pos is not None else torch.arange(ids.shape[1], device=ids.device)[None]
            x = x + self.position(pos).to(x.dtype)
        if self.types is not None:
            types = step.types if step.types is not None else torch.zeros_like(ids)
            x = x + look_up(self.types, types, "token type", "types")
        elif step.types is not None:
            raise InputError("Step.types: the model knows no token types")
        if self.norm is not None:
            x = self.norm(x, step)
        return F.dropout(x, self.spec.dropout, self.training), step


def look_up(rows: nn.Embedding | Tensor, ids: Tensor, what: str, whole: str) -> Tensor:
    """The rows of these ids, […, D]. Raises InputError for what is no id and, on CPU, for ids outside the table."""
    if not isinstance(ids, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(f"{what}s are a tensor [B, L], got {type(ids).__name__}")
    if ids.dtype not in (torch.int64, torch.int32):
        raise InputError(f"{what}s are int64 or int32, got {ids.dtype}")
    look_up = partial(F.embedding, weight=rows) if isinstance(rows, Tensor) else rows
    if torch.compiler.is_compiling():
        return look_up(ids)
    try:
        return look_up(ids)
    except IndexError:
        count = len(rows) if isinstance(rows, Tensor) else rows.num_embeddings
        bad = ids[(ids < 0) | (ids >= count)][0]
        raise InputError(f"{what} {int(bad)} is outside the {whole} of {count}") from None
