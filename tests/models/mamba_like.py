"""Mamba's shape (arXiv 2312.00752): a selective state space after a short causal convolution, one token at a time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sublayer.nn.embed import Embed
from sublayer.nn.initialise import Init, normal
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.scan import Carry, keep, resume, scan
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from sublayer.state import PerSlot, State
from sublayer.step import Step


class PlainScan(Part):
    inner: int
    size: int
    kernel: int

    def build(self, dim: int, context: Context) -> PlainScanOp:
        return PlainScanOp(self, dim)


class PlainScanOp(Op):
    def __init__(self, spec: PlainScan, dim: int) -> None:
        super().__init__()
        self.leaves = {"conv": PerSlot((spec.kernel - 1, spec.inner)), "scan": PerSlot((spec.inner, spec.size))}
        self.up, self.down = nn.Linear(dim, 2 * spec.inner), nn.Linear(spec.inner, dim)
        self.select, self.rate = nn.Linear(spec.inner, 2 * spec.size), nn.Linear(spec.inner, spec.inner)
        self.taps, self.decay = nn.Parameter(torch.empty(spec.kernel, spec.inner)), nn.Parameter(torch.empty(spec.size))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.taps, len(self.taps) ** -0.5, generator)
        self.decay.copy_(torch.arange(1, len(self.decay) + 1).log())

    def state(self) -> dict[str, PerSlot]:
        return self.leaves

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        inputs, gate = self.up(x).chunk(2, -1)

        def move(i: int, carry: Carry) -> tuple[Tensor, Carry]:
            conv, held = carry
            taken = torch.cat([conv, inputs[:, i : i + 1]], 1)  # [B, kernel, inner]
            u = F.silu((taken * self.taps).sum(1))
            rate, (b, c) = F.softplus(self.rate(u))[..., None], self.select(u)[:, None].chunk(2, -1)
            held = torch.exp(-rate * self.decay.exp()) * held + rate * b * u[..., None]  # [B, inner, size]
            return (held * c).sum(-1) + u, (taken[:, 1:], held)

        y, carry = scan(move, resume(self.leaves, x, step, state), x.shape[1], step)
        keep(self.leaves, carry, step, state)
        return self.down(y * F.silu(gate))


def mamba_like(dim: int, layers: int, inner: int, size: int, kernel: int, vocab: int) -> Model:
    block = Block((pre_norm("mixer", PlainScan(inner, size, kernel), RMSNorm()),))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), RMSNorm()), tied=True)


TINY = {"dim": 32, "layers": 2, "inner": 24, "size": 4, "kernel": 4, "vocab": 61}
EXEMPT = {"kernels": "it has no attention"}
