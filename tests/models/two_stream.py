"""Evoformer's shape (Jumper et al. 2021): aligned rows [B, S, L, D] and pairs [B, L, L, P] that read each other.

The stream is a dict. Its first leaf, the pairs, tells the trunk batch and length.
"""

from typing import ClassVar

import torch
from torch import Tensor, nn

from sublayer.nn.attend import Kernel, attend
from sublayer.nn.norm import RMSNorm
from sublayer.nn.op import Context, Part
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from sublayer.state import State
from sublayer.step import Step

Streams = dict[str, Tensor]


class Lift(nn.Module):
    def __init__(self, dim: int, pair: int, vocab: int) -> None:
        super().__init__()
        self.rows, self.left, self.right = (nn.Embedding(vocab, n) for n in (dim, pair, pair))

    def forward(self, inputs: Streams, step: Step) -> tuple[Streams, Step]:
        first = inputs["rows"][:, 0]
        return {
            "pair": self.left(first)[:, :, None] + self.right(first)[:, None],
            "rows": self.rows(inputs["rows"]),
        }, step


class Norms(nn.ModuleDict):
    def __init__(self, dim: int, pair: int, _: int) -> None:
        super().__init__({"pair": RMSNorm().build(pair, Context()), "rows": RMSNorm().build(dim, Context())})

    def forward(self, x: Streams, step: Step) -> Streams:
        return {name: norm(x[name], step) for name, norm in self.items()}


class RowAttention(nn.Module):
    """Reads both, returns the rows: each attends along itself, with the pairs as a bias."""

    kernel: Kernel = "auto"

    def __init__(self, dim: int, pair: int, heads: int) -> None:
        super().__init__()
        self.qkv, self.out, self.bias = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.Linear(pair, heads, bias=False)

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams:
        rows, bias = x["rows"].shape[1], self.bias(x["pair"]).permute(0, 3, 1, 2)
        q, k, v = self.qkv(x["rows"]).flatten(0, 1).unflatten(-1, (3, bias.shape[1], -1)).permute(2, 0, 3, 1, 4)
        y = attend(q, k, v, scale=q.shape[-1] ** -0.5, bias=bias.repeat_interleave(rows, 0), kernel=self.kernel)
        assert isinstance(y, Tensor)
        return {"rows": self.out(y.transpose(1, 2).flatten(2)).unflatten(0, (-1, rows))}


class Exchange(nn.Module):
    """Reads and returns both: pairs get the mean outer product of the rows, rows the mean of their pairs."""

    def __init__(self, dim: int, pair: int, rank: int) -> None:
        super().__init__()
        self.left, self.right, self.back = nn.Linear(dim, rank), nn.Linear(dim, rank), nn.Linear(pair, dim)
        self.outer = nn.Linear(rank**2, pair)

    def forward(self, x: Streams, step: Step, state: State | None = None) -> Streams:
        rows, pair = x["rows"], x["pair"]
        products = torch.einsum("bsic,bsjd->bijcd", self.left(rows), self.right(rows)) / rows.shape[1]
        return {"pair": self.outer(products.flatten(3)), "rows": self.back(pair.mean(2))[:, None].expand_as(rows)}


class Contacts(nn.Linear):
    def __init__(self, dim: int, pair: int, classes: int) -> None:
        super().__init__(pair, classes)

    def forward(self, x: Streams, step: Step, table: None = None) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return super().forward(x["pair"])


class OfStreams(Part):
    """One of the modules above: its name, P, and the one number more that it takes."""

    name: str
    pair: int
    number: int = 0
    modules: ClassVar = {module.__name__: module for module in (Lift, Norms, RowAttention, Exchange, Contacts)}

    def build(self, dim: int, context: Context) -> nn.Module:
        return self.modules[self.name](dim, self.pair, self.number)


def two_stream(dim: int, pair: int, layers: int, heads: int, vocab: int, classes: int) -> Model:
    norms, lift = OfStreams("Norms", pair), OfStreams("Lift", pair, vocab)
    attention, exchange = OfStreams("RowAttention", pair, heads), OfStreams("Exchange", pair, 4)
    block = Block((pre_norm("attn", attention, norms), pre_norm("mix", exchange, norms)))
    return Model(dim, encoder=Trunk(lift, repeat(block, layers), norms), head=OfStreams("Contacts", pair, classes))


TINY = {"dim": 32, "pair": 16, "layers": 2, "heads": 4, "vocab": 21, "classes": 5}
EXEMPT = {
    "incremental": "it writes no sequence",
    "packing": "a pair belongs to one alignment, so several in a row would need pairs between them",
    "padding": "alignments of one batch have one length here",
}
