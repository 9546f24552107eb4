"""Examples: short sequences that belong together (a source and its target, a text and its class), kept as ids.

They are held in memory as flat arrays, 4 bytes an id, and batched with others of like length, so that little of a batch
is padding. N examples.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import InputError, UsageError
from ..files import read_tensors, replacing, write_tensors

Example = Mapping[str, Sequence[int]]
"""The ids (or classes) of one example, by column."""


class Examples:
    """N examples: columns of ids of any lengths, and where each came from."""

    def __init__(self, columns: Mapping[str, tuple[Tensor, Tensor]], where: Sequence[str], stamp: str = "") -> None:
        """columns: name → (ids int32 of all examples, starts int64 [N + 1])."""
        self.columns, self.where, self.stamp = dict(columns), where, stamp

    @classmethod
    def gather(cls, examples: Iterable[tuple[Example, str]], stamp: str = "") -> Self:
        """Of (example, where it came from); all have the same columns. Raises InputError where there are none."""
        ids: dict[str, list[np.ndarray]] = {}
        where: list[str] = []
        for example, place in examples:
            for name, values in example.items():
                ids.setdefault(name, []).append(np.asarray(values, np.int32))
            where.append(place)
        if not where:
            raise InputError("no examples")
        columns: dict[str, tuple[Tensor, Tensor]] = {}
        for name, parts in ids.items():
            starts = np.cumsum([0, *map(len, parts)], dtype=np.int64)
            columns[name] = torch.from_numpy(np.concatenate(parts)), torch.from_numpy(starts)
        return cls(columns, where, stamp)

    def __len__(self) -> int:
        return len(self.where)

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        """int64 ids of each column of one example."""
        return {
            name: ids[int(starts[number]) : int(starts[number + 1])].long()
            for name, (ids, starts) in self.columns.items()
        }

    def lengths(self) -> np.ndarray:
        """int64 [N]: of the longest column of each."""
        return np.stack([starts.diff().numpy() for _, starts in self.columns.values()]).max(0)

    def save(self, path: Path) -> None:
        """Writes one file, whole or not at all."""
        tensors = {f"{name}.ids": ids for name, (ids, _) in self.columns.items()}
        tensors |= {f"{name}.starts": starts for name, (_, starts) in self.columns.items()}
        with replacing(path) as beside:
            tensors["where"] = torch.from_numpy(np.frombuffer("\n".join(self.where).encode(), np.uint8).copy())
            write_tensors(beside, tensors, {"stamp": self.stamp})

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote. Raises InputError for a file that is missing or damaged."""
        try:
            tensors, about = read_tensors(path)
            where = bytes(tensors.pop("where").numpy()).decode().split("\n")
            names = {name.rpartition(".")[0] for name in tensors}
            columns = {name: (tensors[f"{name}.ids"], tensors[f"{name}.starts"]) for name in sorted(names)}
        except (OSError, SafetensorError, KeyError, UnicodeDecodeError) as error:
            raise InputError(f"{path}: not a file of examples: {error}; remove it, and it is written again") from None
        for name, (ids, starts) in columns.items():
            inside = len(starts) == len(where) + 1 and bool((starts.diff() >= 0).all())
            if not inside or (int(starts[0]), int(starts[-1])) != (0, len(ids)):
                raise InputError(f"{path}: damaged: column {name}; remove the file, and it is written again")
        return cls(columns, where, about.get("stamp", ""))


class ExampleBatches:
    """Training examples from weighted sources, in an order that the seed alone decides.

    An epoch is as many examples as there are in all sources, each having its share of them by weight; within a source
    every example comes once before any comes again. The examples of an epoch are sorted by length and cut into batches
    of at most `budget` ids, padding counted, and the batches come in another order.
    """

    def __init__(self, sources: Sequence[tuple[Examples, float]], budget: int, seed: int = 0, least: int = 1) -> None:
        """budget: ids of the longest column of a batch, padding counted; least: examples a batch has at least.

        Raises UsageError for an example longer than the budget.
        """
        self.sources, self.budget, self.seed, self.least = list(sources), budget, seed, least
        self.lengths = np.concatenate([source.lengths() for source, _ in sources])
        self.firsts = np.cumsum([0, *(len(source) for source, _ in sources)])
        longest = int(self.lengths.max())
        if longest > budget:
            raise UsageError(f"an example of {longest} tokens is more than a batch of {budget}: raise train.batch")
        whole = sum(weight for _, weight in sources)
        shares = [weight / whole * len(self.lengths) for _, weight in sources]
        self.draws = [max(1, round(share)) for share in shares]
        """Examples of each source in an epoch."""
        self._plan = lru_cache(4)(self._make_plan)
        self._before = [0]  # batches before each epoch that is known

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[list[dict[str, Tensor]], list[str]]:
        """(examples, where they came from) of a step, from 0 on: all, or those of one of several ranks."""
        epoch = 0
        while True:
            if epoch + 1 == len(self._before):
                self._before.append(self._before[-1] + len(self._plan(epoch)))
            if step < self._before[epoch + 1]:
                break
            epoch += 1
        return self._fetch(self._plan(epoch)[step - self._before[epoch]][rank::ranks])

    def _fetch(self, numbers: Sequence[int] | np.ndarray) -> tuple[list[dict[str, Tensor]], list[str]]:
        owners = np.searchsorted(self.firsts, numbers, "right") - 1
        places = [
            (self.sources[owner][0], int(number - self.firsts[owner]))
            for owner, number in zip(owners, numbers, strict=True)
        ]
        return [source[at] for source, at in places], [source.where[at] for source, at in places]

    def _make_plan(self, epoch: int) -> list[np.ndarray]:
        chosen = np.concatenate([self._drawn(source, epoch) for source in range(len(self.sources))])
        draw = _generator(self.seed, "order", epoch)
        chosen = chosen[draw.permutation(len(chosen))]  # so that equal lengths meet other neighbours each time
        chosen = chosen[np.argsort(self.lengths[chosen], kind="stable")]
        cut = bundles(self.lengths[chosen], self.budget, self.least)
        return [chosen[cut[i] : cut[i + 1]] for i in draw.permutation(len(cut) - 1)]

    def _drawn(self, source: int, epoch: int) -> np.ndarray:
        """The examples of a source in an epoch: a part of the endless list of its permutations."""
        size, count = len(self.sources[source][0]), self.draws[source]
        start = epoch * count
        passes = range(start // size, -(-(start + count) // size))
        order = np.concatenate([_generator(self.seed, source, one).permutation(size) for one in passes])
        begin = start - passes.start * size
        return order[begin : begin + count] + self.firsts[source]


def bundles(lengths: np.ndarray, budget: int, least: int = 1) -> list[int]:
    """Where to cut a sorted list of lengths so that in each part number · longest ≤ budget: [0, …, N].

    A part of fewer than `least` joins its neighbour.
    """
    cuts, start = [0], 0
    for at, length in enumerate(lengths.tolist()):
        if (at + 1 - start) * length > budget and at - start >= least:
            cuts.append(at)
            start = at
    if len(lengths) - start < least and len(cuts) > 1:
        cuts.pop()
    return [*cuts, len(lengths)]


def _generator(seed: int, what: int | str, number: int) -> np.random.Generator:
    digest = blake2b(f"{seed} {what} {number}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(int.from_bytes(digest, "little")))


def padded(rows: Sequence[Tensor], fill: int = 0) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, L], segment [B, L]: 1 where there is one) of rows of any lengths; `fill` at padding."""
    length = max(map(len, rows))
    ids = torch.full((len(rows), length), fill, dtype=torch.long)
    segment = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, : len(row)], segment[i, : len(row)] = row, 1
    return ids, segment
