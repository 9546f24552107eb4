"""State space duality (arXiv 2405.21060): the scan of Mamba-2, whose decays are one number a head, as matrix products.

B batch, L length, H heads of P channels, G groups of heads that share b and c, S states of a channel, R = H P / G
channels of a group, C tokens of a chunk, U chunks. Everything is fp32 or fp64.

Inside a chunk each token weighs the earlier ones by c_i · b_j times the decay between them, as attention does; a state
[S, R] goes from chunk to chunk. Decays are exponents of differences of running sums, and no exponent is above 0; the
sums are fp64, for the difference of two large ones must be right.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import faded

CHUNK = 64


def ssd(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None = None, starts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = exp(dt_t · a) · h_{t−1} + dt_t · b_t x_tᵀ, y_t = h_tᵀ c_t for each head → (y [B, L, H, P], last h).

    x: [B, L, H, P]; dt: [B, L, H]; a: [H], all below 0; b, c: [B, L, G, S]; past and the last h: [B, G, S, R], None for
    zeros; starts: [B, L] bool, where what came before is forgotten. dt = 0 leaves h as it is.
    """
    if x.shape[1] == 1:
        return _one_token(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], past, starts)
    (L, H, P), G = x.shape[1:], b.shape[2]
    size = min(CHUNK, L)
    x, dt, b, c = (_chunks(t, size) for t in (x, dt, b, c))
    inputs = x * dt[..., None]
    document = None if starts is None else _chunks(starts, size).long().cumsum(2)  # [B, U, C], in the chunk
    seen = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    if document is not None:
        seen = seen & (document[..., None] == document[:, :, None])
    # [B, U, C, H]: since the chunk began, or the document; a running sum would join the gradients of documents.
    log_decay = seen.double() @ (dt * a).double()

    # What a token hears of its own chunk.
    weights = (_by_group(c) @ _by_group(b).mT).repeat_interleave(H // G, 2)  # [B, U, H, C, C]
    weights = weights * _decays_between(log_decay, seen, x.dtype)
    y = (weights @ inputs.transpose(2, 3)).transpose(2, 3)  # [B, U, C, H, P]

    # What each chunk leaves, and what is left of the chunks before it.
    until_end, since_start = log_decay[:, :, -1:] - log_decay, log_decay
    if document is not None:
        until_end = until_end.masked_fill((document != document[:, :, -1:])[..., None], -torch.inf)
        since_start = since_start.masked_fill((document != 0)[..., None], -torch.inf)
    until_end, since_start = faded(until_end, x.dtype), faded(since_start, x.dtype)
    left = _by_group(b).mT @ _by_group(parted(inputs * until_end[..., None], 3, G, H // G).flatten(4))
    through = parted(since_start[:, :, -1], 2, G, H // G).repeat_interleave(P, 3)[:, :, :, None]  # [B, U, G, 1, R]
    h = left.new_zeros(left[:, 0].shape) if past is None else past
    held: list[Tensor] = []
    for decay, new in zip(through.unbind(1), left.unbind(1), strict=True):
        held.append(h)
        h = decay * h + new
    heard = parted((_by_group(c) @ torch.stack(held, 1)).transpose(2, 3), 4, H // G, P).flatten(3, 4)
    y = y + heard * since_start[..., None]
    return y.flatten(1, 2)[:, :L], h


def parted(x: Tensor, dim: int, *sizes: int) -> Tensor:
    """x with one dimension as several."""
    return x.reshape(*x.shape[:dim], *sizes, *x.shape[dim + 1 :])


def _chunks(x: Tensor, size: int) -> Tensor:
    """[B, L, …] → [B, U, C, …], the last chunk filled up with zeros."""
    room = -x.shape[1] % size
    return parted(F.pad(x, (0, 0) * (x.dim() - 2) + (0, room)), 1, -1, size)


def _by_group(x: Tensor) -> Tensor:
    """[B, U, C, G, …] → [B, U, G, C, …]."""
    return x.transpose(2, 3)


def _decays_between(log_decay: Tensor, seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, U, H, C, C]: what is left at a token of each earlier one's input; 0 for later ones and other documents'."""
    sums = log_decay.transpose(2, 3)
    between = sums[..., None] - sums[..., None, :]
    return faded(between.masked_fill(~seen.unsqueeze(-3), -torch.inf), dtype)


def _one_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None, starts: Tensor | None
) -> tuple[Tensor, Tensor]:
    (_, H, P), G = x.shape, b.shape[1]
    h = b[..., None] * parted((dt[..., None] * x).flatten(1), 1, G, 1, H // G * P)
    if past is not None:
        decay = (dt * a).exp()
        if starts is not None:
            decay = decay.masked_fill(starts, 0)
        h = h + parted(decay, 1, G, H // G).repeat_interleave(P, 2)[:, :, None] * past
    return (c[:, :, None] @ h).reshape(-1, 1, H, P), h
