"""Attention by torch's flex_attention: the mask and the scores' changes as functions, compiled into one kernel.

B batch, N query heads, L query length, M key length.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ..errors import MaskError
from .mask import Layout, Mask, both, identity, visible
from .reference import Options, refuse

compiled: Any = torch.compile(flex_attention, dynamic=False)  # pyright: ignore[reportUnknownMemberType]


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor:
    """Masks by documents, positions, windows and prefixes skip whole blocks; scores are never stored.

    Not for dropout or weights, nor fp64; on a CPU only forward, as torch has it (MaskError before anything is
    computed). The block mask itself is found from all L · M cells, once a layout. Compiles for each new length.
    """
    refuse("flex", options, "dropout", "weights")
    _check_device(q, k, v)
    L, M = q.shape[2], k.shape[2]
    unseen = mask.cells(L, M, q.device)[1]
    if unseen is not None and not (mask.layout is not None and mask.layout.clean):
        k = k.masked_fill(unseen[:, None, :, None], 0)
        v = v.masked_fill(unseen[:, None, :, None], 0)
    if options.sink_logits is not None:  # a sink is one more key, of value zero, whose score is given
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    return compiled(
        q,
        k,
        v,
        score_mod=_score_mod(options, M),
        block_mask=_block_mask(mask, q, M, sink=options.sink_logits is not None),
        scale=options.scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )


def _check_device(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.dtype == torch.float64:
        raise MaskError("the flex kernel has no fp64: reference, sdpa and tiled have, and auto picks one")
    if q.device.type == "cpu" and torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        raise MaskError("the flex kernel has no backward on a CPU: use sdpa, tiled or auto there, or torch.no_grad()")


def _score_mod(options: Options, M: int) -> Any:
    """Softcap, then bias, on scores that are already scaled; the sink at key M. None where there is none of these."""
    softcap, bias, sinks = options.softcap, options.bias, options.sink_logits
    if softcap is None and bias is None and sinks is None:
        return None
    bias = None if bias is None else bias[(None,) * (4 - bias.ndim)]

    def changed(score: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
        key = j if sinks is None else j.clamp(max=M - 1)
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None:
            score = score + _cell(bias, b, n, i, key)
        return score if sinks is None else torch.where(j == M, sinks[n], score)

    return changed


def _block_mask(mask: Mask, q: Tensor, M: int, *, sink: bool) -> BlockMask | None:
    B, N, L, _ = q.shape
    if mask.materialise(L, M, q.device) is None:
        return None
    allowed = mask.allowed
    heads = N if allowed is not None and allowed.ndim > 2 and allowed.shape[-3] > 1 else None

    def make() -> tuple[Any, Any, BlockMask]:
        seen = _mask_mod(mask, q, M, sink=sink)
        return mask.prefix, allowed, create_block_mask(seen, B, heads, L, M + sink, device=q.device)

    if mask.layout is None:
        return make()[2]
    prefix = identity(mask.prefix)
    key = ("flex", mask.causal, mask.window, mask.keep_first, prefix, identity(allowed), B, heads, L, M, sink, q.device)
    return mask.layout.remembered(key, make)[2]


def _mask_mod(mask: Mask, q: Tensor, M: int, *, sink: bool) -> Any:
    """`visible`, cell by cell; a sink at key M is seen by all."""
    layout = mask.layout if mask.layout is not None else Layout()
    q_pos, k_pos = layout.positions(q.shape[2], M, q.device)
    k_place, q_segment, k_segment, prefix = layout.places(M, q.device), layout.q_segment, layout.k_segment, mask.prefix
    allowed = None if mask.allowed is None else mask.allowed[(None,) * (4 - mask.allowed.ndim)]

    def seen(b: Tensor, n: Tensor, i: Tensor, place: Tensor) -> Tensor:
        j = place.clamp(max=M - 1) if sink else place
        cell = visible(
            mask,
            q_pos=_at(q_pos, b, i),
            k_pos=_at(k_pos, b, j),
            k_place=_at(k_place, b, j),
            prefix=prefix[b] if isinstance(prefix, Tensor) else prefix,
            q_segment=None if q_segment is None else _at(q_segment, b, i),
            k_segment=None if k_segment is None else _at(k_segment, b, j),
        )
        permitted = None if allowed is None else _cell(allowed, b, n, i, j)
        shown = both(cell, permitted)
        assert shown is not None  # a mask that hides nothing has no block mask
        return shown | (place == M) if sink else shown

    return seen


def _at(x: Tensor, b: Tensor, index: Tensor) -> Tensor:
    """One entry of x [B|1, length]."""
    return x[b if x.shape[0] > 1 else 0, index]


def _cell(x: Tensor, b: Tensor, n: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """One entry of what broadcasts to [B, N, L, M]."""
    index = [place if size > 1 else 0 for place, size in zip((b, n, i, j), x.shape, strict=True)]
    return x[tuple(index)]
