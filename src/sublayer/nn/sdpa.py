"""Attention by torch's fused kernels, cut so that they never need an L × M mask where the mask has structure.

B batch, N query heads, K key/value heads, L query length, M key length, H head size, Hv value head size, W window.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask import Layout, Mask, Span, identity, plain, visible
from .reference import Options, refuse

FEW = 32  # up to so many queries against more keys, a mask of a few rows is cheaper than one call a row of the batch
LEAST_BLOCK = 64  # queries of a block under a window; smaller ones leave the fused kernel nothing to fuse


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """torch's scaled_dot_product_attention; `linear` says when its memory is linear in length.

    Packed documents and padding are cut at documents, windows at blocks. Not for softcap, sinks or weights.
    """
    refuse("sdpa", options, "softcap", "sink_logits", "weights")
    parts = None if options.bias is not None else _parts(mask, q.shape[2], k.shape[2])
    return _masked(q, k, v, mask, options) if parts is None else _documents(q, k, v, parts, options)


def linear(mask: Mask, options: Options, L: int, M: int) -> bool:
    """Whether `sdpa` does without any tensor of L × M, or L is small; reads the layout's values, as `sdpa` does."""
    if options.dropout > 0 or options.bias is not None:
        return False  # torch then falls back on its own form with all scores, or takes a bias as a mask
    if L <= FEW:
        return True
    parts = _parts(mask, L, M)
    return parts is not None and not any(part.needs_mask for row in parts for part in row)


class Part(NamedTuple):
    """A document, with what the mask means inside it: positions counted from its own first key."""

    span: Span
    causal: bool
    window: int | None
    keep_first: int
    prefix: int | None

    @property
    def needs_mask(self) -> bool:
        kept = self.keep_first > 0 and self.window is not None
        return kept or (self.prefix is not None and self.window is not None)


def _parts(mask: Mask, L: int, M: int) -> list[list[Part]] | None:
    """Each row's documents, one row standing for all; None where the mask must be a tensor."""
    compiling = torch.compiler.is_compiling()
    if mask.allowed is not None or (compiling and isinstance(mask.prefix, Tensor)):
        return None
    spans: tuple[tuple[Span, ...], ...] | None = ((Span(0, L, 0, M, 0, True),),)
    if mask.layout is not None:
        spans = None if L != M and L <= FEW else mask.layout.spans(L, M)
    if spans is None or (mask.positional and not all(span.aligned for row in spans for span in row)):
        return None
    prefixes: list[int | None] = plain(mask.prefix) if isinstance(mask.prefix, Tensor) else [mask.prefix]
    rows = range(max(len(prefixes), len(spans)))
    return [[_part(mask, span, prefixes[row % len(prefixes)]) for span in spans[row % len(spans)]] for row in rows]


def _part(mask: Mask, span: Span, prefix: int | None) -> Part:
    keep_first = max(0, mask.keep_first - span.k_place)
    return Part(span, mask.causal, mask.window, keep_first, None if prefix is None else max(0, prefix - span.k_place))


def _documents(q: Tensor, k: Tensor, v: Tensor, rows: list[list[Part]], options: Options) -> Tensor:
    """Each document attends alone. Cutting is `split` and `cat`: their gradients are one copy, however many pieces."""
    if all(row == rows[0] for row in rows):
        return _row(q, k, v, rows[0], options)
    each = [len(q) // len(rows)] * len(rows)
    one = zip(*(x.split_with_sizes(each) for x in (q, k, v)), rows, strict=True)
    return torch.cat([_row(q1, k1, v1, row, options) for q1, k1, v1, row in one])


def _row(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], options: Options) -> Tensor:
    """The documents of one geometry, in the order of their queries; zeros for queries of no document."""
    if not parts:
        return _nothing(q, k, v)
    runs = _runs(parts)
    queries = _cut(q, [(run[0].span.q_start, run[-1].span.q_stop) for run in runs])
    keys = _cut(k, [(run[0].span.k_start, run[-1].span.k_stop) for run in runs])
    values = _cut(v, [(run[0].span.k_start, run[-1].span.k_stop) for run in runs])
    pieces: list[Tensor] = []
    stop = 0
    for run in runs:
        span, causal, window, keep_first, prefix = run[0]
        if span.q_start > stop:
            pieces.append(q.new_zeros(*q.shape[:2], span.q_start - stop, v.shape[3]))
        q1, k1, v1 = (_folded(x, len(run)) for x in (queries[span.q_start], keys[span.k_start], values[span.k_start]))
        piece = _aligned(q1, k1, v1, Mask(causal, window, keep_first, prefix), options)
        pieces.append(
            piece if len(run) == 1 else torch.unflatten(piece, 0, (-1, len(run))).transpose(1, 2).flatten(2, 3)
        )
        stop = run[-1].span.q_stop
    if stop < q.shape[2]:
        pieces.append(q.new_zeros(*q.shape[:2], q.shape[2] - stop, v.shape[3]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _runs(parts: Sequence[Part]) -> list[list[Part]]:
    """Documents of one length that stand side by side together: they attend as a batch, in one call."""
    runs: list[list[Part]] = []
    for part in parts:
        if runs and _continues(runs[-1][-1], part):
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs


def _continues(before: Part, part: Part) -> bool:
    a, b = before.span, part.span
    beside = a.q_stop == b.q_start and a.k_stop == b.k_start
    alike = a.q_stop - a.q_start == b.q_stop - b.q_start and a.k_stop - a.k_start == b.k_stop - b.k_start
    return beside and alike and part.keep_first == before.keep_first == 0 and part.prefix is before.prefix is None


def _folded(x: Tensor, count: int) -> Tensor:
    """[B, N, count · T, H] → [B · count, N, T, H]."""
    return x if count == 1 else torch.unflatten(x, 2, (count, -1)).transpose(1, 2).flatten(0, 1)


def _nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros, still joined to the graph, so that a batch of padding has gradients (of zero) and not none."""
    everywhere = torch.ones((), dtype=torch.bool, device=q.device)
    zero = sum(x[..., :1, :1].masked_fill(everywhere, 0).sum() for x in (q, k, v))
    return zero + q.new_zeros(*q.shape[:3], v.shape[3])


def _cut(x: Tensor, bounds: list[tuple[int, int]]) -> dict[int, Tensor]:
    """The pieces [start, stop) of axis 2, by start; the pieces lie apart."""
    edges = sorted({0, x.shape[2], *(edge for bound in bounds for edge in bound)})
    sizes = [stop - start for start, stop in pairwise(edges)]
    return dict(zip(edges, x.split_with_sizes(sizes, dim=2), strict=False)) if len(sizes) > 1 else {0: x}


def _aligned(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """One document, the last query at the last key."""
    L, M = q.shape[2], k.shape[2]
    if mask.causal and L > M:  # the first queries lie before the first key
        return F.pad(_aligned(q[:, :, L - M :], k, v, mask, options), (0, 0, L - M, 0))
    if mask.window is not None and mask.window >= max(L, M):  # no two positions of the document are so far apart
        return _aligned(q, k, v, Mask(mask.causal, prefix=mask.prefix), options)
    if mask.window is not None:
        return _windowed(q, k, v, mask, options)
    if mask.prefix is not None:
        return _prefixed(q, k, v, int(mask.prefix), options)
    if not mask.causal or L == 1:
        return _fused(q, k, v, options)
    return _causal(q, k, v, options)


def _causal(q: Tensor, k: Tensor, v: Tensor, options: Options) -> Tensor:
    L, M = q.shape[2], k.shape[2]
    if L == M:
        return _fused(q, k, v, options, causal=True)
    if 2 * L >= M:  # torch's own causal form starts at the first key: give it queries there too, and forget them
        return _fused(F.pad(q, (0, 0, M - L, 0)), k, v, options, causal=True)[:, :, M - L :]
    if torch.compiler.is_compiling() or options.dropout > 0 or q.device.type != "cpu":
        return _masked(q, k, v, Mask(causal=True), options)
    # The mask depends on the distance alone, so with the keys in reverse, cell (i, j) is entry i + j of one row of
    # L + M - 1 numbers: a view of it stands for the whole mask. The kernels of a GPU want masks aligned in memory.
    row = q.new_zeros(L + M - 1)
    row[: L - 1] = -torch.inf
    return _fused(q, k.flip(2), v.flip(2), options, row.as_strided((L, M), (1, 1)))


def _prefixed(q: Tensor, k: Tensor, v: Tensor, prefix: int, options: Options) -> Tensor:
    """Queries inside the prefix see all of it and no more; those after it see what is causal."""
    L, M = q.shape[2], k.shape[2]
    prefix = min(prefix, M)
    inside = min(max(0, prefix - (M - L)), L)
    if inside == 0:
        return _aligned(q, k, v, Mask(causal=True), options)
    first = _fused(q[:, :, :inside], k[:, :, :prefix], v[:, :, :prefix], options)
    if inside == L:
        return first
    return torch.cat([first, _aligned(q[:, :, inside:], k, v, Mask(causal=True), options)], dim=2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """Blocks of queries, each against the blocks of keys its window reaches, as one batch: time linear in length.

    A block of half a window is best where it was measured: of the keys each block reads, two thirds are seen.
    """
    L, M = q.shape[2], k.shape[2]
    assert mask.window is not None
    if mask.keep_first or mask.prefix is not None:
        return _masked(q, k, v, mask, options)
    first = max(0, M - L - mask.window + 1)  # no query sees a key before
    k, v = k[:, :, first:], v[:, :, first:]
    keys = M - first
    block = max(LEAST_BLOCK, (mask.window + 1) // 2)
    reach = -((1 - mask.window) // block)  # blocks before its own that a block sees (and after it, unless causal)
    after = 0 if mask.causal else reach
    count = L // block - reach - after  # of blocks that have all their neighbours
    if block < L < keys:  # queries before the first one make it square; they are forgotten
        return _windowed(F.pad(q, (0, 0, keys - L, 0)), k, v, mask, options)[:, :, keys - L :]
    if keys != L or count < 2:
        return _masked(q, k, v, mask, options)

    def around(x: Tensor) -> Tensor:
        """[B, K, L, H] to [B · count, K, (reach + 1 + after) · block, H]."""
        blocks = torch.unflatten(x[:, :, : (count + reach + after) * block], 2, (-1, block)).transpose(1, 2)
        return torch.cat([blocks[:, i : i + count] for i in range(reach + 1 + after)], dim=3).flatten(0, 1)

    start, stop = reach * block, (reach + count) * block
    head, middle, tail = q.split_with_sizes([start, stop - start, L - stop], dim=2)
    keys_of_head, keys_of_tail = start + after * block, stop - reach * block
    pieces = [_band(head, k[:, :, :keys_of_head], v[:, :, :keys_of_head], 0, mask, options)]
    folded = torch.unflatten(middle, 2, (count, block)).transpose(1, 2).flatten(0, 1)
    out = _band(folded, around(k), around(v), start, mask, options)
    pieces.append(torch.unflatten(out, 0, (-1, count)).transpose(1, 2).flatten(2, 3))
    pieces.append(_band(tail, k[:, :, keys_of_tail:], v[:, :, keys_of_tail:], start, mask, options))
    return torch.cat(pieces, dim=2)


def _band(q: Tensor, k: Tensor, v: Tensor, offset: int, mask: Mask, options: Options) -> Tensor:
    """A block whose first query has the position of key `offset`."""
    if q.shape[2] == 0:
        return q.new_zeros(*q.shape[:3], v.shape[3])
    q_pos = torch.arange(offset, offset + q.shape[2], device=q.device)[:, None]
    k_pos = torch.arange(k.shape[2], device=q.device)
    seen = visible(mask, q_pos=q_pos, k_pos=k_pos, k_place=None, prefix=None, q_segment=None, k_segment=None)
    return _fused(q, k, v, options, seen)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """With the mask as a tensor. Keys before the first and after the last that is seen are not read."""
    L, M = q.shape[2], k.shape[2]
    (seen, unseen), layout = mask.cells(L, M, q.device), mask.layout
    scores = seen if options.bias is None else _scores(options.bias, seen, layout, q.dtype)
    reach = mask.reach(L, M, q.device)
    if reach is not None:
        k, v = k[:, :, reach], v[:, :, reach]
        unseen = unseen[:, reach] if unseen is not None else None
        scores = scores[..., reach] if scores is not None and scores.shape[-1] == M else scores
    if unseen is not None and not (layout is not None and layout.clean):
        k = k.masked_fill(unseen[:, None, :, None], 0)
        v = v.masked_fill(unseen[:, None, :, None], 0)
    return _fused(q, k, v, options, scores)


def _scores(bias: Tensor, seen: Tensor | None, layout: Layout | None, dtype: torch.dtype) -> Tensor:
    """bias with -inf where nothing is seen; layers that share both share the result."""
    if seen is None:
        return bias.to(dtype)

    def join() -> tuple[Tensor, Tensor, Tensor]:
        return bias, seen, torch.where(seen, bias.to(dtype), -torch.inf)

    kept = join() if layout is None else layout.remembered(("scores", identity(bias), identity(seen), dtype), join)
    return kept[2]


def _fused(
    q: Tensor, k: Tensor, v: Tensor, options: Options, attn_mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    (N, L, H), (K, Hv) = q.shape[1:], (k.shape[1], v.shape[3])
    if Hv != H:  # the fused kernels want one head size; zeros add nothing to scores, and their outputs are cut off
        size = max(H, Hv)
        q, k, v = (F.pad(x, (0, size - x.shape[3])) if x.shape[3] != size else x for x in (q, k, v))  # padding copies
    dropout, scale = options.dropout, options.scale
    grouped = False
    if N != K:  # with dynamic sizes the comparison alone is no bool to torch
        grouped = True
    if L == 1 and grouped and not causal:
        # Decoding: a group's queries become the rows of one product, so that each key is read once.
        q = torch.unflatten(q, 1, (K, -1)).squeeze(3)  # [B, K, G, H]
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = torch.unflatten(attn_mask, 1, (K, -1)).squeeze(3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, scale=scale)
        out = out[:, :, :, None].flatten(1, 2)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return out[..., :Hv] if Hv != H and Hv < out.shape[3] else out
