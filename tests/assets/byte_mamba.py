"""A byte classifier that scans both ways (typeseg, Apache-2.0): from Flax's names in an npz to a folder of Sublayer's.

Its mixer is Mamba's but for four things, which are an op of its own here: the convolution sees one byte back and two
ahead, the maps into and out of the state have biases, step sizes are never below 1e-4, and the text is scanned in both
directions with the same parameters, whose sum passes the gate.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sublayer.names import TRANSPOSED, Change, Row, stacked
from sublayer.nn.embed import Embed
from sublayer.nn.head import Classifier
from sublayer.nn.mamba import Mamba, MambaOp
from sublayer.nn.norm import LayerNorm
from sublayer.nn.op import Context
from sublayer.nn.projection import Projection
from sublayer.nn.selective_scan import selective_scan
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from sublayer.state import State
from sublayer.step import Step
from tests import assets
from tests.assets.folder import write

LEAST = 1e-4
"""Of the step sizes."""
AHEAD = 2
"""Inputs behind its own that the convolution sees."""


class BothWays(Mamba):
    """Mamba over whole texts: what follows a byte counts as much as what stands before it."""

    def build(self, dim: int, context: Context) -> "BothWaysOp":
        return BothWaysOp(self, dim, context)


class BothWaysOp(MambaOp):
    """[B, L, D] → [B, L, D], each row one text."""

    def __init__(self, spec: BothWays, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        self.select = Projection(spec.inner, self.rank + 2 * spec.state_size)

    def state(self) -> dict:
        return {}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        inputs = self.conv(F.pad(self.up(x), (0, 0, 0, AHEAD)), Step())[:, AHEAD:]
        low, b, c = self.select(inputs).split((self.rank, self.spec.state_size, self.spec.state_size), -1)
        dt = F.softplus(self.dt(low) + self.dt_bias) + LEAST
        a = -self.A_log.exp().t().contiguous()
        there, _ = selective_scan(inputs, dt, a, b, c)
        back, _ = selective_scan(inputs.flip(1), dt.flip(1), a, b.flip(1), c.flip(1))
        y = there + back.flip(1) + 2 * self.D * inputs
        return self.out(y * F.silu(self.gate(x)))


NORM = LayerNorm(1e-6)
BLOCK = Block((pre_norm("mixer", BothWays(256, rank=16, bias=True), NORM),))
SPEC = Model(256, encoder=Trunk(Embed(130), repeat(BLOCK, 6), NORM), head=Classifier(35))


THEIRS, OURS = "CheckpointMambaBlock1D_{}__", "encoder.blocks.{}.mixer."
REVERSED = Change(lambda ts: [t.permute(2, 1, 0) for t in ts], lambda ts: [t.permute(2, 1, 0) for t in ts])
NAMES = [
    Row("Embed_0__embedding", "encoder.embed.tokens.weight"),
    Row(f"{THEIRS}LayerNorm_0__scale", f"{OURS}pre.weight"),
    Row(f"{THEIRS}LayerNorm_0__bias", f"{OURS}pre.bias"),
    Row(f"{THEIRS}Dense_0__kernel", (f"{OURS}op.up.weight", f"{OURS}op.gate.weight"), stacked(2, transposed=True)),
    Row(f"{THEIRS}Dense_0__bias", (f"{OURS}op.up.bias", f"{OURS}op.gate.bias"), stacked(2)),
    Row(f"{THEIRS}Conv_0__kernel", f"{OURS}op.conv.weight", REVERSED),
    Row(f"{THEIRS}Conv_0__bias", f"{OURS}op.conv.bias"),
    Row(f"{THEIRS}Dense_1__kernel", f"{OURS}op.select.weight", TRANSPOSED),
    Row(f"{THEIRS}Dense_1__bias", f"{OURS}op.select.bias"),
    Row(f"{THEIRS}Dense_2__kernel", f"{OURS}op.dt.weight", TRANSPOSED),
    Row(f"{THEIRS}Dense_2__bias", f"{OURS}op.dt_bias"),
    Row(f"{THEIRS}A_log", f"{OURS}op.A_log"),
    Row(f"{THEIRS}D", f"{OURS}op.D"),
    Row(f"{THEIRS}Dense_3__kernel", f"{OURS}op.out.weight", TRANSPOSED),
    Row(f"{THEIRS}Dense_3__bias", f"{OURS}op.out.bias"),
    Row("LayerNorm_0__scale", "encoder.norm.weight"),
    Row("LayerNorm_0__bias", "encoder.norm.bias"),
    Row("Dense_0__kernel", "head.out.weight", TRANSPOSED),
    Row("Dense_0__bias", "head.out.bias"),
]


def convert(folder: Path) -> Path:
    """Writes spec.json and model.safetensors; the classifier answers for each byte of an ASCII text."""
    stored = np.load(data() / "mamba_al.npz")
    return write(folder, SPEC, NAMES, {name: torch.from_numpy(array) for name, array in stored.items()})


def data() -> Path:
    """Where the package keeps weights, their ONNX graph and the names of the labels."""
    return assets.pypi("typeseg", "0.2.7") / "typeseg" / "data"
