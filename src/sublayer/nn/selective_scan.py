"""The selective scan of Mamba (arXiv 2312.00752): a linear recurrence for each channel, with decays that inputs choose.

B batch, L length, W channels, S states of a channel, T tokens of a block. Everything is fp32 or fp64.

A block's decays and inputs are made at once, [T, B, S, W] with channels innermost, which broadcasts and multiplies
fastest; then one multiply-add a token goes through it. Forward keeps only the states between blocks; backward makes
each block again and goes through it the other way. So memory grows with L · W, no state of a token is kept, and the
sums are those of the recurrence itself: nothing is divided by a decay, and no exponent is above 0. On a GPU one kernel
each way does the same (triton_scan.py).
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

BLOCK = 2**18  # elements of a block: its three tensors then lie in a core's cache
ROWS = 2**15  # elements of one token's states: rows of a batch go through together up to here


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None = None, keep: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h_t = keep_t · exp(dt_t · a) · h_{t−1} + dt_t · x_t · b_t, y_t = Σ_S c_t · h_t → (y [B, L, W], last h [B, S, W]).

    x, dt: [B, L, W]; a: [S, W], all below 0; b, c: [B, L, S]; past: [B, S, W], None for zeros; keep: [B, L], 0 where
    what came before is forgotten and 1 elsewhere, None for 1. dt = 0 leaves h as it is.
    """
    if x.shape[1] == 1:
        return _one_token(x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], past, keep)
    train = torch.is_grad_enabled()
    if train or torch.compiler.is_compiling():
        y, last, _ = cast(Any, _scan)(x, dt, a, b, c, past, keep, train)
    else:  # calling the operator imports the compiler, which takes a second
        with torch.autocast(x.device.type, enabled=False):
            y, last, _ = _run(x, dt, a, b, c, past, keep, train)
    return y, last


def _one_token(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None, keep: Tensor | None
) -> tuple[Tensor, Tensor]:
    h = b[..., None] * (dt * x)[:, None]
    if past is not None:
        decay = (dt[:, None] * a).exp()
        h = h + (decay if keep is None else decay * keep[..., None]) * past
    return (c[:, None] @ h), h


def _block_length(x: Tensor, a: Tensor) -> tuple[int, int]:
    """(tokens, rows) that go through together."""
    rows = min(len(x), max(1, ROWS // a.numel()))
    return min(x.shape[1], max(8, min(64, BLOCK // (rows * a.numel())))), rows


def _triton(x: Tensor) -> Any:
    """The kernels for a GPU, where there is one and triton with it; a token is a launch of several otherwise."""
    if not x.is_cuda:
        return None
    try:
        from . import triton_scan
    except ImportError:
        return None
    return triton_scan


class _Block:
    """The decays [T, B, S, W] and states [T + 1, B, S, W] of some tokens, the state before them first."""

    def __init__(self, inputs: Tensor, dt: Tensor, a: Tensor, b: Tensor, keep: Tensor | None, before: Tensor) -> None:
        self.decays = (dt[:, :, None] * a).exp_()
        if keep is not None:
            self.decays *= keep[..., None, None]
        self.states = before.new_empty(len(dt) + 1, *before.shape)
        self.states[0] = before
        torch.mul(inputs[:, :, None], b[..., None], out=self.states[1:])
        states = self.states.unbind(0)
        for h, decay, last in zip(states[1:], self.decays.unbind(0), states, strict=False):
            h.addcmul_(decay, last)


def _parts(L: int, T: int, rows: slice, *tensors: Tensor | None) -> list[tuple[slice, list[Any]]]:
    """Blocks of time, in order: (tokens, each tensor's part with time first)."""
    times = [slice(start, min(start + T, L)) for start in range(0, L, T)]
    return [(t, [None if x is None else x[rows, t].transpose(0, 1) for x in tensors]) for t in times]


def _run(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None, keep: Tensor | None, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    (B, L, W), S = x.shape, len(a)
    T, together = _block_length(x, a)
    kernels = _triton(x)
    if kernels is not None:
        return kernels.run(x, dt, a, b, c, past, keep, T, train)
    y, last = x.new_empty(B, L, W), x.new_zeros(B, S, W) if past is None else past.clone()
    between = x.new_empty(-(-L // T) if train else 0, B, S, W)
    for row in range(0, B, together):
        rows = slice(row, row + together)
        for i, (t, (dts, bs, cs, keeps)) in enumerate(_parts(L, T, rows, dt, b, c, keep)):
            if train:
                between[i, rows] = last[rows]
            inputs = (dt[rows, t] * x[rows, t]).transpose(0, 1)
            states = _Block(inputs, dts, a, bs, keeps, last[rows]).states
            y[rows, t] = torch.matmul(cs[:, :, None], states[1:])[:, :, 0].transpose(0, 1)
            last[rows] = states[-1]
    return y, last, between


def _run_back(
    d_y: Tensor,
    d_last: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    keep: Tensor | None,
    between: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, dt, a, b, c and past. d_h at t is c_t · d_y_t + decay_{t+1} · d_h_{t+1}."""
    B, L = x.shape[:2]
    T, together = _block_length(x, a)
    kernels = _triton(x)
    if kernels is not None:
        return kernels.run_back(d_y, d_last, x, dt, a, b, c, keep, between, T)
    d_x, d_dt, d_b, d_c = (like.new_empty(like.shape) for like in (x, dt, b, c))
    d_a, carry = torch.zeros_like(a), d_last.clone()
    for row in range(0, B, together):
        rows = slice(row, row + together)
        parts = _parts(L, T, rows, x, dt, b, c, keep, d_y, d_x, d_dt, d_b, d_c)
        for i, (_, (xs, dts, bs, cs, keeps, d_ys, d_xs, d_dts, d_bs, d_cs)) in reversed(list(enumerate(parts))):
            inputs = dts * xs
            block = _Block(inputs, dts, a, bs, keeps, between[i, rows])
            d_cs.copy_((block.states[1:] @ d_ys[..., None])[..., 0])
            d_h = cs[..., None] * d_ys[:, :, None]
            d_h[-1] += carry[rows]
            d_states, decays = d_h.unbind(0), block.decays.unbind(0)
            for t in range(len(dts) - 2, -1, -1):
                d_states[t].addcmul_(decays[t + 1], d_states[t + 1])
            carry[rows] = decays[0] * d_states[0]
            d_inputs = (bs[:, :, None] @ d_h)[:, :, 0]
            d_bs.copy_((d_h @ inputs[..., None])[..., 0])
            d_exponent = d_h.mul_(block.states[:-1]).mul_(block.decays)  # of dt · a
            d_xs.copy_(d_inputs * dts)
            d_dts.copy_((d_exponent * a).sum(2).addcmul_(d_inputs, xs))
            d_a += d_exponent.mul_(dts[:, :, None]).sum((0, 1))
    return d_x, d_dt, d_a, d_b, d_c, carry


# Operators of torch, so that a compiler takes the loops as they are and does not unroll them.


@torch.library.custom_op("sublayer::selective_scan", mutates_args=())
def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Tensor | None, keep: Tensor | None, train: bool
) -> tuple[Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        return _run(x, dt, a, b, c, past, keep, train)


@torch.library.custom_op("sublayer::selective_scan_backward", mutates_args=())
def _scan_back(
    d_y: Tensor,
    d_last: Tensor,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    keep: Tensor | None,
    between: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    with torch.autocast(x.device.type, enabled=False):
        return _run_back(d_y, d_last, x, dt, a, b, c, keep, between)


@cast(Any, _scan).register_fake
def _(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, past: Any, keep: Any, train: bool) -> Any:
    T, _ = _block_length(x, a)
    blocks = -(-x.shape[1] // T) if train else 0
    return x.new_empty(x.shape), x.new_empty(len(x), *a.shape), x.new_empty(blocks, len(x), *a.shape)


@cast(Any, _scan_back).register_fake
def _(
    d_y: Tensor, d_last: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Any, between: Any
) -> Any:
    return tuple(like.new_empty(like.shape) for like in (x, dt, a, b, c, d_last))


def _keep_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
    x, dt, a, b, c, past, keep, _ = inputs
    ctx.has_past = past is not None
    ctx.save_for_backward(x, dt, a, b, c, keep, output[2])


def _backward(ctx: Any, d_y: Tensor, d_last: Tensor, _: Tensor) -> Any:
    d_x, d_dt, d_a, d_b, d_c, d_past = cast(Any, _scan_back)(d_y, d_last, *ctx.saved_tensors)
    return d_x, d_dt, d_a, d_b, d_c, d_past if ctx.has_past else None, None, None


cast(Any, _scan).register_autograd(_backward, setup_context=_keep_for_backward)
