"""Mamba (arXiv 2312.00752) and Mamba-2 (arXiv 2405.21060): mixers that scan a state whose decay the inputs choose.

B batch, L new tokens, D model width, W inner channels, S states of a channel, H heads, G groups.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..state import Leaf, PerSlot, State
from ..step import Shared, Step
from .convolution import ShortConvolution, ShortConvolutionOp
from .feed_forward import Activation
from .initialise import Init, uniform
from .norm import RMSNorm
from .op import Context, Growth, Op, Part, scoped
from .projection import Projection
from .selective_scan import selective_scan
from .ssd import parted, ssd

# What new step sizes lie between, before the inputs move them; and the least (the authors' code).
LEAST, MOST, FLOOR = 1e-3, 1e-1, 1e-4


def step_rank(dim: int) -> int:
    """Numbers from which step sizes are made, where nobody says how many: D / 16, rounded up."""
    return -(-dim // 16)


class Mamba(Part):
    """out(scan(activation(conv(up(x)))) · silu(gate(x))): each of W channels has S states with decays of their own."""

    inner: int
    """W, channels of the scan; the authors take 2 D."""
    state_size: int = 16
    """S, states of each channel."""
    rank: int | None = None
    """Numbers from which the W step sizes are made; None: `step_rank`."""
    kernel: int = 4
    """Inputs that the convolution before the scan sees."""
    bias: bool = False
    """Whether up, gate and out have biases."""
    conv_bias: bool = True
    """Whether the convolution has one."""
    activation: Activation = "silu"
    """After the convolution."""
    norm: Part | None = None
    """On the low-rank step sizes and on the maps into and out of the state, each (Jamba)."""

    def check(self) -> None:
        self.require(self.inner > 0 and self.state_size > 0, "inner and state_size must be above 0")
        self.require(self.rank is None or self.rank > 0, f"rank must be above 0, got {self.rank}")
        self.convolution.check()

    @property
    def convolution(self) -> ShortConvolution:
        return ShortConvolution(self.kernel, self.conv_bias, self.activation)

    @property
    def growth(self) -> Growth:
        return Growth("n d s", "n", "1")

    def build(self, dim: int, context: Context) -> MambaOp:
        return MambaOp(self, dim, context)


class MambaOp(Op):
    """[B, L, D] → [B, L, D]. The scan and its state are fp32 at least."""

    residual_outputs = ("out",)

    def __init__(self, spec: Mamba, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.rank = spec.rank or step_rank(dim)
        S = spec.state_size
        self.up = Projection(dim, spec.inner, spec.bias)
        self.gate = Projection(dim, spec.inner, spec.bias)
        self.conv = ShortConvolutionOp(spec.convolution, spec.inner)
        self.select = Projection(spec.inner, self.rank + 2 * S, bias=False)
        self.dt_norm, self.b_norm, self.c_norm = (
            spec.norm.build(size, context) if spec.norm else None for size in (self.rank, S, S)
        )
        self.dt = _StepSizes(self.rank, spec.inner, bias=False)
        self.dt_bias = nn.Parameter(torch.empty(spec.inner))
        self.A_log = nn.Parameter(torch.empty(spec.inner, S))
        self.D = nn.Parameter(torch.empty(spec.inner))
        self.out = Projection(spec.inner, dim, spec.bias)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """Decays of 1 to S in each channel (S4D-Real), step sizes spread evenly in their logarithm."""
        self.A_log.copy_(torch.arange(1.0, self.spec.state_size + 1).log())
        self.D.fill_(1)
        self.dt_bias.copy_(_biases(self.dt_bias.shape, generator))

    def state(self) -> dict[str, Leaf]:
        return {"scan": PerSlot((self.spec.state_size, len(self.D)), _wider(self.D.dtype))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        inputs = self.conv(self.up(x), step, scoped(state, "conv"))
        low, b, c = self.select(inputs).split((self.rank, self.spec.state_size, self.spec.state_size), -1)
        if self.dt_norm is not None and self.b_norm is not None and self.c_norm is not None:
            low, b, c = self.dt_norm(low), self.b_norm(b), self.c_norm(c)
        dt = _step_sizes(self.dt(low), self.dt_bias, step)
        a, starts = -_wide(self.A_log).exp().t().contiguous(), (step.shared or Shared()).starts
        inputs, b, c = _wide(inputs), _wide(b), _wide(c)
        past = None if state is None else state["scan"].read(step).to(dt.dtype)
        keep = None if starts is None else (~starts).to(dt.dtype)
        y, last = selective_scan(inputs, dt, a, b, c, past, keep)
        if state is not None:
            state["scan"].write(last, step)
        y = y + _wide(self.D) * inputs
        return self.out(y.to(x.dtype) * F.silu(self.gate(x)))


class Mamba2(Part):
    """out(norm(ssd(activation(conv(up(x)))) · silu(gate(x)))): H heads, each with one decay and S states a channel.

    Groups of heads share the maps into and out of the state, as grouped queries share keys.
    """

    heads: int
    """H."""
    head_size: int = 64
    """Channels of a head; the authors take H so that H · head_size = 2 D."""
    state_size: int = 128
    """S, states of each channel."""
    groups: int = 1
    """G; heads is a multiple of it."""
    kernel: int = 4
    """Inputs that the convolution before the scan sees."""
    bias: bool = False
    """Whether up, gate, dt and out have biases."""
    conv_bias: bool = True
    """Whether the convolution has one."""
    activation: Activation = "silu"
    """After the convolution."""
    norm: Part = RMSNorm(1e-5)
    """Before the output projection."""

    def check(self) -> None:
        sizes = (self.heads, self.head_size, self.state_size, self.groups)
        self.require(min(sizes) > 0, "heads, head_size, state_size and groups must be above 0")
        self.require(
            self.heads % self.groups == 0,
            f"heads={self.heads} is not a multiple of groups={self.groups}: a group serves equally many heads",
        )
        self.convolution.check()

    @property
    def convolution(self) -> ShortConvolution:
        return ShortConvolution(self.kernel, self.conv_bias, self.activation)

    @property
    def growth(self) -> Growth:
        return Growth("n d s", "n/64", "1")

    def build(self, dim: int, context: Context) -> Mamba2Op:
        return Mamba2Op(self, dim, context)


class Mamba2Op(Op):
    """[B, L, D] → [B, L, D]. The scan and its state are fp32 at least."""

    residual_outputs = ("out",)

    def __init__(self, spec: Mamba2, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        inner = spec.heads * spec.head_size
        mixed = inner + 2 * spec.groups * spec.state_size
        self.gate = Projection(dim, inner, spec.bias)
        self.up = Projection(dim, mixed, spec.bias)
        self.conv = ShortConvolutionOp(spec.convolution, mixed)
        self.dt = Projection(dim, spec.heads, spec.bias)
        self.dt_bias = nn.Parameter(torch.empty(spec.heads))
        self.A_log = nn.Parameter(torch.empty(spec.heads))
        self.D = nn.Parameter(torch.empty(spec.heads))
        self.norm = spec.norm.build(inner, context)
        self.out = Projection(inner, dim, spec.bias)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        """Decays between 1 and 16, step sizes spread evenly in their logarithm."""
        self.A_log.copy_((1 + 15 * torch.rand(self.A_log.shape, generator=generator)).log())
        self.D.fill_(1)
        self.dt_bias.copy_(_biases(self.dt_bias.shape, generator))

    def state(self) -> dict[str, Leaf]:
        spec = self.spec
        channels = spec.heads * spec.head_size // spec.groups
        return {"scan": PerSlot((spec.groups, spec.state_size, channels), _wider(self.D.dtype))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        spec = self.spec
        maps = spec.groups * spec.state_size
        mixed = _wide(self.conv(self.up(x), step, scoped(state, "conv")))
        inputs, b, c = torch.split(mixed, [spec.heads * spec.head_size, maps, maps], -1)
        inputs = parted(inputs, 2, spec.heads, spec.head_size)
        b, c = (parted(map_, 2, spec.groups, spec.state_size) for map_ in (b, c))
        dt = _step_sizes(self.dt(x), self.dt_bias, step)
        past = None if state is None else state["scan"].read(step).to(dt.dtype)
        y, last = ssd(inputs, dt, -_wide(self.A_log).exp(), b, c, past, (step.shared or Shared()).starts)
        if state is not None:
            state["scan"].write(last, step)
        y = (y + _wide(self.D)[:, None] * inputs).flatten(-2)
        return self.out(self.norm((y * F.silu(_wide(self.gate(x)))).to(x.dtype)))


class _StepSizes(Projection):
    def initialise(self, generator: torch.Generator, init: Init) -> None:
        uniform(self.weight, self.in_features**-0.5, generator)


def _biases(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """softplus of them is spread evenly in its logarithm between LEAST and MOST."""
    low, high = math.log(LEAST), math.log(MOST)
    dt = (low + (high - low) * torch.rand(shape, generator=generator)).exp().clamp(min=FLOOR)
    return dt + (-torch.expm1(-dt)).log()


def _step_sizes(raw: Tensor, bias: Tensor, step: Step) -> Tensor:
    """[B, L, …]: how far each token moves the state; padding does not."""
    dt = F.softplus(_wide(raw) + _wide(bias))
    return dt if step.segment is None else dt.masked_fill((step.segment == 0)[..., None], 0)


def _wider(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    """In fp32 at least."""
    return x.to(_wider(x.dtype))
