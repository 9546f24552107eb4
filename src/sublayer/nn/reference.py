"""The attention formula as it is written, and what a call may ask of a kernel. Every kernel is held to this one.

B batch, N query heads, K key/value heads, G = N / K heads a group, L query length, M key length, H head size.
"""

from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import MaskError
from .mask import Mask


class Options(NamedTuple):
    """What a call of `attend` asks for besides q, k, v and the mask; the same for every kernel."""

    scale: float
    bias: Tensor | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    dropout: float = 0.0
    weights: bool = False


class KernelFunction(Protocol):
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options
    ) -> Tensor | tuple[Tensor, Tensor]: ...


def reference(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    """Explicit softmax in fp32 or better over all L · M scores; expresses everything, and may return the weights."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    N, L, M = q.shape[1], q.shape[2], k.shape[2]
    visible = mask.materialise(L, M, q.device)
    k, bad_key = finite(k)
    v, bad_value = finite(v)

    grouped = torch.unflatten(q.to(dtype), 1, (k.shape[1], -1)).flatten(2, 3)  # [B, K, G · L, H]: keys are not repeated
    scores = torch.unflatten(options.scale * grouped @ k.to(dtype).mT, 2, (-1, L)).flatten(1, 2)
    if bad_key is not None:
        scores = scores.masked_fill(_per_head(bad_key.any(-1)[:, :, None], N), torch.nan)
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    if options.bias is not None:
        scores = scores + options.bias
    if visible is not None:
        scores = scores.masked_fill(~visible, -torch.inf)

    weights = _softmax(scores, options.sink_logits)
    if options.dropout > 0:
        weights = F.dropout(weights, options.dropout)
    shares = torch.unflatten(weights, 1, (v.shape[1], -1)).flatten(2, 3)
    out = torch.unflatten(shares @ v.to(dtype), 2, (-1, L)).flatten(1, 2)
    if bad_value is not None:
        seen = torch.ones_like(scores) if visible is None else visible.expand_as(scores).to(dtype)
        out = out.masked_fill(seen @ _per_head(bad_value.to(dtype), N) > 0, torch.nan)
    out = out.to(q.dtype)
    return (out, weights.to(q.dtype)) if options.weights else out


def finite(x: Tensor) -> tuple[Tensor, Tensor | None]:
    """x with zeros for NaN and inf, and where those stood (None: nowhere).

    A hidden cell weighs exactly 0, and 0 · NaN is NaN, so no product may meet one; the visible ones are put back.
    """
    good = x.isfinite()
    if not torch.compiler.is_compiling() and bool(good.all()):
        return x, None
    return torch.where(good, x, 0), ~good


def refuse(kernel: str, options: Options, *names: str) -> None:
    """Raises MaskError for options that a kernel cannot express."""
    asked = [name for name in names if isinstance(getattr(options, name), Tensor) or getattr(options, name)]
    if asked:
        others = "reference" if "weights" in asked else "reference and tiled"
        raise MaskError(f"the {kernel} kernel has no {' and no '.join(asked)}: {others} can, and auto picks one")


def _softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """softmax over the last axis, zero (gradients too) where every score is -inf; sinks join the denominator only."""
    if sink_logits is not None:
        sinks = sink_logits.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
        return _softmax(torch.cat([scores, sinks], dim=-1), None)[..., :-1]
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)


def _per_head(x: Tensor, N: int) -> Tensor:
    """[B, K, ...] to [B, N, ...]: what belongs to a key/value head, for each query head of its group."""
    return x.repeat_interleave(N // x.shape[1], dim=1)
