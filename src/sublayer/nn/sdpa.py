"""Attention by torch's fused kernels, cut so that they never need an L × M mask where the mask has structure.

B batch, N query heads, K key/value heads, L query length, M key length, H head size, Hv value head size, W window.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.nn.mask import Mask, Span
from sublayer.nn.reference import Options, refuse

FEW = 32  # up to so many queries against more keys, a mask of a few rows is cheaper than one call a row of the batch


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """torch's scaled_dot_product_attention. Linear in memory but for what the last line of `_aligned` says.

    Packed documents and padding are cut at documents, windows at blocks. Not for softcap, sinks or weights. With
    dropout, or a bias that needs a gradient, torch falls back on its own L × M form.
    """
    refuse("sdpa", options, "softcap", "sink_logits", "weights")
    L, M = q.shape[2], k.shape[2]
    if options.bias is not None or mask.allowed is not None:
        return _masked(q, k, v, mask, options)
    if mask.layout is None:
        return _aligned(q, k, v, mask, options)
    spans = None if L != M and L <= FEW else mask.layout.spans(L, M)
    if spans is None or (mask.positional and not all(span.aligned for row in spans for span in row)):
        return _masked(q, k, v, mask, options)
    return _documents(q, k, v, mask, options, spans)


class Part(NamedTuple):
    """A document with the mask inside it, positions counted from its own start."""

    span: Span
    causal: bool
    window: int | None
    keep_first: int
    prefix: int | None


def _documents(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options, spans: tuple[tuple[Span, ...], ...]
) -> Tensor:
    """Each document attends alone. Cutting is `split` and `cat`: their gradients are one copy, however many pieces."""
    prefixes = mask.prefix.tolist() if isinstance(mask.prefix, Tensor) else [mask.prefix]
    rows = [
        [_part(mask, span, prefixes[row % len(prefixes)]) for span in spans[row % len(spans)]]
        for row in range(max(len(prefixes), len(spans)))
    ]
    if all(row == rows[0] for row in rows):
        return _row(q, k, v, rows[0], options)
    one = zip(q.split(1), k.split(1), v.split(1), rows, strict=True)
    return torch.cat([_row(q1, k1, v1, row, options) for q1, k1, v1, row in one])


def _part(mask: Mask, span: Span, prefix: int | None) -> Part:
    keep_first = max(0, mask.keep_first - span.k_place)
    return Part(span, mask.causal, mask.window, keep_first, None if prefix is None else max(0, prefix - span.k_place))


def _row(q: Tensor, k: Tensor, v: Tensor, parts: Sequence[Part], options: Options) -> Tensor:
    """The documents of one geometry, in the order of their queries; zeros for queries of no document."""
    queries = _cut(q, [(part.span.q_start, part.span.q_stop) for part in parts])
    keys = _cut(k, [(part.span.k_start, part.span.k_stop) for part in parts])
    values = _cut(v, [(part.span.k_start, part.span.k_stop) for part in parts])
    pieces: list[Tensor] = []
    stop = 0
    for span, *inside in parts:
        if span.q_start > stop:
            pieces.append(q.new_zeros(*q.shape[:2], span.q_start - stop, v.shape[3]))
        piece = queries[span.q_start], keys[span.k_start], values[span.k_start]
        pieces.append(_aligned(*piece, Mask(*inside), options))
        stop = span.q_stop
    if stop < q.shape[2]:
        pieces.append(q.new_zeros(*q.shape[:2], q.shape[2] - stop, v.shape[3]))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def _cut(x: Tensor, bounds: list[tuple[int, int]]) -> dict[int, Tensor]:
    """The pieces [start, stop) of axis 2, by start; the pieces lie apart."""
    edges = sorted({0, x.shape[2], *(edge for bound in bounds for edge in bound)})
    sizes = [stop - start for start, stop in pairwise(edges)]
    return dict(zip(edges, x.split(sizes, dim=2), strict=False)) if len(sizes) > 1 else {0: x}


def _aligned(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """One document, the last query at the last key."""
    L, M = q.shape[2], k.shape[2]
    if not mask.positional:
        return _fused(q, k, v, options)
    if mask.causal and mask.window is None and L == M:
        return _fused(q, k, v, options, causal=True)
    if mask.causal and mask.window is None and L == 1:
        return _fused(q, k, v, options)
    return _masked(q, k, v, mask, options)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """With the mask as a tensor."""
    visible, unseen = mask.cells(q.shape[2], k.shape[2], q.device)
    if unseen is not None and not (mask.layout is not None and mask.layout.clean):
        k = k.masked_fill(unseen[:, None, :, None], 0)
        v = v.masked_fill(unseen[:, None, :, None], 0)
    if options.bias is None:
        return _fused(q, k, v, options, visible)
    bias = options.bias.to(q.dtype)
    return _fused(q, k, v, options, bias if visible is None else torch.where(visible, bias, -torch.inf))


def _fused(
    q: Tensor, k: Tensor, v: Tensor, options: Options, attn_mask: Tensor | None = None, *, causal: bool = False
) -> Tensor:
    (N, L, H), (K, Hv) = q.shape[1:], (k.shape[1], v.shape[3])
    if Hv != H:  # the fused kernels want one head size; zeros add nothing to scores, and their outputs are cut off
        size = max(H, Hv)
        q, k, v = F.pad(q, (0, size - H)), F.pad(k, (0, size - H)), F.pad(v, (0, size - Hv))
    dropout, scale = options.dropout, options.scale
    grouped = True if N != K else False  # noqa: SIM210 -- with dynamic sizes a comparison alone is no bool to torch
    if L == 1 and grouped and not causal:
        # Decoding: a group's queries become the rows of one product, so that each key is read once.
        q = q.unflatten(1, (K, -1)).squeeze(3)  # [B, K, G, H]
        if attn_mask is not None and attn_mask.ndim == 4 and attn_mask.shape[1] > 1:
            attn_mask = attn_mask.unflatten(1, (K, -1)).squeeze(3)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, scale=scale)
        out = out.unflatten(2, (-1, 1)).flatten(1, 2)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, dropout, causal, scale=scale, enable_gqa=grouped)
    return out[..., :Hv] if Hv != H and Hv < out.shape[3] else out
