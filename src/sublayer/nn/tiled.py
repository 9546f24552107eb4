"""Exact attention in tiles, with memory linear in length: FlashAttention's algorithm in plain PyTorch.

Forward and recomputing backward follow arXiv 2307.08691 (FlashAttention-2, algorithms 1 and 2); the running maximum and
sum are arXiv 2205.14135, section 3.1; dropout by regenerated bits is its appendix B.

B batch, N query heads, K key/value heads, G = N / K heads a group, L query length, M key length, H head size,
Hv value head size; l and m a tile's queries and keys. A group's queries are rows of one product, [B, K, G·l, H], so
keys are never repeated for their group.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sublayer.nn.mask import Layout, Mask, visible
from sublayer.nn.reference import Options, finite, refuse

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
    return _Tiled.apply(q, k, v, bias, options.sink_logits, call)  # type: ignore[no-any-return]


class Call(NamedTuple):
    """What no gradient flows to."""

    mask: Mask
    scale: float
    softcap: float | None
    dropout: float
    seed: int


class Tile(NamedTuple):
    """Some queries against some keys, by index; `whole` where the mask hides no cell of it."""

    rows: slice
    columns: slice
    whole: bool


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sink_logits: Tensor | None, call: Call
    ) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        (B, N, L, _), (K, M), Hv = q.shape, k.shape[1:3], v.shape[3]
        clean_k, bad_keys = finite(k)
        clean_v, bad_values = finite(v)
        bad = _bad_cells(bad_keys, bad_values, dtype)
        keys, values = clean_k.to(dtype).contiguous(), clean_v.to(dtype).contiguous()
        scores = Scores(call, bias, (B, K, N // K), (L, M), q.device)

        out = q.new_zeros(B, K, N // K, L, Hv, dtype=dtype)
        lse = q.new_full((B, K, N // K, L), torch.inf, dtype=dtype)  # +inf: exp(score - lse) is 0 where nothing is seen
        spoilt = None if bad is None else torch.zeros_like(out, dtype=torch.bool)
        sinks = None if sink_logits is None else sink_logits.to(dtype).view(1, K, -1, 1)
        for tiles in scores.tiles:
            rows = tiles[0].rows
            queries = _fold(q[:, :, rows].to(dtype), K) * call.scale
            peak, total = _start(sinks, out[:, :, :, rows])
            sums = queries.new_zeros(*queries.shape[:3], Hv)
            for tile in tiles:
                score, _, seen = scores(tile, queries, keys)
                new_peak = torch.maximum(peak, score.amax(-1, keepdim=True))
                base = new_peak.masked_fill(new_peak == -torch.inf, 0)  # nothing seen yet: keep exp(-inf - base) at 0
                share = score.sub_(base).exp_()
                shrink = (peak - base).exp_()
                total = total * shrink + share.sum(-1, keepdim=True)
                if call.dropout > 0:
                    share = share.mul_(scores.kept(tile))
                sums = (sums * shrink).add_(share @ values[:, :, tile.columns])
                peak = new_peak
                if bad is not None and spoilt is not None:
                    reached = bad[:, :, tile.columns] if seen is None else seen.to(dtype) @ bad[:, :, tile.columns]
                    reached = reached.any(2, keepdim=True) if seen is None else reached > 0
                    spoilt[:, :, :, rows] |= _unfold(reached.expand(*sums.shape), N // K)
            blind = total == 0
            sums = sums / total.masked_fill(blind, 1)
            out[:, :, :, rows] = _unfold(sums, N // K)
            lse[:, :, :, rows] = _unfold((peak + total.log()).masked_fill(blind, torch.inf), N // K).squeeze(-1)

        ctx.call, ctx.scores = call, scores
        ctx.save_for_backward(q, k, v, bias, sink_logits, out, lse, spoilt)
        result = out if spoilt is None else out.masked_fill(spoilt, torch.nan)
        return result.flatten(1, 2).to(q.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, sink_logits, out, lse, spoilt = ctx.saved_tensors
        call, scores, dtype, K = ctx.call, ctx.scores, out.dtype, k.shape[1]
        G = q.shape[1] // K
        keys, values = finite(k)[0].to(dtype).contiguous(), finite(v)[0].to(dtype).contiguous()
        d_out = d_result.to(dtype).unflatten(1, (K, G))
        d_out = d_out if spoilt is None else d_out.masked_fill(spoilt, 0)
        delta = (d_out * out).sum(-1)  # D of algorithm 2: what the softmax's gradient subtracts from each row

        d_q = torch.zeros_like(q, dtype=dtype)
        d_keys, d_values = torch.zeros_like(keys), torch.zeros_like(values)
        d_bias = None if bias is None or not ctx.needs_input_grad[3] else torch.zeros_like(bias, dtype=dtype)
        for tiles in scores.tiles:
            rows = tiles[0].rows
            queries = _fold(q[:, :, rows].to(dtype), K) * call.scale
            d_rows = d_out[:, :, :, rows].flatten(2, 3)
            rows_lse, rows_delta = (x[:, :, :, rows].flatten(2, 3)[..., None] for x in (lse, delta))
            d_queries = torch.zeros_like(queries)
            for tile in tiles:
                columns = tile.columns
                score, slope, _ = scores(tile, queries, keys)
                share = score.sub_(rows_lse).exp_()
                d_share = d_rows @ values[:, :, columns].mT
                if call.dropout > 0:
                    kept = scores.kept(tile)
                    d_values[:, :, columns] += (share * kept).mT @ d_rows
                    d_share = d_share.mul_(kept)
                else:
                    d_values[:, :, columns] += share.mT @ d_rows
                d_score = share.mul_(d_share.sub_(rows_delta))
                if d_bias is not None:
                    part = _cells(d_bias, tile)
                    part += _unfold(d_score, G).flatten(1, 2).sum_to_size(part.shape)
                if slope is not None:
                    d_score = d_score.mul_(slope)
                d_queries += d_score @ keys[:, :, columns]
                d_keys[:, :, columns] += d_score.mT @ queries
            d_q[:, :, rows] = _unfold(d_queries, G).flatten(1, 2).mul_(call.scale)

        d_sinks = None
        if sink_logits is not None:
            share = (sink_logits.to(dtype).view(1, K, G, 1) - lse).exp()
            d_sinks = -(share * delta).sum((0, 3)).flatten().to(sink_logits.dtype)
        d_bias = None if d_bias is None else d_bias.to(bias.dtype)
        return d_q.to(q.dtype), d_keys.to(k.dtype), d_values.to(v.dtype), d_bias, d_sinks, None


class Scores:
    """The scores of a tile, the same in forward and backward: capped, biased, masked; and its dropout."""

    def __init__(
        self,
        call: Call,
        bias: Tensor | None,
        heads: tuple[int, int, int],
        lengths: tuple[int, int],
        device: torch.device,
    ) -> None:
        self.call, self.bias, self.heads, self.device = call, bias, heads, device
        layout = call.mask.layout if call.mask.layout is not None else Layout()
        q_pos, k_pos = layout.positions(*lengths, device)
        self.q_pos, self.k_pos, self.k_place = q_pos, k_pos, layout.places(lengths[1], device)
        self.q_segment, self.k_segment = layout.q_segment, layout.k_segment
        prefix = call.mask.prefix
        self.prefix = prefix[:, None, None] if isinstance(prefix, Tensor) else prefix
        self.tiles = self._tiles(*lengths)

    def __call__(self, tile: Tile, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Scores [B, K, G·l, m], the slope of the cap there, and the visible cells (None: all)."""
        softcap = self.call.softcap
        G = self.heads[2]
        score = queries @ keys[:, :, tile.columns].mT
        slope = None
        if softcap is not None:
            bent = score.div_(softcap).tanh_()
            slope = 1 - bent.square()
            score = bent.mul_(softcap)
        if self.bias is not None:
            score = score + _per_group(_cells(self.bias, tile), self.heads[1], G, score)
        if tile.whole:
            return score, slope, None
        seen = _per_group(self._visible(tile), self.heads[1], G, score)
        return score.masked_fill_(~seen, -torch.inf), slope, seen

    def kept(self, tile: Tile) -> Tensor:
        """0 for dropped weights, 1 / (1 - dropout) for the others: the same bits whenever the tile is asked for."""
        B, K, G = self.heads
        generator = torch.Generator(self.device)
        generator.manual_seed(self.call.seed + tile.rows.start * self.k_pos.shape[1] + tile.columns.start)
        size = (B, K, G * (tile.rows.stop - tile.rows.start), tile.columns.stop - tile.columns.start)
        chance = torch.rand(size, generator=generator, device=self.device)
        return (chance >= self.call.dropout) / (1 - self.call.dropout)

    def _visible(self, tile: Tile) -> Tensor:
        """bool [B|1, N|1, l, m]."""
        rows, columns = tile.rows, tile.columns
        seen = visible(
            self.call.mask,
            q_pos=self.q_pos[:, rows, None],
            k_pos=self.k_pos[:, None, columns],
            k_place=self.k_place[:, None, columns],
            prefix=self.prefix,
            q_segment=None if self.q_segment is None else self.q_segment[:, rows, None],
            k_segment=None if self.k_segment is None else self.k_segment[:, None, columns],
        )
        allowed = self.call.mask.allowed
        if allowed is not None:
            part = _cells(allowed[(None,) * (4 - allowed.ndim)], tile)
            return part if seen is None else part & seen[:, None]
        assert seen is not None  # a tile of a mask without conditions is whole
        return seen[:, None]

    def _tiles(self, L: int, M: int) -> list[list[Tile]]:
        """For each run of queries, the tiles in which it may see something; a run that sees nothing is left out.

        Decided from the least and greatest position, place and document number of each run: `some` may be too
        generous and `whole` too strict, and neither the other way.
        """
        mask = self.call.mask
        size = TILE if mask.window is None or mask.window >= 4 * TILE else TILE // 2
        rows, columns = _runs(L, size), _runs(M, size)
        q_low, q_high = _range(self.q_pos, rows, 2)
        k_low, k_high = _range(self.k_pos, columns, 1)
        place_low, place_high = _range(self.k_place, columns, 1)
        nearest, farthest = q_low - k_high, q_high - k_low  # of q_pos - k_pos
        some = torch.ones_like(nearest, dtype=torch.bool)
        whole = torch.full_like(some, mask.allowed is None)
        if mask.causal:
            some, whole = some & (farthest >= 0), whole & (nearest >= 0)
        if self.prefix is not None:
            some = some & ((farthest >= 0) | (place_low < self.prefix))
            whole = whole & ((nearest >= 0) | (place_high < self.prefix))
        if mask.window is not None:
            some_near, all_near = nearest < mask.window, farthest < mask.window
            if not mask.causal:
                some_near, all_near = some_near & (farthest > -mask.window), all_near & (nearest > -mask.window)
            if mask.keep_first:
                some_near, all_near = (
                    some_near | (place_low < mask.keep_first),
                    all_near | (place_high < mask.keep_first),
                )
            some, whole = some & some_near, whole & all_near
        if self.q_segment is not None or self.k_segment is not None:
            one = torch.ones_like
            q_first, q_last = _range(self.q_segment if self.q_segment is not None else one(self.q_pos), rows, 2)
            k_first, k_last = _range(self.k_segment if self.k_segment is not None else one(self.k_pos), columns, 1)
            some = some & (q_first <= k_last) & (k_first <= q_last) & (q_last > 0) & (k_last > 0)
            whole = whole & (q_first == k_last) & (k_first == q_last) & (q_first > 0)
        some_rows: list[list[bool]] = some.any(0).tolist()
        whole_rows: list[list[bool]] = whole.all(0).tolist()
        tiles = [
            [
                Tile(row, column, is_whole)
                for column, is_seen, is_whole in zip(columns, seen, all_seen, strict=True)
                if is_seen
            ]
            for row, seen, all_seen in zip(rows, some_rows, whole_rows, strict=True)
        ]
        return [run for run in tiles if run]


def _runs(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _range(x: Tensor, runs: list[slice], axis: int) -> tuple[Tensor, Tensor]:
    """Least and greatest of each run of x [B, length]: [B, runs, 1] for axis 2, [B, 1, runs] for axis 1."""
    pieces = [x[:, run].aminmax(dim=1) for run in runs]
    return (
        torch.stack([piece.min for piece in pieces], 1).unsqueeze(axis),
        torch.stack([piece.max for piece in pieces], 1).unsqueeze(axis),
    )


def _fold(x: Tensor, K: int) -> Tensor:
    """[B, N, l, H] to [B, K, G·l, H]."""
    return x.unflatten(1, (K, -1)).flatten(2, 3)


def _unfold(x: Tensor, G: int) -> Tensor:
    """[B, K, G·l, …] to [B, K, G, l, …]."""
    return x.unflatten(2, (G, -1))


def _cells(x: Tensor, tile: Tile) -> Tensor:
    """A tile of what broadcasts to [B, N, L, M]; axes of one stay."""
    x = x if x.shape[2] == 1 else x[:, :, tile.rows]
    return x if x.shape[3] == 1 else x[..., tile.columns]


def _per_group(x: Tensor, K: int, G: int, score: Tensor) -> Tensor:
    """What broadcasts to [B, N, l, m], as [B, K, G·l, m] beside the scores; a copy only where heads differ or G > 1."""
    x = x.expand(x.shape[0], x.shape[1], score.shape[2] // G, x.shape[3])
    if x.shape[1] == 1:
        return x.repeat(1, 1, G, 1) if G > 1 else x
    return _fold(x, K)


def _start(sinks: Tensor | None, out: Tensor) -> tuple[Tensor, Tensor]:
    """Running maximum and sum [B, K, G·l, 1] before any key: a sink is the first member of the sum."""
    shape = out.shape[:4]
    if sinks is None:
        nothing = out.new_full(shape, -torch.inf).flatten(2, 3)[..., None]
        return nothing, torch.zeros_like(nothing)
    peak = sinks.expand(shape).flatten(2, 3)[..., None]
    return peak, torch.ones_like(peak)


def _bad_cells(bad_keys: Tensor | None, bad_values: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """[B, K, M, Hv or 1]: 1 where a query that sees the key must return NaN."""
    if bad_keys is None and bad_values is None:
        return None
    if bad_keys is None or bad_values is None:
        return (bad_keys.any(-1, keepdim=True) if bad_keys is not None else bad_values).to(dtype)  # type: ignore
    return (bad_keys.any(-1, keepdim=True) | bad_values).to(dtype)
