"""Heads: from the residual stream to what a model answers: tokens, classes, spans, embeddings.

A head that pools answers for documents, and still answers every token: each has the answer of its document. So rows
may be packed and padded as everywhere; `of_documents` picks one row a document.

B batch, L length, D model width, V vocabulary, C classes, K documents of a row (0 is its padding).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InputError, SpecError
from ..step import Step, document_starts
from .feed_forward import ACTIVATIONS, Activation
from .initialise import Init, normal
from .op import Context, Part
from .projection import Projection

Pool = Literal["first", "mean", "last"]


class Head(Part):
    """Logits: scale · (x Wᵀ) + bias, then softly capped. Tied, it has no weight and is handed the embedding's."""

    bias: bool = False
    """Whether a bias is learned."""
    scale: float = 1.0
    """What x is multiplied by first (D^−1/2 in T5 when tied)."""
    softcap: float | None = None
    """c in c · tanh(logits / c); None: no cap (Gemma 2 uses 30)."""
    before: Part | None = None
    """What x goes through first: the Transform of masked language models."""

    def check(self) -> None:
        self.require(self.softcap is None or self.softcap > 0, f"softcap must be above 0, got {self.softcap}")

    def build(self, dim: int, context: Context) -> HeadOp:
        if context.vocab is None:
            raise SpecError("Head: logits over tokens need a token embedding (Embed); give another head, or None")
        return HeadOp(self, dim, context.vocab, context)


class HeadOp(nn.Module):
    """x […, D], table: the embedding's [V, D] when tied → […, V] in x's dtype."""

    def __init__(self, spec: Head, dim: int, vocab: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.before = spec.before.build(dim, context) if spec.before else None
        self.weight = None if context.tied else nn.Parameter(torch.empty(vocab, dim))
        self.bias = nn.Parameter(torch.empty(vocab)) if spec.bias else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        if self.weight is not None:
            normal(self.weight, init.matrix(self.weight.shape[1]), generator)
        if self.bias is not None:
            self.bias.zero_()

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        weight = self.weight if self.weight is not None else table
        assert weight is not None
        if self.before is not None:
            x = self.before(x, step)
        logits = F.linear(x * self.spec.scale if self.spec.scale != 1.0 else x, weight, self.bias)
        if self.spec.softcap is not None:
            logits = self.spec.softcap * torch.tanh(logits / self.spec.softcap)
        return logits


class Transform(Part):
    """norm(activation(dense(x))): what BERT's heads do first. With "tanh" and no norm it is BERT's pooler."""

    activation: Activation = "gelu"
    """Between the matrix and the norm."""
    norm: Part | None = None
    """After the activation."""
    bias: bool = True
    """Whether the matrix has a bias."""
    dropout: float = 0.0
    """Share of x zeroed while training."""

    def check(self) -> None:
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> TransformOp:
        return TransformOp(self, dim, context)


class TransformOp(nn.Module):
    """[…, D] → […, D]."""

    def __init__(self, spec: Transform, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.dense = Projection(dim, dim, spec.bias)
        self.norm = spec.norm.build(dim, context) if spec.norm else None

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        y = ACTIVATIONS[self.spec.activation](self.dense(F.dropout(x, self.spec.dropout, self.training)))
        return y if self.norm is None else self.norm(y, step)


class Classifier(Part):
    """Logits of classes, for each token (tags) or for each document (pooled)."""

    classes: int
    """C."""
    pool: Pool | None = None
    """What stands for a document: its first token, its last, or the mean of all; None: each token for itself."""
    before: Part | None = None
    """What goes through the matrix first, after pooling: a Transform."""
    bias: bool = True
    """Whether the matrix has a bias."""
    dropout: float = 0.0
    """Share of the matrix's input zeroed while training."""

    def check(self) -> None:
        self.require(self.classes > 0, f"classes must be above 0, got {self.classes}")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> ClassifierOp:
        return ClassifierOp(self, self.classes, self.pool, dim, context)


class Spans(Part):
    """Extractive question answering: how well an answer starts, and how well it ends, at each token: [B, L, 2]."""

    before: Part | None = None
    """What goes through the matrix first: a Transform."""
    bias: bool = True
    """Whether the matrix has a bias."""
    dropout: float = 0.0
    """Share of the matrix's input zeroed while training."""

    def check(self) -> None:
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> ClassifierOp:
        return ClassifierOp(self, 2, None, dim, context)


class ClassifierOp(nn.Module):
    """[B, L, D] → [B, L, C]; pooled, every token has its document's."""

    def __init__(self, spec: Classifier | Spans, classes: int, pool: Pool | None, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.pool: Pool | None = pool
        self.before = spec.before.build(dim, context) if spec.before else None
        self.out = Projection(dim, classes, spec.bias)

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        if self.pool is None:
            return self._classes(x, step)
        pooled, number = pool(x, step, self.pool)
        return spread(self._classes(pooled, step), number, x.shape[1])

    def _classes(self, x: Tensor, step: Step | None) -> Tensor:
        x = x if self.before is None else self.before(x, step)
        return self.out(F.dropout(x, self.spec.dropout, self.training))


class Pooled(Part):
    """One vector a document: an embedding to compare by cosine, or BERT's pooler."""

    pool: Pool = "mean"
    """The mean of its tokens, its first token or its last."""
    before: Part | None = None
    """What it goes through after pooling: a Transform."""
    normalise: bool = False
    """Whether it is divided by its length, so that a dot product is a cosine."""

    def build(self, dim: int, context: Context) -> PooledOp:
        return PooledOp(self, dim, context)


class PooledOp(nn.Module):
    """[B, L, D] → [B, L, D]: every token has the vector of its document."""

    def __init__(self, spec: Pooled, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.before = spec.before.build(dim, context) if spec.before else None

    def forward(self, x: Tensor, step: Step | None = None, table: Tensor | None = None) -> Tensor:
        y, number = pool(x, step, self.spec.pool)
        y = y if self.before is None else self.before(y, step)
        return spread(F.normalize(y, dim=-1) if self.spec.normalise else y, number, x.shape[1])


def of_documents(y: Tensor, step: Step | None = None) -> Tensor:
    """[B, L, C] → [documents, C]: one row of y a document (that of its first token), row by row, padding left out.

    For what a head that pools answered, and for labels of the same shape. Without Step.segment a row is one document.
    """
    if step is None or step.segment is None:
        return y[:, 0]
    number = _numbers(step.segment)
    before = F.pad(number.cummax(1).values[:, :-1], (1, 0))
    return y[number > before]


def pool(x: Tensor, step: Step | None, how: Pool) -> tuple[Tensor, Tensor | None]:
    """(x pooled over documents [B, K, D], the document of each token [B, L] among them).

    Without Step.segment a row is one document: K is 1, and None stands for the numbers. With a state it pools over the
    tokens of the call. Sums are taken in fp32 at least. Raises InputError for x of another rank.
    """
    if x.dim() != 3:
        raise InputError(f"a head that pools takes rows of tokens [B, L, D], got {list(x.shape)}")
    B, L, D = x.shape
    wide = x if x.dtype == torch.float64 else x.float()
    if step is None or step.segment is None:
        if how == "mean":
            return wide.mean(1, keepdim=True).to(x.dtype), None
        return x[:, :1] if how == "first" else x[:, -1:], None
    number = _numbers(step.segment)
    x, wide = (one.masked_fill((number == 0)[:, :, None], 0) for one in (x, wide))  # NaN in padding reaches nothing
    fixed = torch.compiler.is_compiling() or x.device.type != "cpu"  # reading the number waits for the device
    K = 1 + (L if fixed else int(number.max()))
    if how == "mean":
        sums = wide.new_zeros(B, K, D).scatter_add(1, number[:, :, None].expand_as(x), wide)
        count = wide.new_zeros(B, K).scatter_add(1, number, torch.ones_like(number, dtype=wide.dtype))
        return (sums / count.clamp(min=1)[:, :, None]).to(x.dtype), number
    index = torch.arange(L, device=x.device).expand_as(number)
    none = index.new_full((B, K), L - 1 if how == "first" else 0)
    place = none.scatter_reduce(1, number, index, "amin" if how == "first" else "amax")
    return x.gather(1, place[:, :, None].expand(-1, -1, D)), number


def spread(y: Tensor, number: Tensor | None, length: int) -> Tensor:
    """[B, K, C] → [B, L, C]: the row of y that each token's number names."""
    if number is None:
        return y.expand(-1, length, -1)
    return y.gather(1, number[:, :, None].expand(-1, -1, y.shape[2]))


def _numbers(segment: Tensor) -> Tensor:
    """[B, L]: the documents of each row numbered from 1 in order, 0 for padding."""
    return torch.where(segment != 0, 1 + document_starts(segment).long().cumsum(1), 0)
