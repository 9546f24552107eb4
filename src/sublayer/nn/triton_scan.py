"""The selective scan in Triton, for a GPU: one program a row of the batch and some channels, token after token.

The recurrence and its gradients are those of selective_scan.py, whose letters these are: B batch, L length, W channels,
S states of a channel, T tokens of a block. The states of a program's channels stay in registers. Forward keeps those
between blocks; backward makes the states of a block again, into memory as large as one block, and goes through it the
other way. What all channels add to (the gradients of b and c) is summed over programs afterwards: no atomic sums, so
the same inputs give the same bits. Without a GPU it runs in Triton's interpreter (TRITON_INTERPRET=1, set before triton
is imported).
"""

# Triton's language is untyped, and reads its kernels as source: names of arguments stand for pointers and constants.
# pyright: basic, reportCallIssue=false, reportOperatorIssue=false, reportIndexIssue=false, reportArgumentType=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 1024  # states of a program: eight a thread


def run(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    past: Tensor | None,
    keep: Tensor | None,
    T: int,
    train: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [B, L, W], last h [B, S, W], h before each block of T tokens, of which there are none unless train)."""
    x, dt, a, b, c = (tensor.contiguous() for tensor in (x, dt, a, b, c))
    (B, L, W), S = x.shape, len(a)
    y, last = torch.empty_like(x), x.new_empty(B, S, W)
    between = x.new_empty(-(-L // T) if train else 0, B, S, W)
    grid, sizes = _sizes(B, L, W, S, T)
    before = last if past is None else past.contiguous()
    keeps = x if keep is None else keep.contiguous()
    _forward[grid](
        x,
        dt,
        a,
        b,
        c,
        before,
        keeps,
        y,
        last,
        between,
        **sizes,
        PAST=past is not None,
        KEEP=keep is not None,
        TRAIN=train,
    )
    return y, last, between


def run_back(
    d_y: Tensor, d_last: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, keep: Tensor | None,
    between: Tensor, T: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, dt, a, b, c and past."""
    d_y, d_last, x, dt, a, b, c = (tensor.contiguous() for tensor in (d_y, d_last, x, dt, a, b, c))
    (B, L, W), S = x.shape, len(a)
    grid, sizes = _sizes(B, L, W, S, T)
    d_x, d_dt = torch.empty_like(x), torch.empty_like(dt)
    d_b, d_c = (x.new_empty(grid[1], B, L, S) for _ in range(2))
    d_a, d_past, states = x.new_empty(B, S, W), x.new_empty(B, S, W), x.new_empty(B, T, S, W)
    keeps = x if keep is None else keep.contiguous()
    _backward[grid](
        d_y, d_last, x, dt, a, b, c, keeps, between, states, d_x, d_dt, d_a, d_b, d_c, d_past, **sizes,
        BLOCKS=len(between), KEEP=keep is not None,
    )  # fmt: skip
    return d_x, d_dt, d_a.sum(0), d_b.sum(0), d_c.sum(0), d_past


def _sizes(B: int, L: int, W: int, S: int, T: int) -> tuple[tuple[int, int], dict[str, Any]]:
    """(the grid of programs, the kernels' sizes). Lengths are numbers, not constants: they compile nothing anew."""
    states = triton.next_power_of_2(S)
    channels = max(16, min(triton.next_power_of_2(W), ELEMENTS // states))
    return (B, triton.cdiv(W, channels)), {"B": B, "L": L, "W": W, "S": S, "T": T, "STATES": states, "WIDE": channels}


@triton.jit
def _forward(
    x, dt, a, b, c, past, keep, y, last, between,
    B, L, W, S, T,
    STATES: tl.constexpr, WIDE: tl.constexpr, PAST: tl.constexpr, KEEP: tl.constexpr, TRAIN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s, w = tl.arange(0, STATES), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_state, is_channel = s < S, w < W
    inside, cell = is_state[:, None] & is_channel[None, :], s[:, None] * W + w[None, :]
    rate = tl.load(a + cell, inside, 0.0)
    h = tl.zeros_like(rate)
    if PAST:
        h = tl.load(past + row * S * W + cell, inside, 0.0)
    for t in range(L):
        if TRAIN and t % T == 0:
            tl.store(between + ((t // T) * B + row) * S * W + cell, h, inside)
        place = row * L + t
        step = tl.load(dt + place * W + w, is_channel, 0.0)
        enters = tl.load(b + place * S + s, is_state, 0.0)
        leaves = tl.load(c + place * S + s, is_state, 0.0)
        decay = tl.exp(step[None, :] * rate)
        if KEEP:
            decay = decay * tl.load(keep + place)
        h = decay * h + (step * tl.load(x + place * W + w, is_channel, 0.0))[None, :] * enters[:, None]
        tl.store(y + place * W + w, tl.sum(h * leaves[:, None], 0), is_channel)
    tl.store(last + row * S * W + cell, h, inside)


@triton.jit
def _backward(
    d_y, d_last, x, dt, a, b, c, keep, between, states, d_x, d_dt, d_a, d_b, d_c, d_past,
    B, L, W, S, T, BLOCKS,
    STATES: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    s, w = tl.arange(0, STATES), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    is_state, is_channel = s < S, w < W
    inside, cell = is_state[:, None] & is_channel[None, :], s[:, None] * W + w[None, :]
    sums = (tl.program_id(1) * B + row) * L  # where this program's gradients of b and c begin
    rate = tl.load(a + cell, inside, 0.0)
    carry = tl.load(d_last + row * S * W + cell, inside, 0.0)  # the gradient of h that later tokens hand back
    d_rate = tl.zeros_like(rate)
    for turn in range(BLOCKS):
        start = (BLOCKS - 1 - turn) * T
        end = tl.minimum(start + T, L)
        h = tl.load(between + ((BLOCKS - 1 - turn) * B + row) * S * W + cell, inside, 0.0)
        for t in range(start, end):  # the state before each token of the block
            tl.store(states + (row * T + t - start) * S * W + cell, h, inside)
            place = row * L + t
            step = tl.load(dt + place * W + w, is_channel, 0.0)
            decay = tl.exp(step[None, :] * rate)
            if KEEP:
                decay = decay * tl.load(keep + place)
            inputs = step * tl.load(x + place * W + w, is_channel, 0.0)
            h = decay * h + inputs[None, :] * tl.load(b + place * S + s, is_state, 0.0)[:, None]
        tl.debug_barrier()
        for back in range(end - start):
            t = end - 1 - back
            place = row * L + t
            step = tl.load(dt + place * W + w, is_channel, 0.0)
            value = tl.load(x + place * W + w, is_channel, 0.0)
            enters = tl.load(b + place * S + s, is_state, 0.0)
            leaves = tl.load(c + place * S + s, is_state, 0.0)
            asked = tl.load(d_y + place * W + w, is_channel, 0.0)
            decay = tl.exp(step[None, :] * rate)
            if KEEP:
                decay = decay * tl.load(keep + place)
            before = tl.load(states + (row * T + t - start) * S * W + cell, inside, 0.0)
            h = decay * before + (step * value)[None, :] * enters[:, None]
            d_h = carry + leaves[:, None] * asked[None, :]
            tl.store(d_c + (sums + t) * S + s, tl.sum(h * asked[None, :], 1), is_state)
            tl.store(d_b + (sums + t) * S + s, tl.sum(d_h * (step * value)[None, :], 1), is_state)
            d_inputs = tl.sum(d_h * enters[:, None], 0)
            d_exponent = d_h * before * decay  # of dt · a
            d_rate += d_exponent * step[None, :]
            tl.store(d_x + place * W + w, d_inputs * step, is_channel)
            tl.store(d_dt + place * W + w, tl.sum(d_exponent * rate, 0) + d_inputs * value, is_channel)
            carry = decay * d_h
        tl.debug_barrier()  # the next block's states go where these were
    tl.store(d_a + row * S * W + cell, d_rate, inside)
    tl.store(d_past + row * S * W + cell, carry, inside)
