"""Mamba's shape (arXiv 2312.00752): a selective state space after a short causal convolution, one token at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sublayer.nn.embed import Embed
from sublayer.nn.initialise import Init, normal
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Op, Part
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from sublayer.state import PerSlot, State
from sublayer.step import Shared, Step


class PlainScan(Part):
    inner: int
    size: int
    kernel: int

    def build(self, dim: int, context: Context) -> "PlainScanOp":
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
        conv, scan = (state[n].read(step) if state else x.new_zeros(len(x), *self.leaves[n].shape) for n in self.leaves)
        starts, outputs = (step.shared or Shared()).starts, []
        inputs, gate = self.up(x).chunk(2, -1)
        for i in range(x.shape[1]):
            if starts is not None:
                conv, scan = (kept.masked_fill(starts[:, i, None, None], 0) for kept in (conv, scan))
            taken = torch.cat([conv, inputs[:, i : i + 1]], 1)  # [B, kernel, inner]
            u = F.silu((taken * self.taps).sum(1))
            rate, (b, c) = F.softplus(self.rate(u))[..., None], self.select(u)[:, None].chunk(2, -1)
            grown = torch.exp(-rate * self.decay.exp()) * scan + rate * b * u[..., None]  # [B, inner, size]
            outputs.append((grown * c).sum(-1) + u)
            conv, scan = (_unless_padding(step, i, *kept) for kept in ((taken[:, 1:], conv), (grown, scan)))
        if state is not None:
            state["conv"].write(conv, step)
            state["scan"].write(scan, step)
        return self.down(torch.stack(outputs, 1) * F.silu(gate))


def _unless_padding(step: Step, i: int, new: Tensor, old: Tensor) -> Tensor:
    return new if step.segment is None else torch.where(step.segment[:, i, None, None] != 0, new, old)


def mamba_like(dim: int, layers: int, inner: int, size: int, kernel: int, vocab: int) -> Model:
    block = Block((pre_norm("mixer", PlainScan(inner, size, kernel), RMSNorm()),))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), RMSNorm()), tied=True)


TINY = {"dim": 32, "layers": 2, "inner": 24, "size": 4, "kernel": 4, "vocab": 61}
EXEMPT = {"kernels": "it has no attention"}
