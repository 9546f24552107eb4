"""Averages of weights: the moving one kept beside the model while it trains, and that of checkpoints on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, WeightsError, nearest
from ..nn.sublayer import ModelOp
from ..weights.load import Checkpoint, read_spec

COUNT = "#updates"  # beside the parameters' names, of which none holds a "#"


class Ema:
    """The exponential moving average of the parameters that train, in fp32 at least: average += (1 − d) (p − average).

    With `warm`, d is min(decay, (1 + t) / (10 + t)) after t updates, so that the average is not bound to the first
    values for 1 / (1 − decay) steps; without it, `decay` from the start. Source of the warm-up: num_updates of
    TensorFlow's ExponentialMovingAverage. Raises InputError for a decay that is not between 0 and 1.
    """

    def __init__(self, model: nn.Module, decay: float = 0.999, *, warm: bool = True) -> None:
        if not 0 < decay < 1:
            raise InputError(f"an average's decay is between 0 and 1, got {decay}")
        self.decay, self.warm, self.updates = decay, warm, 0
        self.parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.averages = {name: _wide(p) for name, p in self.parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Takes the parameters in as they are now; once after each step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warm else self.decay
        averages = list(self.averages.values())
        values = [p.to(a.dtype) for p, a in zip(self.parameters.values(), averages, strict=True)]
        cast(Any, torch)._foreach_lerp_(averages, values, 1 - decay)
        self.updates += 1

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Inside, the model has the averages for weights; then its own again, to the last bit.

        It takes as much more memory as the parameters do. What changes them inside is lost.
        """
        kept = {name: p.detach().clone() for name, p in self.parameters.items()}
        try:
            self._fill(self.averages)
            yield
        finally:
            self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: Mapping[str, Tensor]) -> None:
        for name, p in self.parameters.items():
            p.copy_(values[name])

    def state_tensors(self) -> dict[str, Tensor]:
        """The averages by the parameters' names, and the count of updates; not copied."""
        return {**self.averages, COUNT: torch.tensor(self.updates)}

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over, copied, what `state_tensors` gave for the same model; it then goes on to the last bit.

        Raises WeightsError, before anything changes, for a name, shape or dtype that is not this average's.
        """
        kept = {**self.averages, COUNT: torch.tensor(0)}
        odd = min(kept.keys() ^ tensors.keys(), default=None)
        if odd is not None:
            lacks = "is missing" if odd in kept else f"has no place{nearest(odd, kept)}"
            raise WeightsError(f"averaged weights: {odd!r} {lacks}")
        for name, own in kept.items():
            given = tensors[name]
            if (given.shape, given.dtype) != (own.shape, own.dtype):
                raise WeightsError(
                    f"averaged weights: {name} is {given.dtype} {list(given.shape)}, not {own.dtype} {list(own.shape)}"
                )
        self.updates = int(tensors[COUNT])
        for name, average in self.averages.items():
            average.copy_(tensors[name])


@torch.no_grad()
def average_into(model: ModelOp, folders: Sequence[Path | str]) -> None:
    """Fills `model` with the mean of the weights of checkpoint folders (2017's results: of the last 5).

    One tensor of one file is read at a time, and summed in fp64. Raises WeightsError, before any weight has changed,
    for no folder, a damaged one, or another architecture's; the spec is compared too.
    """
    if not folders:
        raise WeightsError("no checkpoints to average")
    parameters = dict(model.named_parameters())
    with ExitStack() as stack:
        opened: list[Checkpoint] = []
        for folder in map(Path, folders):
            if read_spec(folder)[0] != model.spec:
                raise WeightsError(f"{folder}: another architecture than that of the model to average into")
            files = stack.enter_context(Checkpoint.open(folder))
            odd = min(files.names ^ parameters.keys(), default=None)
            if odd is not None:
                where = "is missing" if odd in parameters else "has no place in the model"
                raise WeightsError(f"{folder}: tensor {odd} {where}")
            for name, p in parameters.items():
                if files.shape(name) != list(p.shape):
                    raise WeightsError(f"{files.file(name)}: {name} is {files.shape(name)}, not {list(p.shape)}")
            opened.append(files)
        for name, p in parameters.items():
            total = torch.zeros(p.shape, dtype=torch.float64)
            for files in opened:
                total += files.read(name)
            p.copy_(total / len(opened))


def _wide(p: Tensor) -> Tensor:
    return p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
