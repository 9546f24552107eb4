"""Exact attention in tiles, with memory linear in length: FlashAttention's algorithm in plain PyTorch.

Forward and recomputing backward follow arXiv 2307.08691 (FlashAttention-2, algorithms 1 and 2); the running maximum and
sum are arXiv 2205.14135, section 3.1; dropout by regenerated bits is its appendix B.

B batch, N query heads, K key/value heads, G = N / K heads a group, L query length, M key length, H head size,
Hv value head size; l and m a tile's queries and keys. A group's queries are rows of one product, [B, K, G·l, H], so
keys are never repeated for their group.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .mask import Layout, Mask, plain, visible
from .reference import Options, finite, refuse

# Queries and keys of a tile: large enough that a product outweighs the dozen calls around it, small enough that the
# scores of a tile stay in the cache. Under a window half as large, for less of a tile is wasted at its edges.
TILE = 256


def tiled(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """Online softmax over tiles; tiles that the mask hides are skipped, so a window takes time linear in length.

    Everything but weights, in fp32 or better inside. Eager only: which tiles are hidden is read from the layout.
    """
    refuse("tiled", options, "weights")
    bias = options.bias
    bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]
    seed = int(torch.randint(2**62, ())) if options.dropout > 0 else 0
    call = Call(mask, options.scale, options.softcap, options.dropout, seed)
    apply: Any = _Tiled.apply  # pyright: ignore -- torch leaves it untyped
    return apply(q, k, v, bias, options.sink_logits, call)


class Call(NamedTuple):
    """What no gradient flows to."""

    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    seed: int


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    sink_logits: Tensor | None


class Outputs(NamedTuple):
    """What the backward needs of the forward, in the dtype of the sums."""

    out: Tensor  # [B, K, G, L, Hv], before `spoilt`
    lse: Tensor  # [B, K, G, L], log of the softmax's denominator; +inf where nothing is seen, so that shares are 0
    spoilt: Tensor | None  # like out: where a visible key or value was NaN or infinite


class Tile(NamedTuple):
    """Some queries against some keys, by index; `whole` where the mask hides no cell of it."""

    rows: slice
    columns: slice
    whole: bool


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        *tensors, call = args
        inputs = Inputs(*tensors)
        scores = Scores(call, inputs)
        outputs = _forward(inputs, scores)
        ctx.scores = scores
        ctx.save_for_backward(*inputs, *outputs)
        out = outputs.out if outputs.spoilt is None else outputs.out.masked_fill(outputs.spoilt, torch.nan)
        return out.flatten(1, 2).to(inputs.q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, outputs = Inputs(*ctx.saved_tensors[:5]), Outputs(*ctx.saved_tensors[5:])
        gradients = _backward(inputs, outputs, ctx.scores, grads[0], with_bias=ctx.needs_input_grad[3])
        pairs = zip(gradients, inputs, strict=True)
        return *(None if d is None or x is None else d.to(x.dtype) for d, x in pairs), None


def _forward(inputs: Inputs, scores: Scores) -> Outputs:
    """Algorithm 1 of arXiv 2307.08691, with the rows of a group together."""
    q, k, v, _, sink_logits = inputs
    dtype = torch.promote_types(q.dtype, torch.float32)
    (B, N, L, _), K, Hv = q.shape, k.shape[1], v.shape[3]
    clean_k, bad_keys = finite(k)
    clean_v, bad_values = finite(v)
    keys, values = clean_k.to(dtype).contiguous(), clean_v.to(dtype).contiguous()
    bad = _bad_cells(bad_keys, bad_values, values)
    sinks = None if sink_logits is None else sink_logits.to(dtype).view(1, K, -1, 1)

    out = q.new_zeros(B, K, N // K, L, Hv, dtype=dtype)
    lse = q.new_full((B, K, N // K, L), torch.inf, dtype=dtype)
    spoilt = None if bad is None else torch.zeros_like(out, dtype=torch.bool)
    for tiles in scores.tiles:
        rows = tiles[0].rows
        queries = _fold(q[:, :, rows].to(dtype), K) * scores.call.scale
        peak, total = _start(sinks, lse[..., rows])
        sums = queries.new_zeros(*queries.shape[:3], Hv)
        for tile in tiles:
            score, _, seen = scores(tile, queries, keys)
            new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
            base = new_peak.masked_fill(new_peak == -torch.inf, 0)  # nothing seen yet: keep exp(-inf - base) at 0
            share = score.sub_(base).exp_()
            shrink = (peak - base).exp_()
            total = total * shrink + share.sum(-1, keepdim=True)
            if scores.call.dropout > 0:
                share = share.mul_(scores.kept(tile))
            sums = (sums * shrink).add_(share @ values[:, :, tile.columns])
            peak = new_peak
            if bad is not None and spoilt is not None:
                all_seen = torch.ones_like(share[:1, :1], dtype=torch.bool)
                reached = (all_seen if seen is None else seen).to(dtype) @ bad[:, :, tile.columns] > 0
                spoilt[:, :, :, rows] |= _unfold(reached, N // K)
        blind = total == 0
        out[:, :, :, rows] = _unfold(sums / total.masked_fill(blind, 1), N // K)
        lse[:, :, :, rows] = _unfold((peak + total.log()).masked_fill(blind, torch.inf).squeeze(-1), N // K)
    return Outputs(out, lse, spoilt)


def _backward(
    inputs: Inputs, outputs: Outputs, scores: Scores, d_result: Tensor, *, with_bias: bool
) -> tuple[Tensor | None, ...]:
    """Algorithm 2 of arXiv 2307.08691: gradients of the inputs, from scores computed again tile by tile."""
    q, k, v, bias, sink_logits = inputs
    out, lse, spoilt = outputs
    dtype, K, G = out.dtype, out.shape[1], out.shape[2]
    keys, values = finite(k)[0].to(dtype).contiguous(), finite(v)[0].to(dtype).contiguous()
    d_out = torch.unflatten(d_result.to(dtype), 1, (K, G))
    d_out = d_out if spoilt is None else d_out.masked_fill(spoilt, 0)
    delta = (d_out * out).sum(-1)  # D of the algorithm: the mean that the softmax's gradient takes from each row

    d_q, d_keys, d_values = torch.zeros_like(q, dtype=dtype), torch.zeros_like(keys), torch.zeros_like(values)
    d_bias = torch.zeros_like(bias, dtype=dtype) if bias is not None and with_bias else None
    for tiles in scores.tiles:
        rows = tiles[0].rows
        queries = _fold(q[:, :, rows].to(dtype), K) * scores.call.scale
        d_rows = d_out[:, :, :, rows].flatten(2, 3)
        lse_rows, delta_rows = lse[..., rows].flatten(2)[..., None], delta[..., rows].flatten(2)[..., None]
        d_queries = torch.zeros_like(queries)
        for tile in tiles:
            columns = tile.columns
            score, slope, _ = scores(tile, queries, keys)
            share = score.sub_(lse_rows).exp_()
            d_share = d_rows @ values[:, :, columns].mT
            if scores.call.dropout > 0:
                kept = scores.kept(tile)
                d_values[:, :, columns] += (share * kept).mT @ d_rows
                d_share = d_share.mul_(kept)
            else:
                d_values[:, :, columns] += share.mT @ d_rows
            d_score = share.mul_(d_share.sub_(delta_rows))
            if d_bias is not None:
                part = _cells(d_bias, tile)
                part += _unfold(d_score, G).flatten(1, 2).sum_to_size(part.shape)
            if slope is not None:
                d_score = d_score.mul_(slope)
            d_queries += d_score @ keys[:, :, columns]
            d_keys[:, :, columns] += d_score.mT @ queries
        d_q[:, :, rows] = _unfold(d_queries, G).flatten(1, 2).mul_(scores.call.scale)
    return d_q, d_keys, d_values, d_bias, sinks_gradient(sink_logits, lse, delta)


def sinks_gradient(sink_logits: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor | None:
    """[N]: a sink's share of each row takes that row's mean, delta, and gives no value back."""
    if sink_logits is None:
        return None
    share = (sink_logits.to(lse.dtype).view(1, *lse.shape[1:3], 1) - lse).exp()
    return -(share * delta).sum((0, 3)).flatten()


class Scores:
    """The scores of a tile, the same in forward and backward: capped, biased, masked; and its dropout."""

    def __init__(self, call: Call, inputs: Inputs) -> None:
        q, k = inputs.q, inputs.k
        L, M = q.shape[2], k.shape[2]
        self.call, self.bias = call, inputs.bias
        self.heads = (q.shape[0], k.shape[1], q.shape[1] // k.shape[1])
        layout = call.mask.layout if call.mask.layout is not None else Layout()
        self.q_pos, self.k_pos = layout.positions(L, M, q.device)
        self.k_place = layout.places(M, q.device)
        self.q_segment, self.k_segment = layout.q_segment, layout.k_segment
        prefix = call.mask.prefix
        self.prefix = prefix[:, None, None] if isinstance(prefix, Tensor) else prefix
        self.tiles = _tiles(call.mask, L, M, q.device)

    def __call__(self, tile: Tile, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores [B, K, G·l, m], the slope of the cap there, and the visible cells (None: all)."""
        softcap = self.call.softcap
        score = queries @ keys[:, :, tile.columns].mT
        slope = None
        if softcap is not None:
            bent = score.div_(softcap).tanh_()
            slope = 1 - bent.square()
            score = bent.mul_(softcap)
        if self.bias is not None:
            score = score + self._per_group(_cells(self.bias, tile), tile)
        if tile.whole:
            return score, slope, None
        seen = self._per_group(self._visible(tile), tile)
        return score.masked_fill_(~seen, -torch.inf), slope, seen

    def kept(self, tile: Tile) -> Tensor:
        """0 for dropped weights, 1 / (1 - dropout) for the others: the same bits whenever the tile is asked for."""
        B, K, G = self.heads
        generator = torch.Generator(self.q_pos.device)
        generator.manual_seed(self.call.seed + tile.rows.start * self.k_pos.shape[1] + tile.columns.start)
        size = (B, K, G * (tile.rows.stop - tile.rows.start), tile.columns.stop - tile.columns.start)
        chance = torch.rand(size, generator=generator, device=self.q_pos.device)
        return (chance >= self.call.dropout) / (1 - self.call.dropout)

    def _visible(self, tile: Tile) -> Tensor:
        """bool [B|1, N|1, l, m]."""
        rows, columns, allowed = tile.rows, tile.columns, self.call.mask.allowed
        seen = visible(
            self.call.mask,
            q_pos=self.q_pos[:, rows, None],
            k_pos=self.k_pos[:, None, columns],
            k_place=self.k_place[:, None, columns],
            prefix=self.prefix,
            q_segment=None if self.q_segment is None else self.q_segment[:, rows, None],
            k_segment=None if self.k_segment is None else self.k_segment[:, None, columns],
        )
        permitted = None if allowed is None else _cells(allowed[(None,) * (4 - allowed.ndim)], tile)
        if seen is None:
            assert permitted is not None  # tiles of a mask that hides nothing are whole
            return permitted
        return seen[:, None] if permitted is None else seen[:, None] & permitted

    def _per_group(self, x: Tensor, tile: Tile) -> Tensor:
        """What broadcasts to [B, N, l, m], as [B|1, K|1, G·l, m|1] beside the scores."""
        _, K, G = self.heads
        x = x.expand(-1, -1, tile.rows.stop - tile.rows.start, -1)
        if x.shape[1] == 1:
            return x.repeat(1, 1, G, 1) if G > 1 else x
        return _fold(x, K)


def _tiles(mask: Mask, L: int, M: int, device: torch.device) -> list[list[Tile]]:
    """For each run of queries, the tiles in which it may see something; a run that sees nothing is left out."""
    size = TILE if mask.window is None or mask.window >= 4 * TILE else TILE // 2
    some, whole = mask.tiles(L, M, size, device)
    some_rows: list[list[bool]] = plain(some.any(0))
    whole_rows: list[list[bool]] = plain(whole.all(0))
    rows, columns = _runs(L, size), _runs(M, size)
    tiles = [
        [Tile(row, column, whole_rows[i][j]) for j, column in enumerate(columns) if some_rows[i][j]]
        for i, row in enumerate(rows)
    ]
    return [run for run in tiles if run]


def _runs(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _fold(x: Tensor, K: int) -> Tensor:
    """[B, N, l, H] to [B, K, G·l, H]."""
    return torch.unflatten(x, 1, (K, -1)).flatten(2, 3)


def _unfold(x: Tensor, G: int) -> Tensor:
    """[B, K, G·l, …] to [B, K, G, l, …]."""
    return torch.unflatten(x, 2, (G, -1))


def _cells(x: Tensor, tile: Tile) -> Tensor:
    """A tile of what broadcasts to [B, N, L, M]; axes of one stay."""
    x = x if x.shape[2] == 1 else x[:, :, tile.rows]
    return x if x.shape[3] == 1 else x[..., tile.columns]


def _start(sinks: Tensor | None, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Running maximum and sum [B, K, G·l, 1] before any key: a sink is the first member of the sum."""
    if sinks is None:
        nothing = torch.full_like(lse, -torch.inf).flatten(2)[..., None]
        return nothing, torch.zeros_like(nothing)
    peak = sinks.expand_as(lse).flatten(2)[..., None]
    return peak, torch.ones_like(peak)


def _bad_cells(bad_keys: Tensor | None, bad_values: Tensor | None, values: Tensor) -> Tensor | None:
    """[B, K, M, Hv]: 1 where an output of a query that sees the key must be NaN."""
    if bad_keys is None and bad_values is None:
        return None
    bad = torch.zeros_like(values, dtype=torch.bool) if bad_values is None else bad_values
    return (bad if bad_keys is None else bad | bad_keys.any(-1, keepdim=True)).to(values.dtype)
