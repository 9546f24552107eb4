"""The gated delta rule: a matrix memory that fades, and where a key is overwritten rather than added to.

B batch, L length, D model width, K key heads, N value heads, H key size, P value size, C chunk size, n chunks.
Source: Yang et al. 2024, arXiv 2412.06464 (gated); arXiv 2406.06484 (in chunks).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import Leaf, PerSlot, State
from ..step import Step
from .chunks import Chunks, faded, only, wide
from .convolution import ShortConvolution
from .initialise import Init
from .norm import RMSNorm
from .op import Context, Growth, Op, Part, scoped
from .projection import Projection

CHUNK = 64
NORM_EPS = 1e-6  # of the unit length of queries and keys, as in the authors' kernels


class GatedDelta(Part):
    """S ← exp(g) S; S ← S + β k (v − Sᵀ k)ᵀ; y = Sᵀ q / √H, for each value head; then a gated norm and a projection.

    q, k and v go through a short convolution, then q and k are scaled to length 1. β = sigmoid(β(x)) says how much of
    what k held is replaced, g = −exp(log_rate) · softplus(decay(x) + rate_bias) how much of everything fades.
    """

    key_heads: int
    """K, heads of queries and keys, each shared by N / K value heads."""
    value_heads: int
    """N, each with a memory of its own."""
    key_size: int = 128
    """H."""
    value_size: int = 128
    """P."""
    convolution: ShortConvolution = ShortConvolution(4, bias=False, activation="silu")
    """Over the channels of q, k and v, each alone."""
    eps: float = 1e-6
    """Of the norm before the gate."""

    def check(self) -> None:
        sizes = (self.key_heads, self.value_heads, self.key_size, self.value_size)
        self.require(min(sizes) > 0, f"key_heads, value_heads, key_size and value_size must be above 0, got {sizes}")
        self.require(
            self.value_heads % self.key_heads == 0,
            f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}",
        )
        self.require(self.eps >= 0, f"eps must be at least 0, got {self.eps}")

    @property
    def growth(self) -> Growth:
        return Growth("n d h", f"n/{CHUNK}", "1")

    def build(self, dim: int, context: Context) -> GatedDeltaOp:
        return GatedDeltaOp(self, dim, context)


class GatedDeltaOp(Op):
    """[B, L, D] → [B, L, D]. Its state is the memory [N, H, P] of a document and the convolution's last inputs."""

    residual_outputs = ("out",)

    def __init__(self, spec: GatedDelta, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        keys, values = spec.key_heads * spec.key_size, spec.value_heads * spec.value_size
        self.q, self.k, self.v = (Projection(dim, width, bias=False) for width in (keys, keys, values))
        self.gate = Projection(dim, values, bias=False)
        self.beta = Projection(dim, spec.value_heads, bias=False)
        self.decay = Projection(dim, spec.value_heads, bias=False)
        self.rate_bias = nn.Parameter(torch.empty(spec.value_heads))
        self.log_rate = nn.Parameter(torch.empty(spec.value_heads))
        self.convolution = spec.convolution.build(2 * keys + values, context)
        self.norm = RMSNorm(spec.eps).build(spec.value_size, context)
        self.out = Projection(values, dim, bias=False)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """As the authors' code: rates are drawn evenly from 0.01 to 16, biases are 1."""
        self.rate_bias.fill_(1)
        self.log_rate.copy_((0.01 + 15.99 * torch.rand(self.log_rate.shape, generator=generator)).log())

    def state(self) -> dict[str, Leaf]:
        spec = self.spec
        shape = (spec.value_heads, spec.key_size, spec.value_size)
        return {"memory": PerSlot(shape, wide(self.log_rate.dtype))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        spec, dtype = self.spec, wide(x.dtype)
        channels = torch.cat([self.q(x), self.k(x), self.v(x)], -1)
        channels = self.convolution(channels, step, scoped(state, "convolution")).to(dtype)
        keys = self.k.out_features
        q, k, v = channels.split((keys, keys, channels.shape[-1] - 2 * keys), -1)
        q, k = (_unit(_heads(part, spec.key_size)) for part in (q, k))
        shared = spec.value_heads // spec.key_heads
        q, k = (part.repeat_interleave(shared, 1) for part in (q * spec.key_size**-0.5, k))
        v, beta = _heads(v, spec.value_size), self.beta(x).to(dtype).sigmoid().transpose(1, 2)
        rate = F.softplus(self.decay(x).to(dtype) + self.rate_bias.to(dtype))
        fade = (-self.log_rate.to(dtype).exp() * rate).transpose(1, 2)
        if step.segment is not None:
            real = (step.segment != 0)[:, None]
            k, v = only(k, real[..., None]), only(v, real[..., None])
            beta, fade = only(beta, real), only(fade, real)
        memory = None if state is None else state["memory"].read(step).to(dtype)
        with torch.autocast(x.device.type, enabled=False):  # what is kept over a document keeps its digits
            y, memory = gated_delta(q, k, v, fade, beta, step, memory)
        if state is not None:
            state["memory"].write(memory, step)
        y = self.norm(y.transpose(1, 2).to(x.dtype))
        y = y.to(dtype) * F.silu(self.gate(x).to(dtype)).view(y.shape)
        return self.out(y.to(x.dtype).flatten(2))


def _heads(x: Tensor, size: int) -> Tensor:
    """[B, L, N · size] → [B, N, L, size]; -1: under tensor parallelism a shard holds fewer heads."""
    return x.view(*x.shape[:2], -1, size).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor, step: Step, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(y [B, N, L, P], the memory after the last token [B, N, H, P]) of the gated delta rule, in chunks.

    q, k: [B, N, L, H]; v: [B, N, L, P]; fade (g ≤ 0), beta: [B, N, L]; all 0 at padding but q. memory: what earlier
    calls left. Memories begin at 0 where `step` says that documents start.
    """
    left = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]) if memory is None else memory
    if q.shape[2] == 1:
        return _one(q, k, v, fade, beta, left)
    length = q.shape[2]
    chunks = Chunks.of(step, length, CHUNK, q.device)
    q, k, v, fade, beta = (chunks.cut(x) for x in (q, k, v, fade, beta))
    # Σ g from after j up to i: summed column by column, for differences of one running sum would lose their digits.
    between = fade[..., None].expand(*fade.shape, chunks.size).tril(-1).cumsum(-2)
    decay = only(faded(between, q.dtype), chunks.seen)  # [B, N, n, C, C]
    since = faded(fade.cumsum(-1), q.dtype)[..., None]  # [B, N, n, C, 1]: from the chunk's beginning
    # What each token writes is u_i = β_i (v_i − what is found at k_i), which earlier tokens of its chunk have changed:
    # a triangular system, solved for what v writes and for what the memory before the chunk takes off it.
    system = beta[..., None] * (k @ k.transpose(-1, -2)) * decay
    sides = torch.cat([beta[..., None] * v, only(beta[..., None] * since * k, chunks.carried)], -1)
    solve = cast("Callable[..., Tensor]", cast(Any, torch.linalg).solve_triangular)
    solved = solve(system, sides, upper=False, unitriangular=True)
    written, taken = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    leaving = (k * decay[..., -1, :, None]).transpose(-1, -2)  # as it is left of each key at the chunk's end
    kept = only(since[..., -1:, :], chunks.kept)
    before: list[Tensor] = []
    writes: list[Tensor] = []
    # Unbound, for the gradient of each x[:, :, i] would be as large as x: n² work in all.
    for write, take, keep, leave in zip(*(x.unbind(2) for x in (written, taken, kept, leaving)), strict=True):
        before.append(left)
        writes.append(write - take @ left)
        left = keep * left + leave @ writes[-1]
    y = only(q * since, chunks.carried) @ torch.stack(before, 2)
    y = y + (q @ k.transpose(-1, -2) * decay) @ torch.stack(writes, 2)
    return y.flatten(2, 3)[:, :, :length], left


def _one(q: Tensor, k: Tensor, v: Tensor, fade: Tensor, beta: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
    """One token: the rule as it is written."""
    memory = memory * fade.exp()[..., None]
    memory = memory + k.transpose(2, 3) * (beta[..., None] * (v - k @ memory))
    return q @ memory, memory
