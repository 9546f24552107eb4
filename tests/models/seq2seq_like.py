"""Bahdanau's shape (arXiv 1409.0473): an LSTM that attends, inside its recurrence, to what another LSTM has read.

`both` [B, 2D] is an LSTM's hidden vector beside its cell's.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sublayer.nn.embed import Embed, EmbedOp
from sublayer.nn.initialise import Init
from sublayer.nn.mask import Mask
from sublayer.nn.op import Context, Op, Part, scoped
from sublayer.nn.sublayer import Block, Model, Sublayer, Trunk
from sublayer.state import PerMemory, PerSlot, State
from sublayer.step import Shared, Step


def lstm(gates: nn.Linear, both: Tensor, *x: Tensor) -> Tensor:
    keep, take, show, new = gates(torch.cat([*x, both.chunk(2, -1)[0]], -1)).chunk(4, -1)
    cell = keep.sigmoid() * both.chunk(2, -1)[1] + take.sigmoid() * new.tanh()
    return torch.cat([show.sigmoid() * cell.tanh(), cell], -1)


def unroll(move: Callable[[int, Tensor], Tensor], both: Tensor, starts: Tensor, step: Step) -> Tensor:
    """[B, L, 2D]: every state. Later documents begin at starts [B, L, 2D]; padding leaves the state as it is."""
    states, another = [], (step.shared or Shared()).starts
    for i in range(starts.shape[1]):
        both = both if another is None else torch.where(another[:, i, None], starts[:, i], both)
        new = move(i, both)
        both = new if step.segment is None else torch.where(step.segment[:, i, None] != 0, new, both)
        states.append(both)
    return torch.stack(states, 1)


class PlainReader(Embed):
    """A front end that reads. It leaves the last state of each document, [B, documents, 2D], in Step.condition."""

    def build(self, dim: int, context: Context) -> "PlainReaderOp":
        return PlainReaderOp(self, dim, context)


class PlainReaderOp(EmbedOp):
    def __init__(self, spec: PlainReader, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        self.gates = nn.Linear(2 * dim, 4 * dim)

    def forward(self, ids: Tensor, step: Step) -> tuple[Tensor, Step]:
        x, step = super().forward(ids, step)
        zeros = torch.zeros_like(torch.cat([x, x], -1))
        states = unroll(lambda i, both: lstm(self.gates, both, x[:, i]), zeros[:, 0], zeros, step)
        document = (step.shared or Shared()).document
        document = torch.ones_like(ids) if document is None else document
        ends = (document[:, None] == torch.arange(1, int(document.max()) + 1)[:, None]) * torch.arange(ids.shape[1])
        return states.chunk(2, -1)[0], step.replace(condition=states[_rows(ids), ends.amax(-1)])


class PlainWriter(Part):
    def build(self, dim: int, context: Context) -> "PlainWriterOp":
        return PlainWriterOp(dim)


class Additive(Op):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.energy = nn.Linear(dim, dim, False), nn.Linear(dim, dim, False), nn.Linear(dim, 1)

    def state(self) -> dict[str, PerMemory]:
        return dict.fromkeys(("key", "value"), PerMemory((self.key.in_features,)))

    def remember(self, step: Step, state: State | None) -> list[Tensor]:
        if step.memory is None and state is not None:
            return [state[name].read(step) for name in self.state()]
        kept = [self.key(step.memory), step.memory]
        for name, value in zip(self.state(), kept if state is not None else [], strict=False):
            state[name].write(value, step)  # pyright: ignore[reportOptionalSubscript]
        return kept

    def forward(self, both: Tensor, key: Tensor, value: Tensor, seen: Tensor) -> Tensor:
        energy = self.energy(torch.tanh(self.query(both.chunk(2, -1)[0])[:, None] + key))[..., 0]  # [B, M]
        return (energy.masked_fill(~seen, torch.finfo(energy.dtype).min).softmax(-1)[:, None] @ value)[:, 0]


class PlainWriterOp(Op):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim, self.gates, self.attention = dim, nn.Linear(3 * dim, 4 * dim), Additive(dim)

    def state(self) -> dict[str, PerSlot]:
        return {"both": PerSlot((2 * self.dim,))}

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        shared = step.shared or Shared()
        memory = self.attention.remember(step, scoped(state, "attention"))
        seen = Mask(layout=shared.cross).materialise(x.shape[1], memory[0].shape[1], x.device)
        seen = torch.ones(len(x), 1, x.shape[1], 1, dtype=torch.bool) if seen is None else seen
        starts = x.new_zeros(len(x), x.shape[1], 2 * self.dim)
        both = starts[:, 0] if state is None else state["both"].read(step)
        if step.condition is not None:
            index = 0 if shared.document is None else (shared.document - 1).clamp(min=0)
            starts = starts + step.condition[_rows(x), index]
            empty = True if state is None or shared.place is None else state.length[shared.place.rows, None] == 0
            both = torch.where(torch.as_tensor(empty), step.condition[:, 0], both)
        states = unroll(
            lambda i, both: lstm(self.gates, both, x[:, i], self.attention(both, *memory, seen[:, 0, i])),
            both,
            starts,
            step,
        )
        if state is not None:
            state["both"].write(states[:, -1], step)
        return states[..., : self.dim]


def _rows(x: Tensor) -> Tensor:
    return torch.arange(len(x))[:, None]


def seq2seq_like(dim: int, vocab: int) -> Model:
    decoder = Trunk(Embed(vocab), (Block((Sublayer("mixer", PlainWriter(), skip=0.0),)),))
    return Model(dim, encoder=Trunk(PlainReader(vocab), ()), decoder=decoder, init=Init("fan_in"))


TINY = {"dim": 32, "vocab": 61}
EXEMPT = {"kernels": "its attention is additive and inside the recurrence, so no kernel of scaled products applies"}
