"""Multi-head latent attention: keys and values of all heads are made from one small vector a token, and that is kept.

B batch, L query length, M key length, D model width, N heads, C latent size, H content size, R rotary size, V value
size. Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..state import Leaf, PerToken, State
from ..step import Shared, Step
from .attend import attend
from .attention import AttendingOp
from .mask import Mask
from .norm import RMSNorm
from .op import Context, Growth, Part
from .projection import Projection
from .rope import Rope, rotate


class LatentAttention(Part):
    """Causal attention whose scores are content · content + rotary query · rotary key, that key shared by all heads.

    With c = norm(W x) the latent of a token, a head's content keys and values are linear maps of c; positions turn the
    rotary parts alone, so that those maps can move to the side of the query.
    """

    heads: int
    """N."""
    latent: int
    """C, the size of what keys and values are made from."""
    content_size: int
    """H, the dims of a head's queries and keys that know no positions."""
    rotary_size: int
    """R, the dims of a head's queries, and of the shared key, that positions turn."""
    value_size: int
    """V, the dims of a head's values."""
    query_latent: int | None = None
    """Size of the latent that queries are made from; None: they are made from x."""
    position: Rope = Rope()
    """How the rotary dims turn: all R of them."""
    norm: Part = RMSNorm()
    """The norm of both latents."""
    scale: float | None = None
    """What scores are multiplied by; None: (H + R)^−1/2."""
    bias: bool = False
    """Whether the maps from x to latents and to the rotary key, and the output projection, have biases."""
    dropout: float = 0.0
    """Share of attention weights zeroed while training."""

    def check(self) -> None:
        for name in ("heads", "latent", "content_size", "rotary_size", "value_size", "query_latent"):
            value = getattr(self, name)
            self.require(value is None or value > 0, f"{name} must be above 0, got {value}")
        self.require(self.position.size is None, "position.size: all of rotary_size turn; leave size out")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    @property
    def growth(self) -> Growth:
        return Growth("n² d", "1", "1")

    def build(self, dim: int, context: Context) -> LatentAttentionOp:
        return LatentAttentionOp(self, dim, context)


class LatentAttentionOp(AttendingOp):
    """[B, L, D] → [B, L, D]. Its state is the latent and the rotary key of each token, C + R numbers for all heads."""

    residual_outputs = ("out",)

    def __init__(self, spec: LatentAttention, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.absorb: bool | None = None  # whether queries move into the latent; None: where that multiplies less
        N, C, H, R = spec.heads, spec.latent, spec.content_size, spec.rotary_size
        self.scale = spec.scale if spec.scale is not None else (H + R) ** -0.5
        self.pair = N * (H + R + spec.value_size)  # as expanded
        spec.position.rotated(R)  # refuses sizes that do not fit
        self.table = context.number(spec.position, R)
        self.q = self.q_down = self.q_down_norm = self.q_up = None
        if spec.query_latent is None:
            self.q = Projection(dim, N * (H + R), bias=False)
        else:
            self.q_down = Projection(dim, spec.query_latent, spec.bias)
            self.q_down_norm = spec.norm.build(spec.query_latent, context)
            self.q_up = Projection(spec.query_latent, N * (H + R), bias=False)
        self.down = Projection(dim, C, spec.bias)
        self.down_norm = spec.norm.build(C, context)
        self.k_rotary = Projection(dim, R, spec.bias)
        self.k_up = Projection(C, N * H, bias=False)
        self.v_up = Projection(C, N * spec.value_size, bias=False)
        self.out = Projection(N * spec.value_size, dim, spec.bias)

    def state(self) -> dict[str, Leaf]:
        return {"latent": PerToken((self.spec.latent + self.spec.rotary_size,))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        spec, shared = self.spec, step.shared or Shared()
        q = self._queries(x)
        content = q[..., : spec.content_size]
        turning = self._rotate(q[..., spec.content_size :], shared.rotary[self.table])
        kept = self._kept(x, step, state, shared)
        mask = Mask(causal=step.prefix is None, prefix=step.prefix, allowed=step.mask, layout=shared.layout)
        absorbed = self._absorbs(x.shape[1], kept.shape[1]) if self.absorb is None else self.absorb
        y = (self._absorbed if absorbed else self._expanded)(content, turning, kept, mask, step.bias)
        return self.out(y.transpose(1, 2).flatten(2))

    def _queries(self, x: Tensor) -> Tensor:
        """[B, N, L, H + R]."""
        if self.q is not None:
            q = self.q(x)
        else:
            assert self.q_down is not None
            assert self.q_down_norm is not None
            assert self.q_up is not None
            q = self.q_up(self.q_down_norm(self.q_down(x)))
        size = self.spec.content_size + self.spec.rotary_size
        return q.unflatten(-1, (-1, size)).transpose(1, 2)  # -1: under tensor parallelism a shard holds fewer heads

    def _rotate(self, x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        return rotate(x, *table, self.spec.position.pairing)

    def _kept(self, x: Tensor, step: Step, state: State | None, shared: Shared) -> Tensor:
        """[B, M, C + R]: the latent and the rotary key, turned, of every token up to this call's last."""
        latent, key = self.down_norm(self.down(x)), self.k_rotary(x)
        dynamic = self.spec.position.dynamic
        if not dynamic:
            key = self._rotate(key, shared.rotary[self.table])
        kept = torch.cat((latent, key), -1)
        if state is not None:
            state["latent"].write(kept, step)
            kept = state["latent"].read(step).to(x.dtype)
        if dynamic:
            table = shared.key_rotary[self.table]
            assert table is not None
            C = self.spec.latent
            kept = torch.cat((kept[..., :C], self._rotate(kept[..., C:], table)), -1)
        return kept

    def _absorbs(self, L: int, M: int) -> bool:
        """Whether the absorbed form multiplies less: it makes no keys and values, but its scores and sums are wider.

        It reads the maps' matrices, so never where something else (an adapter, a quantised map) stands in their place.
        """
        C, sizes = self.spec.latent, self.spec.content_size + self.spec.value_size
        plain = type(self.k_up) is Projection and type(self.v_up) is Projection
        return plain and L * (M * (2 * C - sizes) + C * sizes) < M * C * sizes

    def _absorbed(self, content: Tensor, turning: Tensor, kept: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """q · (W c) = (Wᵀ q) · c: one key a token for all heads, which is its value too; [B, N, L, V]."""
        C = self.spec.latent
        k_up = self.k_up.weight.view(-1, self.spec.content_size, C)
        v_up = self.v_up.weight.view(-1, self.spec.value_size, C)
        q = torch.cat((torch.einsum("bnlh,nhc->bnlc", content, k_up).to(turning.dtype), turning), -1)
        k = kept[:, None]
        # The value is the whole key and the sum of rotary keys is cut off: a slice would have to be copied by kernels
        # that want values as wide as keys.
        y = self._attend(q, k, k, mask, bias)[..., :C]
        return torch.einsum("bnlc,nvc->bnlv", y, v_up)

    def _expanded(self, content: Tensor, turning: Tensor, kept: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        """Keys and values as they are trained; [B, N, L, V]."""
        C = self.spec.latent
        latent, key = kept[..., :C], kept[:, None, :, C:]
        k = self.k_up(latent).unflatten(-1, (-1, self.spec.content_size)).transpose(1, 2)
        v = self.v_up(latent).unflatten(-1, (-1, self.spec.value_size)).transpose(1, 2)
        k = torch.cat((k, key.expand(-1, k.shape[1], -1, -1).to(k.dtype)), -1)
        return self._attend(torch.cat((content, turning), -1), k, v, mask, bias)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, bias: Tensor | None) -> Tensor:
        result = attend(
            q, k, v, mask,
            scale=self.scale,
            bias=bias,
            dropout=self.spec.dropout if self.training else 0.0,
            weights=self.watch is not None,
            kernel=self.kernel,
        )  # fmt: skip
        y, weights = result if isinstance(result, tuple) else (result, None)
        if weights is not None and self.watch is not None:
            self.watch(weights)
        return y
