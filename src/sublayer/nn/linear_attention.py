"""Linear attention: softmax(q kᵀ) replaced by φ(q) φ(k)ᵀ, so that a sum over past keys is all there is to remember.

B batch, L length, D model width, N heads, H head size, F features, C chunk size, n chunks.
Source: Katharopoulos et al. 2020, arXiv 2006.16236; random features, Choromanski et al. 2021, arXiv 2009.14794.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import StateError
from ..spec import Spec
from ..state import Leaf, PerSlot, State
from ..step import Shared, Step
from .chunks import Chunks, only, wide
from .constant import constant, traced_as_constant
from .op import Context, Growth, Op, Part
from .projection import Projection

CHUNK = 64  # near the usual head sizes, at which work inside chunks and between them is about the same


class RandomFeatures(Spec):
    """exp(w · x − |x|²/2) for fixed random w: positive, and an unbiased estimate of softmax attention (Performer).

    Queries and keys are scaled by H^−1/4 first. The directions w are orthogonal in blocks of H, drawn from `seed`.
    """

    size: int = 256
    """F, how many directions; the estimate's error falls as one over its square root."""
    seed: int = 0
    """Directions are drawn from it, and are no parameters."""

    def check(self) -> None:
        self.require(self.size > 0, f"size must be above 0, got {self.size}")

    def features(self, x: Tensor, query: bool) -> Tensor:
        """[…, H] → […, F] · F^−1/2; a query's by a factor of its own, which normalisation cancels."""
        head_size = x.shape[-1]
        directions = constant(_directions(self.size, head_size, self.seed), x, x.dtype).view(self.size, head_size)
        x = x * head_size**-0.25
        exponent = x @ directions.T - x.square().sum(-1, keepdim=True) / 2  # lemma 1, arXiv 2009.14794
        if query:
            exponent = exponent - exponent.detach().amax(-1, keepdim=True)
        return exponent.exp() * self.size**-0.5


class LinearAttention(Part):
    """y_i = Σ_j φ(q_i) · φ(k_j) v_j / (Σ_j φ(q_i) · φ(k_j) + eps), over j up to i, or over all j."""

    heads: int
    """N; each has its own queries, keys and values."""
    head_size: int | None = None
    """H; None: D / N."""
    features: Literal["elu", "relu"] | RandomFeatures = "elu"
    """φ: elu(x) + 1 (the paper), relu(x), or random features that approximate softmax."""
    causal: bool = True
    """Whether a query sees only keys at its position or before."""
    eps: float = 1e-6
    """Added to the sum of weights, as in the authors' code."""
    bias: bool = False
    """Whether the four projections have biases."""

    def check(self) -> None:
        self.require(self.heads > 0, f"heads must be above 0, got {self.heads}")
        self.require(self.head_size is None or self.head_size > 0, f"head_size must be above 0, got {self.head_size}")
        self.require(self.eps >= 0, f"eps must be at least 0, got {self.eps}")

    @property
    def growth(self) -> Growth:
        return Growth("n d h", f"n/{CHUNK}" if self.causal else "1", "1")

    def build(self, dim: int, context: Context) -> LinearAttentionOp:
        return LinearAttentionOp(self, dim)


class LinearAttentionOp(Op):
    """[B, L, D] → [B, L, D]. Its state is the sum of φ(k) [v, 1] over a document, [N, F, H + 1], of no length."""

    residual_outputs = ("out",)

    def __init__(self, spec: LinearAttention, dim: int) -> None:
        super().__init__()
        spec.require(
            spec.head_size is not None or dim % spec.heads == 0,
            f"heads={spec.heads} do not divide the width {dim}: choose a divisor, or give head_size",
        )
        self.spec = spec
        self.head_size = spec.head_size or dim // spec.heads
        width = spec.heads * self.head_size
        self.q, self.k, self.v = (Projection(dim, width, spec.bias) for _ in range(3))
        self.out = Projection(width, dim, spec.bias)

    def state(self) -> dict[str, Leaf]:
        if not self.spec.causal:
            return {}
        rows = self.spec.features.size if isinstance(self.spec.features, RandomFeatures) else self.head_size
        heads = self.q.out_features // self.head_size
        return {"sums": PerSlot((heads, rows, self.head_size + 1), wide(self.q.weight.dtype))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        dtype = wide(x.dtype)
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2).to(dtype)
            for projection in (self.q, self.k, self.v)
        )
        with torch.autocast(x.device.type, enabled=False):  # sums over a document keep their digits
            y = self._attend(q, k, F.pad(v, (0, 1), value=1.0), step, state)  # the last column sums the weights
            y = y[..., :-1] / (y[..., -1:] + self.spec.eps)
        return self.out(y.to(x.dtype).transpose(1, 2).flatten(2))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, step: Step, state: State | None) -> Tensor:
        q, k = self._features(q, query=True), self._features(k, query=False)
        if step.segment is not None:
            real = (step.segment != 0)[:, None, :, None]
            k, v = only(k, real), only(v, real)
        if not self.spec.causal:
            if state is not None:
                raise StateError("attention that sees both ways cannot be continued: call the model without a state")
            return both_ways(q, k, v, step)
        sums = None if state is None else state["sums"].read(step).to(q.dtype)
        y, sums = causal(q, k, v, step, sums)
        if state is not None:
            state["sums"].write(sums, step)
        return y

    def _features(self, x: Tensor, query: bool) -> Tensor:
        if isinstance(self.spec.features, RandomFeatures):
            return self.spec.features.features(x, query)
        return F.relu(x) if self.spec.features == "relu" else F.elu(x) + 1


def causal(
    q: Tensor, k: Tensor, v: Tensor, step: Step, sums: Tensor | None = None, *, own: bool = True
) -> tuple[Tensor, Tensor]:
    """y_i = q_i · Σ_{j ≤ i} k_j v_jᵀ within a document, and the sum of the last document; own=False leaves out j = i.

    q, k: [B, N, L, F], 0 in keys and values of padding; v: [B, N, L, H]; sums: [B, N, F, H], what earlier calls left.
    """
    if sums is None:
        sums = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3])
    length = q.shape[2]
    if length == 1 and own:
        sums = sums + k.transpose(2, 3) * v
        return q @ sums, sums
    chunks = Chunks.of(step, length, CHUNK, q.device)
    q, k, v = chunks.cut(q), chunks.cut(k), chunks.cut(v)
    added = only(k, chunks.leaving).transpose(3, 4) @ v  # [B, N, n, F, H]
    before: list[Tensor] = []
    for i, new in enumerate(added.unbind(2)):  # the gradient of added[:, :, i] would be as large as added
        before.append(sums)
        sums = only(sums, None if chunks.kept is None else chunks.kept[:, :, i]) + new
    inside = only(q @ k.transpose(3, 4), chunks.seen if own else chunks.seen.tril(-1)) @ v
    y = inside + only(q, chunks.carried) @ torch.stack(before, 2)
    return y.flatten(2, 3)[:, :, :length], sums


def both_ways(q: Tensor, k: Tensor, v: Tensor, step: Step) -> Tensor:
    """y_i = q_i · Σ_j k_j v_jᵀ over all j of the document; shapes as in `causal`."""
    starts = None if step.shared is None else step.shared.starts
    if starts is None or not (torch.compiler.is_compiling() or bool(starts.any())):
        return q @ (k.transpose(2, 3) @ v)
    # The other way documents end where they start: the first token after a start, read backwards, is a start.
    document = starts.long().cumsum(1).flip(1)
    ends = F.pad(document[:, 1:] != document[:, :-1], (1, 0))
    back = Step(shared=Shared(starts=ends))
    after, _ = causal(q.flip(2), k.flip(2), v.flip(2), back, own=False)
    return causal(q, k, v, step)[0] + after.flip(2)


@traced_as_constant
def _directions(size: int, head_size: int, seed: int) -> tuple[float, ...]:
    return _drawn(size, head_size, seed)


@lru_cache(maxsize=64)
def _drawn(size: int, head_size: int, seed: int) -> tuple[float, ...]:
    """Blocks of orthogonal rows with the lengths of normal vectors (section 2.4, arXiv 2009.14794), in fp64."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(math.ceil(size / head_size), head_size, head_size, generator=generator, dtype=torch.float64)
    columns, triangle = cast("tuple[Tensor, Tensor]", cast(Any, torch.linalg).qr(blocks))
    columns = columns * triangle.diagonal(dim1=1, dim2=2).sign()[:, None]  # one answer on every machine
    rows = columns.transpose(1, 2).flatten(0, 1)[:size]
    lengths = torch.randn(size, head_size, generator=generator, dtype=torch.float64).square().sum(1, keepdim=True)
    rows = rows * lengths.sqrt()
    return tuple(cast("list[float]", cast(Any, rows.flatten()).tolist()))
