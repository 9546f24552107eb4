"""The kernel boundary of attention: one call, several kernels that compute the same function.

B batch, N query heads, K key/value heads, L query length, M key length, H head size, Hv value head size.
"""

from typing import Literal, overload

import torch
from torch import Tensor

from ..errors import InputError, MaskError, nearest
from .mask import Mask
from .reference import KernelFunction, Options, reference
from .sdpa import FEW, linear, sdpa
from .tiled import tiled

Kernel = Literal["auto", "reference", "sdpa", "tiled", "flex", "triton"]


@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    weights: Literal[False] = False,
    kernel: Kernel = "auto",
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    weights: bool,
    kernel: Kernel = "auto",
) -> Tensor | tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask | None = None,
    *,
    scale: float,
    bias: Tensor | None = None,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    dropout: float = 0.0,
    weights: bool = False,
    kernel: Kernel = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Scaled dot-product attention, softmax(scale · q kᵀ + bias) v; scale is usually 1 / sqrt(H).

    q: [B, N, L, H]; k: [B, K, M, H]; v: [B, K, M, Hv]; N is a multiple of K, and query head n reads key/value head
    n // (N / K) (grouped queries). Returns [B, N, L, Hv] in q's dtype.

    mask: who sees whom; without a layout the last query is aligned with the last key. A query that sees no key
    returns zeros, with gradients of zero. Keys and values that no query of a row sees may hold NaN: it reaches
    nothing. `reference` and `tiled` hold that for each single query too (a NaN in the future); torch's fused
    kernels do not.
    bias: broadcastable to [B, N, L, M], added to the scores after scaling and softcap.
    softcap: scores become softcap · tanh(scale · q kᵀ / softcap), before bias and mask (Gemma 2, arXiv 2408.00118).
    sink_logits: [N], learned; they join the softmax's denominator and no value (gpt-oss, arXiv 2508.10925).
    dropout: the share of weights dropped, the rest scaled up. It is the caller that passes 0 in evaluation.
    weights: also return the weights [B, N, L, M] that multiplied v.
    kernel: "auto" follows the rule that `choose` states; a name asks for that kernel or fails.

    Raises MaskError if the kernel asked for cannot express the call ("auto" never picks such a one), and InputError
    for shapes that do not fit. Source: Vaswani et al. 2017, eq. 1; grouping, arXiv 2305.13245.
    """
    mask = Mask() if mask is None else mask
    _check(q, k, v, sink_logits)
    if k.shape[2] == 0:
        out = q.new_zeros(*q.shape[:3], v.shape[3])
        return (out, q.new_zeros(*q.shape[:3], 0)) if weights else out
    if bias is not None and bias.dim() < 4:
        bias = bias[(None,) * (4 - bias.dim())]
    options = Options(scale, bias, softcap, sink_logits, dropout, weights)
    name = choose(q, k, mask, options) if kernel == "auto" else kernel
    if name not in KERNELS:
        raise MaskError(f"no attention kernel {name!r}{nearest(name, KERNELS)}")
    return KERNELS[name](q, k, v, mask, options)


def choose(q: Tensor, k: Tensor, mask: Mask, options: Options) -> str:
    """The kernel that "auto" picks; the bounds are where the times crossed, forward and backward (docs/attention.md).

    weights: reference, which alone has them.
    softcap or sinks: tiled, or reference below 256 × 256 scores or for a few queries, where few large operations beat
    many small ones.
    the rest: sdpa where it needs no tensor of L × M (causal, windows, documents, padding, prefixes), and where that
    tensor is given (an explicit mask, a fixed bias): its kernel stays fused. Otherwise (dropout, a bias that learns,
    kept first keys, torn documents) tiled, or sdpa below 512 × 512 scores.
    Compiled, tiled is not to be had (it reads values to skip tiles): sdpa, or reference for softcap and sinks.
    """
    L, M, compiling = q.shape[2], k.shape[2], torch.compiler.is_compiling()
    if options.weights:
        return "reference"
    if options.softcap is not None or options.sink_logits is not None:
        return "reference" if compiling or L <= FEW or L * M <= 256 * 256 else "tiled"
    if compiling or L * M <= 512 * 512 or linear(mask, options, L, M):
        return "sdpa"
    learned = options.bias is not None and options.bias.requires_grad and torch.is_grad_enabled()
    given = mask.allowed is not None or options.bias is not None
    return "sdpa" if given and not learned and options.dropout == 0 else "tiled"


def flex(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    """torch's flex_attention; imported when asked for, since it brings in the compiler."""
    from . import flex as module

    return module.flex(q, k, v, mask, options)


def triton(q: Tensor, k: Tensor, v: Tensor, mask: Mask, options: Options) -> Tensor | tuple[Tensor, Tensor]:
    """The tiled kernel in Triton; imported when asked for, since triton may be absent."""
    try:
        from . import triton_attention as module
    except ImportError as error:
        raise MaskError("the triton kernel needs the package triton: install it, or ask for tiled or auto") from error
    return module.triton_attention(q, k, v, mask, options)


KERNELS: dict[str, KernelFunction] = {
    "reference": reference,
    "sdpa": sdpa,
    "tiled": tiled,
    "flex": flex,
    "triton": triton,
}


def _check(q: Tensor, k: Tensor, v: Tensor, sink_logits: Tensor | None) -> None:
    if q.shape[1] % k.shape[1] or k.shape[:3] != v.shape[:3] or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise InputError(
            f"attention takes q [B, N, L, H], k [B, K, M, H], v [B, K, M, Hv] with N a multiple of K; "
            f"got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if sink_logits is not None and sink_logits.shape != (q.shape[1],):
        raise InputError(f"sink_logits are one a query head, [{q.shape[1]}]; got {list(sink_logits.shape)}")
