"""Names: checkpoint tables. A row says (theirs, ours, change); one table is read both ways, to import and to export."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from posixpath import commonpath
from typing import Any

import torch
from torch import Tensor, nn

from .errors import WeightsError

Tensors = list[Tensor]


@dataclass(frozen=True)
class Change:
    """An invertible step between their tensors of a row and ours."""

    into: Callable[[Tensors], Tensors]
    """Theirs to ours."""
    back: Callable[[Tensors], Tensors]
    """Ours to theirs."""
    whole_rows: bool = True
    """Whether it only moves whole rows, and so works on quantised blocks as they are."""


SAME = Change(list, list)
TRANSPOSED = Change(lambda ts: [t.t() for t in ts], lambda ts: [t.t() for t in ts], whole_rows=False)


def stacked(parts: int, transposed: bool = False) -> Change:
    """One of theirs holds `parts` equal matrices of ours, one above the other (beside, if stored transposed)."""

    def into(theirs: Tensors) -> Tensors:
        whole = theirs[0].t() if transposed else theirs[0]
        return list(whole.chunk(parts))

    def back(ours: Tensors) -> Tensors:
        whole = torch.cat(ours)
        return [whole.t() if transposed else whole]

    return Change(into, back, whole_rows=not transposed)


def cut(*heights: int) -> Change:
    """One of theirs holds matrices of ours with so many rows each, one above the other."""
    return Change(lambda theirs: list(theirs[0].split(heights)), lambda ours: [torch.cat(ours)])


def interleaved(parts: int, height: int) -> Change:
    """One of theirs holds `parts` equal matrices of ours, `height` rows of each in turn (head by head, say)."""
    return in_turn(*[height] * parts)


def in_turn(*heights: int) -> Change:
    """One of theirs holds matrices of ours, so many rows of each again and again (group by group of heads, say)."""

    def into(theirs: Tensors) -> Tensors:
        groups = theirs[0].unflatten(0, (-1, sum(heights)))
        return [part.flatten(0, 1) for part in groups.split(heights, 1)]

    def back(ours: Tensors) -> Tensors:
        groups = [part.unflatten(0, (-1, height)) for part, height in zip(ours, heights, strict=True)]
        return [torch.cat(groups, 1).flatten(0, 1)]

    return Change(into, back)


STACKED = Change(lambda ts: [torch.stack(ts)], lambda ts: list(ts[0].unbind(0)))  # one of ours holds all of theirs


@dataclass(frozen=True)
class Row:
    """`{}` in a name stands for a number, the same one at the same place on both sides.

    `*` in one of theirs stands for 0, 1, … up to the length of ours: the experts that our one parameter holds.
    """

    theirs: str | tuple[str, ...]
    ours: str | tuple[str, ...]
    change: Change = field(default=SAME)
    sized: Callable[[Any], Change] | None = None
    """The change where it depends on sizes: a function of the module of ours in which all of `ours` lie (the attention
    of q.weight, k.weight and v.weight; the linear of one weight)."""

    def __post_init__(self) -> None:
        holes = {name.count("{}") for name in (*_names(self.theirs), *_names(self.ours))}
        if len(holes) != 1:
            raise ValueError(f"{self.theirs} and {self.ours} have different numbers of {{}}")

    def at(self, numbers: Sequence[int]) -> Row:
        """The row of one layer (or expert)."""
        theirs, ours = (tuple(name.format(*numbers) for name in _names(side)) for side in (self.theirs, self.ours))
        return Row(theirs, ours, self.change, self.sized)

    def of(self, model: nn.Module, most: int | None = None) -> Row:
        """The row of one layer with the change and the experts that the model's sizes ask for.

        most: how many names there can be. Raises WeightsError for more experts than that.
        """
        if any("*" in name for name in self.their_names):
            experts = range(len(model.get_parameter(self.our_names[0])))
            if most is not None and len(experts) > most:
                raise WeightsError(f"{self.our_names[0]} has {len(experts)} experts, the checkpoint {most} tensors")
            every = [name.replace("*", str(i)) for name in self.their_names for i in (experts if "*" in name else (0,))]
            return Row(tuple(every), self.ours, self.change, self.sized).of(model)
        if self.sized is None:
            return self
        modules = [name.rpartition(".")[0].replace(".", "/") for name in self.our_names]
        holder = model.get_submodule(commonpath(modules).replace("/", "."))
        return Row(self.theirs, self.ours, self.sized(holder))

    @property
    def their_names(self) -> tuple[str, ...]:
        return _names(self.theirs)

    @property
    def our_names(self) -> tuple[str, ...]:
        return _names(self.ours)


def expand(rows: Iterable[Row], ours: nn.Module | Iterable[str], most: int | None = None) -> list[Row]:
    """The rows that a model needs, one for each number that occurs in its parameters' names; names alone will do where
    no row depends on sizes.

    A row none of whose names occur is left out (a bias the model does not have). Raises WeightsError for a parameter
    that no row names, a row only some of whose names occur, and more experts than `most`, the names there can be.
    """
    model = ours if isinstance(ours, nn.Module) else nn.Module()
    left = {name for name, _ in ours.named_parameters()} if isinstance(ours, nn.Module) else set(ours)
    found = list[Row]()
    every = frozenset(left)
    for row in rows:
        pattern = re.compile(re.escape(row.our_names[0]).replace(r"\{\}", r"(\d+)"))
        matches = [[int(number) for number in match.groups()] for name in every if (match := pattern.fullmatch(name))]
        for numbers in sorted(matches):
            concrete = row.at(numbers)
            missing = set(concrete.our_names) - left
            if missing:
                raise WeightsError(f"{sorted(missing)[0]}: the model has no such parameter, or two rows name it")
            left -= set(concrete.our_names)
            found.append(concrete.of(model, most))
    if left:
        raise WeightsError(f"{sorted(left)[0]}: no row of the checkpoint table names this parameter")
    return found


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether a name is one of the patterns, `{}` standing for a number, `*` for anything."""
    escaped = (re.escape(pattern).replace(r"\{\}", r"\d+").replace(r"\*", ".*") for pattern in patterns)
    return any(re.fullmatch(pattern, name) for pattern in escaped)


def _names(side: str | tuple[str, ...]) -> tuple[str, ...]:
    return (side,) if isinstance(side, str) else side


def rows(pairs: Sequence[tuple[str, str]], kinds: Sequence[str] = ("weight", "bias")) -> list[Row]:
    """Plain rows for modules: ("a", "b") becomes ("a.weight", "b.weight") and ("a.bias", "b.bias")."""
    return [Row(f"{theirs}.{kind}", f"{ours}.{kind}") for (theirs, ours), kind in product(pairs, kinds)]
