"""Attention as one op: single-head, multi-head, multi-query, grouped-query; causal, windowed, prefix, cross.

B batch, L query length, M key length, D model width, N heads, K kv heads, H head size.
Source: Vaswani et al. 2017, section 3.2; multi-query, arXiv 1911.02150; grouped-query, arXiv 2305.13245.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..errors import InputError, StateError
from ..state import Leaf, PerMemory, PerToken, State
from ..step import Shared, Step
from .attend import Kernel, attend
from .initialise import Init
from .mask import Mask
from .op import Context, Growth, Op, Part
from .position import Shaw
from .projection import Projection
from .rope import Rope, rotate


class Attention(Part):
    """q, k, v projections, scaled dot-product attention, output projection.

    heads=1 is single-head, kv_heads=1 multi-query, 1 < kv_heads < heads grouped-query attention. The three
    projections are separate matrices: one fused product was measured no faster on CPU (within 3%), and separate ones
    keep names, adapters, quantisation and shards plain.
    """

    heads: int
    """N, query heads."""
    kv_heads: int | None = None
    """K, key and value heads, each shared by N / K query heads; None: as many as heads."""
    head_size: int | None = None
    """H; None: D / N."""
    causal: bool = True
    """Whether a query sees only keys at its position or before (with Step.prefix: those, or the prefix)."""
    window: int | None = None
    """How many positions back a query sees, its own included; both ways where not causal; None: all."""
    keep_first: int = 0
    """Keys at the first positions that stay visible past the window."""
    cross: bool = False
    """Whether keys and values come from Step.memory; such attention is never causal."""
    position: Rope | Shaw | None = None
    """Rotary or relative positions inside the scores."""
    qk_norm: Part | None = None
    """A norm on queries and on keys, before positions: over each head's H."""
    softcap: float | None = None
    """c in c · tanh(scores / c); None: no cap."""
    sinks: bool = False
    """A learned logit a head that joins the softmax's denominator."""
    scale: float | None = None
    """What scores are multiplied by; None: H^−1/2."""
    bias: bool = False
    """Whether q, k and v have biases."""
    out_bias: bool | None = None
    """Whether the output projection has one; None: as q, k and v."""
    dropout: float = 0.0
    """Share of attention weights zeroed while training."""
    qk_norm_joint: bool = False
    """Whether qk_norm is over all heads together (OLMo 2), with a weight for each of their dims."""
    gated: bool = False
    """Whether what the heads give is multiplied by sigmoid(gate(x)) before the output projection (arXiv 2505.06708)."""
    k_bias: bool | None = None
    """Whether k has a bias; None: as q and v. It moves all scores of a query alike, so Whisper has none."""

    v_norm: Part | None = None
    """A norm over H on values (Gemma 4)."""
    tied_values: bool = False
    """Whether values are what the keys' projection gives, before the keys' norm and positions: there is no v."""
    keeps: str | None = None
    """A name under which its keys and values stay within reach of later layers."""
    reads: str | None = None
    """The name of the keys and values of an earlier layer that it attends to: there is no k, no v and no state."""

    def check(self) -> None:
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        self.require(self.heads > 0 and kv_heads > 0, "heads and kv_heads must be above 0")
        self.require(self.head_size is None or self.head_size > 0, f"head_size must be above 0, got {self.head_size}")
        self.require(
            self.heads % kv_heads == 0,
            f"heads={self.heads} is not a multiple of kv_heads={kv_heads}: a key head serves equally many query heads",
        )
        self.require(
            self.window is None or self.window > 0, f"window={self.window} hides everything; use None for no window"
        )
        self.require(self.keep_first >= 0, f"keep_first={self.keep_first}: give the number of first keys to keep, or 0")
        alone = self.reads is None or not (self.cross or self.tied_values or self.v_norm or self.keeps)
        self.require(alone, f"reads={self.reads!r}: such attention makes no keys and values of its own")
        self.require(
            not (self.cross and self.keeps), "cross-attention keeps nothing: memory is within reach of all layers"
        )
        self.require(not self.qk_norm_joint or self.qk_norm is not None, "qk_norm_joint says how qk_norm is; give one")
        self.require(self.softcap is None or self.softcap > 0, f"softcap must be above 0, got {self.softcap}")
        self.require(not (self.cross and self.window), "cross-attention has no window: memory has no query position")
        self.require(
            not (self.cross and self.position),
            "cross-attention has no position: distances between two different sequences mean nothing",
        )
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    @property
    def growth(self) -> Growth:
        if self.cross:
            return Growth("n m d", "1", "1")
        return Growth("n w d", "1", "n/w") if self.window else Growth("n² d", "1", "1")

    def build(self, dim: int, context: Context) -> AttentionOp:
        return AttentionOp(self, dim, context)


class AttendingOp(Op):
    """An op whose scores `attend` computes: what passes over a built model look for.

    pair: multiplications for a query and a key that it sees, in the scores and the sums of values of all heads.
    reach: how many keys a query sees at most; None: all.
    """

    pair: int
    reach: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.kernel: Kernel = "auto"  # how attend computes; a pass over the built model may change it
        self.watch: Callable[[Tensor], None] | None = None  # is told the weights of each call, [B, N, L, M]


class AttentionOp(AttendingOp):
    """[B, L, D] → [B, L, D]. Raises InputError when cross-attention has neither memory nor a state that holds it."""

    residual_outputs = ("out",)

    def __init__(self, spec: Attention, dim: int, context: Context) -> None:
        super().__init__()
        spec.require(
            spec.head_size is not None or dim % spec.heads == 0,
            f"heads={spec.heads} do not divide the width {dim}: choose a divisor, or give head_size",
        )
        self.spec = spec
        self.head_size = spec.head_size or dim // spec.heads
        self.scale = spec.scale if spec.scale is not None else self.head_size**-0.5
        kv_heads = spec.kv_heads or spec.heads
        source = (context.memory or dim) if spec.cross else dim
        self.q = Projection(dim, spec.heads * self.head_size, spec.bias)
        self.pair = 2 * self.q.out_features
        self.reach = spec.window and spec.window + spec.keep_first
        width = kv_heads * self.head_size
        k_bias = spec.bias if spec.k_bias is None else spec.k_bias
        self.k = Projection(source, width, k_bias) if spec.reads is None else None
        self.v = Projection(source, width, spec.bias) if spec.reads is None and not spec.tied_values else None
        out_bias = spec.bias if spec.out_bias is None else spec.out_bias
        self.out = Projection(spec.heads * self.head_size, dim, out_bias)
        self.gate = Projection(dim, spec.heads * self.head_size, spec.bias) if spec.gated else None
        self.q_norm = self._norm(self.q.out_features, context)
        self.k_norm = self._norm(width, context) if spec.reads is None else None
        self.v_norm = spec.v_norm.build(self.head_size, context) if spec.v_norm else None
        if spec.keeps is not None:
            context.kept[spec.keeps] = (kv_heads, self.head_size)
        elif spec.reads is not None:
            kept = context.kept.get(spec.reads)
            found = f"an earlier layer keeps {kept}" if kept else "no earlier layer keeps that"
            spec.require(
                kept == (kv_heads, self.head_size),
                f"reads={spec.reads!r} for (kv_heads, head_size)={(kv_heads, self.head_size)}, but {found}",
            )
        self.sink_logits = nn.Parameter(torch.empty(spec.heads)) if spec.sinks else None
        self.rope = spec.position if isinstance(spec.position, Rope) else None
        if self.rope is not None:
            self.rope.rotated(self.head_size)  # refuses sizes that do not fit
        self.table = context.number(self.rope, self.head_size) if self.rope else 0
        self.shaw = spec.position.build(self.head_size, context) if isinstance(spec.position, Shaw) else None

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        if self.sink_logits is not None:
            self.sink_logits.zero_()

    def state(self) -> dict[str, Leaf]:
        if self.k is None or not (self.spec.causal or self.spec.cross):
            return {}
        shape = (self.k.out_features // self.head_size, self.head_size)
        if self.spec.cross:
            return {"k": PerMemory(shape), "v": PerMemory(shape)}
        return {"k": PerToken(shape, window=self.reach), "v": PerToken(shape, window=self.reach)}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        spec, shared = self.spec, step.shared or Shared()
        q = self._split(self.q, x, self.q_norm)
        if self.rope is not None:
            q = self._rotate(q, shared.rotary[self.table])
        k, v, mask = self._memory(x, step, state) if spec.cross else self._tokens(x, step, state, shared)
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
        bias = None if spec.cross else step.bias
        relative = self.relative_scores(q, k, mask, step)
        if relative is not None:
            bias = relative if bias is None else bias + relative
        values = self.shaw if self.shaw is not None and self.shaw.value is not None else None
        result = attend(
            q, k, v, mask,
            scale=self.scale,
            bias=bias,
            softcap=spec.softcap,
            sink_logits=self.sink_logits,
            dropout=spec.dropout if self.training else 0.0,
            weights=values is not None or self.watch is not None,
            kernel=self.kernel,
        )  # fmt: skip
        y, weights = result if isinstance(result, tuple) else (result, None)
        if weights is not None and self.watch is not None:
            self.watch(weights)
        if weights is not None and values is not None:
            y = y + values.value_term(weights, *positions(mask, q.shape[2], k.shape[2], q.device))
        y = y.transpose(1, 2).flatten(2)
        return self.out(y if self.gate is None else y * self.gate(x).sigmoid())

    def relative_scores(self, q: Tensor, k: Tensor, mask: Mask, step: Step) -> Tensor | None:
        """What relative positions add to the scaled scores, [B, N, L, M]; q: [B, N, L, H], k: [B, K, M, H]."""
        if self.shaw is None:
            return None
        return self.shaw.key_bias(q, *positions(mask, q.shape[2], k.shape[2], q.device)) * self.scale

    def _norm(self, width: int, context: Context) -> nn.Module | None:
        if self.spec.qk_norm is None:
            return None
        return self.spec.qk_norm.build(width if self.spec.qk_norm_joint else self.head_size, context)

    def _split(self, projection: Projection, x: Tensor, norm: nn.Module | None = None) -> Tensor:
        y = projection(x)
        if norm is not None and self.spec.qk_norm_joint:
            y, norm = norm(y), None
        heads = y.unflatten(-1, (-1, self.head_size))  # -1: under tensor parallelism a shard holds fewer heads
        return heads if norm is None else norm(heads)

    def _rotate(self, heads: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
        assert self.rope is not None
        return rotate(heads.transpose(1, 2), *table, self.rope.pairing).transpose(1, 2)

    def _tokens(self, x: Tensor, step: Step, state: State | None, shared: Shared) -> tuple[Tensor, Tensor, Mask]:
        """Keys and values of self-attention, [B, M, K, H], and who sees which."""
        spec = self.spec
        if state is not None and not spec.causal:
            raise StateError("attention that sees both ways cannot be continued: call the model without a state")
        k, v = self._own(x, step, state, shared) if spec.reads is None else shared.kept[spec.reads]
        if spec.keeps is not None:
            shared.kept[spec.keeps] = (k, v)
        return k, v, Mask(
            causal=spec.causal and step.prefix is None,
            window=spec.window,
            keep_first=spec.keep_first,
            prefix=step.prefix if spec.causal else None,
            allowed=step.mask,
            layout=shared.layout,
        )  # fmt: skip

    def _own(self, x: Tensor, step: Step, state: State | None, shared: Shared) -> tuple[Tensor, Tensor]:
        """Keys and values of this call, after what the state holds."""
        k, v = self._keys_and_values(x)
        unrotated = self.rope is not None and self.rope.dynamic
        if self.rope is not None and not unrotated:
            k = self._rotate(k, shared.rotary[self.table])
        if state is not None:
            state["k"].write(k, step)
            state["v"].write(v, step)
            k, v = state["k"].read(step).to(x.dtype), state["v"].read(step).to(x.dtype)
        if unrotated:
            table = shared.key_rotary[self.table]
            assert table is not None
            k = self._rotate(k, table)
        return k, v

    def _keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        assert self.k is not None
        v = self._split(self.k if self.v is None else self.v, x)
        return self._split(self.k, x, self.k_norm), v if self.v_norm is None else self.v_norm(v)

    def _memory(self, x: Tensor, step: Step, state: State | None) -> tuple[Tensor, Tensor, Mask]:
        """Keys and values of cross-attention, [B, M, K, H]: computed once into the state, then read from it."""
        k = v = None
        if step.memory is not None:
            k, v = self._keys_and_values(step.memory)
            if state is not None:
                state["k"].write(k, step)
                state["v"].write(v, step)
        elif state is not None:
            k, v = (state[name].read(step).to(x.dtype) for name in "kv")
        if k is None or v is None or k.shape[1] == 0:
            raise InputError("cross-attention needs Step.memory (or source=…), or a state that holds one")
        return k, v, Mask(layout=(step.shared or Shared()).cross)


def positions(mask: Mask, L: int, M: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Query and key positions of a mask; without a layout the last query is aligned with the last key."""
    if mask.layout is not None:
        return mask.layout.positions(L, M, device)
    return torch.arange(M - L, M, device=device)[None], torch.arange(M, device=device)[None]
