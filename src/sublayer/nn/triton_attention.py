"""The tiled kernel in Triton, for a GPU: the same algorithm as tiled.py, one program a tile of queries or keys.

Equations as there: arXiv 2307.08691, algorithms 1 and 2. Without a GPU it runs in Triton's interpreter
(TRITON_INTERPRET=1, set before triton is imported), which is how it is tested then.

B batch, N query heads, K key/value heads, G = N / K heads a group, L query length, M key length, H head size,
Hv value head size; l and m a tile's queries and keys.
"""

# Triton's language is untyped, and reads its kernels as source: names of arguments stand for pointers and constants.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import knobs

from ..errors import MaskError
from .mask import Layout, Mask
from .reference import Options, refuse
from .tiled import sinks_gradient

# Bytes of a tile of queries or keys. Up to a dozen of them are in flight in the backward; the 100 KB of shared memory a
# program has on the smaller GPUs bound them. Counted by compiling for sm_80, not timed.
TILE_BYTES = 8192


def triton_attention(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """Causal, windows, kept first keys, prefixes, documents, grouped heads, softcap and sinks; sums in fp32.

    Not for explicit masks, bias, dropout or weights, nor fp64. A NaN hidden from all queries of a tile reaches
    nothing. Raises MaskError where there is neither a GPU nor the interpreter.
    """
    refuse("triton", options, "bias", "dropout", "weights")
    if mask.allowed is not None:
        raise MaskError("the triton kernel has no explicit masks: reference, sdpa and tiled have, and auto picks one")
    if q.dtype == torch.float64:
        raise MaskError("the triton kernel has no fp64: reference, sdpa and tiled have, and auto picks one")
    if not (q.is_cuda or knobs.runtime.interpret):
        raise MaskError(f"the triton kernel needs a GPU, and q lies on {q.device}: sdpa and tiled do not")
    apply: Any = _Attention.apply
    return apply(q, k, v, options.sink_logits, mask, options)


class Geometry(NamedTuple):
    """What the mask means, as int32 rows the kernels can read; a row that is None stands for nothing to ask."""

    q_pos: Tensor  # [B, L]
    k_pos: Tensor  # [B, M]
    k_place: Tensor  # [B, M]
    q_segment: Tensor  # [B, L]
    k_segment: Tensor  # [B, M]
    prefix: Tensor  # [B]
    columns: Tensor  # [B, row tiles, 2]: first key tile a query tile may see into, and the one after the last
    rows: Tensor  # [B, column tiles, 2]: the same for the query tiles of a key tile


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        q, k, v, sink_logits, mask, options = args
        constants = _constants(q, k, v, mask, options)
        tile = constants["TILE"]
        geometry = _geometry(mask, q, k, tile)
        (B, N, L, _), Hv = q.shape, v.shape[3]
        out = torch.zeros(B, N, L, Hv, dtype=q.dtype, device=q.device)
        lse = torch.empty(B, N, L, dtype=torch.float32, device=q.device)
        sinks = q.new_zeros(N, dtype=torch.float32) if sink_logits is None else sink_logits.float()
        _forward[(triton.cdiv(L, tile), B * N)](
            q, k, v, out, lse, sinks, *geometry, *_strides(q, k, v, out), L, k.shape[2], options.scale,
            options.softcap or 0.0, SINKS=sink_logits is not None, **constants,
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, sink_logits, out, lse)
        ctx.rest = geometry, constants, options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        q, k, v, sink_logits, out, lse = ctx.saved_tensors
        geometry, constants, options = ctx.rest
        d_out = grads[0].contiguous()
        (B, N, L, _), (K, M), tile = q.shape, k.shape[1:3], constants["TILE"]
        delta = (d_out.float() * out.float()).sum(-1)
        d_q, d_k, d_v = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        scalars = L, M, options.scale, options.softcap or 0.0
        strides = _strides(q, k, v, d_out)
        _backward_queries[(triton.cdiv(L, tile), B * N)](
            q, k, v, d_out, lse, delta, d_q, *geometry, *strides, *d_q.stride(), *scalars, **constants
        )
        _backward_keys[(triton.cdiv(M, tile), B * K)](
            q, k, v, d_out, lse, delta, d_k, d_v, *geometry, *strides, *d_k.stride(), *d_v.stride(), *scalars,
            **constants,
        )  # fmt: skip
        grouped = lse.view(B, K, N // K, L), delta.view(B, K, N // K, L)
        d_sinks = sinks_gradient(sink_logits, *grouped)
        return d_q, d_k, d_v, None if d_sinks is None else d_sinks.to(sink_logits.dtype), None, None


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()]


def _constants(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> dict[str, Any]:
    """What a kernel is compiled for."""
    layout = mask.layout
    wide, wide_v = (max(16, triton.next_power_of_2(x.shape[3])) for x in (q, v))  # 16: the least a product takes
    return {
        "N": q.shape[1],
        "G": q.shape[1] // k.shape[1],
        "H": q.shape[3],
        "HV": v.shape[3],
        "WIDE": wide,
        "WIDE_V": wide_v,
        "CAUSAL": mask.causal,
        "WINDOW": mask.window or 0,
        "KEEP_FIRST": mask.keep_first,
        "PREFIX": mask.prefix is not None,
        "DOCUMENTS": layout is not None and (layout.q_segment is not None or layout.k_segment is not None),
        "SOFTCAP": options.softcap is not None,
        "TILE": min(64, max(16, TILE_BYTES // (max(wide, wide_v) * q.element_size()))),
    }


def _geometry(mask: Mask, q: Tensor, k: Tensor, tile: int) -> Geometry:
    B, L, M = q.shape[0], q.shape[2], k.shape[2]
    layout = mask.layout if mask.layout is not None else Layout()

    def rows(x: Tensor) -> Tensor:
        return x.to(torch.int32).expand(B, -1).contiguous()

    one = torch.ones(1, 1, dtype=torch.int32, device=q.device)
    q_pos, k_pos = layout.positions(L, M, q.device)
    prefix = mask.prefix if isinstance(mask.prefix, Tensor) else torch.full((B,), mask.prefix or 0, device=q.device)
    some = mask.tiles(L, M, tile, q.device)[0].expand(B, -1, -1)
    return Geometry(
        rows(q_pos),
        rows(k_pos),
        rows(layout.places(M, q.device)),
        rows(one.expand(1, L) if layout.q_segment is None else layout.q_segment),
        rows(one.expand(1, M) if layout.k_segment is None else layout.k_segment),
        prefix.to(torch.int32).contiguous(),
        _extent(some),
        _extent(some.mT),
    )


def _extent(some: Tensor) -> Tensor:
    """First true entry of the last axis and the one after the last, int32 [..., 2]; 0, 0 where there is none."""
    number = torch.arange(some.shape[-1], device=some.device)
    stop = torch.where(some, number + 1, 0).amax(-1)
    start = torch.where(some, number, some.shape[-1]).amin(-1)
    return torch.stack([torch.minimum(start, stop), stop], -1).to(torch.int32).contiguous()


@triton.jit
def _rows(base, index, inside, stride, head_stride, H: tl.constexpr, WIDE: tl.constexpr):
    """Rows of one head, [len(index), WIDE]; zeros beyond H and where not inside."""
    lane = tl.arange(0, WIDE)
    where = base + index[:, None] * stride + lane[None, :] * head_stride
    return tl.load(where, mask=inside[:, None] & (lane[None, :] < H), other=0.0)


@triton.jit
def _visible(
    q_pos, k_pos, k_place, q_segment, k_segment, b, i, j, L, M, prefix,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, KEEP_FIRST: tl.constexpr, PREFIX: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """mask.visible for the cells of queries i and keys j, [l, m]."""
    seen = (i < L)[:, None] & (j < M)[None, :]
    own = tl.load(q_pos + b * L + i, mask=i < L, other=0)
    theirs = tl.load(k_pos + b * M + j, mask=j < M, other=0)
    distance = own[:, None] - theirs[None, :]
    if CAUSAL:
        seen = seen & (distance >= 0)
    if PREFIX or KEEP_FIRST > 0:
        place = tl.load(k_place + b * M + j, mask=j < M, other=0)
    if PREFIX:
        seen = seen & ((distance >= 0) | (place < prefix)[None, :])
    if WINDOW > 0:
        near = distance < WINDOW
        if not CAUSAL:
            near = near & (distance > -WINDOW)
        if KEEP_FIRST > 0:
            near = near | (place < KEEP_FIRST)[None, :]
        seen = seen & near
    if DOCUMENTS:
        document = tl.load(q_segment + b * L + i, mask=i < L, other=0)
        other = tl.load(k_segment + b * M + j, mask=j < M, other=0)
        seen = seen & (document[:, None] == other[None, :]) & (document > 0)[:, None]
    return seen


@triton.jit
def _score(queries, keys, seen, scale, softcap, SOFTCAP: tl.constexpr):
    """Scores of a tile, -inf where hidden, and the slope of the cap."""
    score = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    slope = tl.full(score.shape, 1.0, tl.float32)
    if SOFTCAP:
        bent = 2 * tl.sigmoid(2 * score / softcap) - 1  # tanh
        slope = 1 - bent * bent
        score = softcap * bent
    return tl.where(seen, score, float("-inf")), slope


@triton.jit
def _forward(
    q, k, v, out, lse, sinks,
    q_pos, k_pos, k_place, q_segment, k_segment, prefix, columns, rows,
    qb, qn, ql, qh, kb, kn, km, kh, vb, vn, vm, vh, ob, on, ol, oh,
    L, M, scale, softcap,
    SINKS: tl.constexpr, N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    WIDE: tl.constexpr, WIDE_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    KEEP_FIRST: tl.constexpr, PREFIX: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Algorithm 1: one program a tile of queries of one head."""
    tile, b, n = tl.program_id(0), tl.program_id(1) // N, tl.program_id(1) % N
    i = tile * TILE + tl.arange(0, TILE)
    queries = _rows(q + b * qb + n * qn, i, i < L, ql, qh, H, WIDE)
    own_prefix = tl.load(prefix + b)
    peak = tl.full((TILE,), float("-inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    if SINKS:
        peak = tl.zeros((TILE,), tl.float32) + tl.load(sinks + n)
        total = total + 1.0
    sums = tl.zeros((TILE, WIDE_V), tl.float32)
    extent = columns + (b * tl.cdiv(L, TILE) + tile) * 2
    for column in range(tl.load(extent), tl.load(extent + 1)):
        j = column * TILE + tl.arange(0, TILE)
        seen = _visible(q_pos, k_pos, k_place, q_segment, k_segment, b, i, j, L, M, own_prefix,
                        CAUSAL, WINDOW, KEEP_FIRST, PREFIX, DOCUMENTS)  # fmt: skip
        used = tl.max(seen.to(tl.int32), axis=0) > 0  # a key no query of the tile sees is not even read
        keys = _rows(k + b * kb + (n // G) * kn, j, used, km, kh, H, WIDE)
        values = _rows(v + b * vb + (n // G) * vn, j, used, vm, vh, HV, WIDE_V)
        score, _ = _score(queries, keys, seen, scale, softcap, SOFTCAP)
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        share = tl.exp(score - base[:, None])
        shrink = tl.exp(peak - base)
        total = total * shrink + tl.sum(share, axis=1)
        sums = sums * shrink[:, None] + tl.dot(share.to(values.dtype), values, input_precision="ieee")
        peak = new_peak
    blind = total == 0
    sums = sums / tl.where(blind, 1.0, total)[:, None]
    lane = tl.arange(0, WIDE_V)
    where = out + b * ob + n * on + i[:, None] * ol + lane[None, :] * oh
    tl.store(where, sums.to(out.dtype.element_ty), mask=(i < L)[:, None] & (lane < HV)[None, :])
    base = tl.where(blind, 0.0, peak)
    log_total = tl.where(blind, float("inf"), base + tl.log(tl.where(blind, 1.0, total)))
    tl.store(lse + (b * N + n) * L + i, log_total, mask=i < L)


@triton.jit
def _backward_queries(
    q, k, v, d_out, lse, delta, d_q,
    q_pos, k_pos, k_place, q_segment, k_segment, prefix, columns, rows,
    qb, qn, ql, qh, kb, kn, km, kh, vb, vn, vm, vh, ob, on, ol, oh, db, dn, dl, dh,
    L, M, scale, softcap,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    WIDE: tl.constexpr, WIDE_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    KEEP_FIRST: tl.constexpr, PREFIX: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, the rows: dq of one tile of queries of one head."""
    tile, b, n = tl.program_id(0), tl.program_id(1) // N, tl.program_id(1) % N
    i = tile * TILE + tl.arange(0, TILE)
    queries = _rows(q + b * qb + n * qn, i, i < L, ql, qh, H, WIDE)
    d_rows = _rows(d_out + b * ob + n * on, i, i < L, ol, oh, HV, WIDE_V)
    own_lse = tl.load(lse + (b * N + n) * L + i, mask=i < L, other=float("inf"))
    own_delta = tl.load(delta + (b * N + n) * L + i, mask=i < L, other=0.0)
    own_prefix = tl.load(prefix + b)
    sums = tl.zeros((TILE, WIDE), tl.float32)
    extent = columns + (b * tl.cdiv(L, TILE) + tile) * 2
    for column in range(tl.load(extent), tl.load(extent + 1)):
        j = column * TILE + tl.arange(0, TILE)
        seen = _visible(q_pos, k_pos, k_place, q_segment, k_segment, b, i, j, L, M, own_prefix,
                        CAUSAL, WINDOW, KEEP_FIRST, PREFIX, DOCUMENTS)  # fmt: skip
        used = tl.max(seen.to(tl.int32), axis=0) > 0
        keys = _rows(k + b * kb + (n // G) * kn, j, used, km, kh, H, WIDE)
        values = _rows(v + b * vb + (n // G) * vn, j, used, vm, vh, HV, WIDE_V)
        score, slope = _score(queries, keys, seen, scale, softcap, SOFTCAP)
        share = tl.exp(score - own_lse[:, None])
        d_share = tl.dot(d_rows, tl.trans(values), input_precision="ieee")
        d_score = tl.where(seen, share * (d_share - own_delta[:, None]) * slope, 0.0)
        sums += tl.dot(d_score.to(keys.dtype), keys, input_precision="ieee")
    lane = tl.arange(0, WIDE)
    where = d_q + b * db + n * dn + i[:, None] * dl + lane[None, :] * dh
    tl.store(where, (sums * scale).to(d_q.dtype.element_ty), mask=(i < L)[:, None] & (lane < H)[None, :])


@triton.jit
def _backward_keys(
    q, k, v, d_out, lse, delta, d_k, d_v,
    q_pos, k_pos, k_place, q_segment, k_segment, prefix, columns, rows,
    qb, qn, ql, qh, kb, kn, km, kh, vb, vn, vm, vh, ob, on, ol, oh,
    dkb, dkn, dkm, dkh, dvb, dvn, dvm, dvh,
    L, M, scale, softcap,
    N: tl.constexpr, G: tl.constexpr, H: tl.constexpr, HV: tl.constexpr,
    WIDE: tl.constexpr, WIDE_V: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    KEEP_FIRST: tl.constexpr, PREFIX: tl.constexpr, DOCUMENTS: tl.constexpr, SOFTCAP: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Algorithm 2, the columns: dk and dv of one tile of keys, over all query heads of their group: no atomics."""
    tile, b, head = tl.program_id(0), tl.program_id(1) // (N // G), tl.program_id(1) % (N // G)
    j = tile * TILE + tl.arange(0, TILE)
    keys = _rows(k + b * kb + head * kn, j, j < M, km, kh, H, WIDE)
    values = _rows(v + b * vb + head * vn, j, j < M, vm, vh, HV, WIDE_V)
    own_prefix = tl.load(prefix + b)
    k_sums = tl.zeros((TILE, WIDE), tl.float32)
    v_sums = tl.zeros((TILE, WIDE_V), tl.float32)
    extent = rows + (b * tl.cdiv(M, TILE) + tile) * 2
    start, stop = tl.load(extent), tl.load(extent + 1)
    for n in range(head * G, head * G + G):
        for row in range(start, stop):
            i = row * TILE + tl.arange(0, TILE)
            queries = _rows(q + b * qb + n * qn, i, i < L, ql, qh, H, WIDE)
            d_rows = _rows(d_out + b * ob + n * on, i, i < L, ol, oh, HV, WIDE_V)
            own_lse = tl.load(lse + (b * N + n) * L + i, mask=i < L, other=float("inf"))
            own_delta = tl.load(delta + (b * N + n) * L + i, mask=i < L, other=0.0)
            seen = _visible(q_pos, k_pos, k_place, q_segment, k_segment, b, i, j, L, M, own_prefix,
                            CAUSAL, WINDOW, KEEP_FIRST, PREFIX, DOCUMENTS)  # fmt: skip
            score, slope = _score(queries, keys, seen, scale, softcap, SOFTCAP)
            share = tl.exp(score - own_lse[:, None])
            v_sums += tl.dot(tl.trans(share).to(d_rows.dtype), d_rows, input_precision="ieee")
            d_share = tl.dot(d_rows, tl.trans(values), input_precision="ieee")
            d_score = tl.where(seen, share * (d_share - own_delta[:, None]) * slope, 0.0)
            k_sums += tl.dot(tl.trans(d_score).to(queries.dtype), queries, input_precision="ieee")
    lane = tl.arange(0, WIDE)
    where = d_k + b * dkb + head * dkn + j[:, None] * dkm + lane[None, :] * dkh
    tl.store(where, (k_sums * scale).to(d_k.dtype.element_ty), mask=(j < M)[:, None] & (lane < H)[None, :])
    lane_v = tl.arange(0, WIDE_V)
    where_v = d_v + b * dvb + head * dvn + j[:, None] * dvm + lane_v[None, :] * dvh
    tl.store(where_v, v_sums.to(d_v.dtype.element_ty), mask=(j < M)[:, None] & (lane_v < HV)[None, :])
