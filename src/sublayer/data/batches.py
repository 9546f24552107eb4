"""Rows of tokens to train on and to judge by: each a pure function of the seed and of its number.

B rows, L predictions a row. A row holds L + 1 ids: the first L are read, the last L are what they predict.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from hashlib import blake2b
from heapq import heappop, heappush
from math import lcm
from typing import NamedTuple, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, UsageError
from .tokens import Tokens

SHARES = 2**16
"""Weights are exact where they are fractions of at most this, else rounded to one of it."""

IGNORED = -100  # the label that no loss counts


class Rows(NamedTuple):
    """Rows of ids, as documents were packed into them."""

    ids: Tensor
    """int64 [B, L + 1]; 0 where segment is 0."""
    segment: Tensor
    """int64 [B, L + 1]: which document of the row a token belongs to, from 1 on; 0 is padding, at the end of a row."""
    where: Sequence[str]
    """[B] where each row's first token comes from, in words."""

    def split(self, rows: int) -> list[Rows]:
        """These rows in parts of at most so many."""
        parts = [slice(start, start + rows) for start in range(0, len(self.ids), rows)]
        return [Rows(self.ids[part], self.segment[part], self.where[part]) for part in parts]


class Readable(Protocol):
    """Documents' ids one after the other: Tokens on disk, or others in memory."""

    def __len__(self) -> int: ...
    def read(self, start: int, stop: int) -> np.ndarray: ...
    def begins(self, start: int, stop: int) -> np.ndarray: ...
    def number(self, position: int) -> int: ...
    def where(self, position: int) -> str: ...


class Batches:
    """Training rows from weighted sources, in an order that the seed alone decides.

    A source is a circle of T tokens. Each epoch begins at another of them and cuts the circle into rows of L
    predictions (the last of an epoch is shorter, and padded), which come in another order: every token is predicted
    exactly once an epoch. After any number of rows each source has had its share of them, to less than one row; so a
    small source may be in its third epoch while a large one is in its first.

    Nothing is kept between calls. `at(step)` needs no step before it, so a run that is resumed sees what it would have
    seen; ranks take their rows of the same batch.
    """

    def __init__(self, sources: Sequence[tuple[Tokens, float]], length: int, rows: int, seed: int = 0) -> None:
        """sources with their weights, whose sum may be anything; length: L; rows: B, over all ranks.

        Raises UsageError for what cannot be meant, InputError for sources of different tokenizers.
        """
        if length < 1 or rows < 1:
            raise UsageError(f"batches of {rows} rows of {length} tokens: both are at least 1")
        if not sources:
            raise UsageError("batches: no sources")
        if not all(0 < weight < float("inf") for _, weight in sources):
            raise UsageError("batches: the weight of a source is a number above 0; leave out what is to weigh nothing")
        first = sources[0][0]
        for tokens, _ in sources:
            if tokens.index.tokenizer != first.index.tokenizer:
                raise InputError(f"{first.folder} and {tokens.folder}: not written with the same tokenizer")
        self.sources = [tokens for tokens, _ in sources]
        self.length, self.rows, self.seed = length, rows, seed
        self.windows = [-(-len(tokens) // length) for tokens in self.sources]
        """Rows of an epoch of each source."""
        self._turns = turns([weight for _, weight in sources])
        counts = self._turns[:, None] == np.arange(len(sources))
        self._before = np.cumsum(counts, 0) - counts  # [period, sources] turns that each source has had
        self._period = counts.sum(0)

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> Rows:
        """The rows of a step, from 0 on: all, or those of one of several ranks.

        Raises UsageError where ranks cannot share B rows evenly.
        """
        if self.rows % ranks or not 0 <= rank < ranks:
            raise UsageError(f"a batch of {self.rows} rows cannot be shared by {ranks} ranks")
        share = self.rows // ranks
        return self.take(step * self.rows + rank * share, share)

    def take(self, row: int, count: int) -> Rows:
        """`count` rows from number `row` on, as if batches were one long list of rows."""
        if row < 0:
            raise UsageError(f"row {row}: steps and rows are counted from 0")
        places = [self._place(number) for number in range(row, row + count)]
        return _rows(places, self.length)

    def epochs(self, step: int) -> list[float]:
        """How often each source has been gone through before this step."""
        row = step * self.rows
        return [self._turn(row, source) / windows for source, windows in enumerate(self.windows)]

    def _turn(self, row: int, source: int) -> int:
        """How many of the rows before this one were of source."""
        periods, at = divmod(row, len(self._turns))
        return periods * int(self._period[source]) + int(self._before[at, source])

    def _place(self, row: int) -> Place:
        source = int(self._turns[row % len(self._turns)])
        tokens = self.sources[source]
        epoch, turn = divmod(self._turn(row, source), self.windows[source])
        order, begin = _epoch(self.seed, source, epoch)
        window = permuted(turn, self.windows[source], order)
        at = window * self.length
        return Place(tokens, (begin + at) % len(tokens), min(self.length, len(tokens) - at) + 1)


def windows(tokens: Readable, length: int, stride: int | None = None, rows: int = 1) -> Iterator[tuple[Rows, Tensor]]:
    """Held-out rows in the order of the text, at most `rows` at once, with the labels that count: int64 [B, L].

    Windows begin every `stride` tokens (None: L, so that they only just meet). Each token after the first is a label
    exactly once, in the window where it has most before it: at least L - stride tokens, or all of its document. The
    other labels are -100. All losses summed, over ln 2 and `tokens.bytes`, are the bits per byte; the ids that end
    documents are paid for too.
    """
    stride = length if stride is None else stride
    if not 1 <= stride <= length or rows < 1:
        raise UsageError(f"windows of {length} tokens every {stride}, {rows} at once: 1 ≤ stride ≤ length, 1 ≤ rows")
    last = len(tokens) - 1
    starts = range(0, max(last - length, 0) + stride, stride)
    for first in range(0, len(starts), rows):
        places = [Place(tokens, start, min(length, last - start) + 1) for start in starts[first : first + rows]]
        found = _rows(places, length)
        labels = torch.where(found.segment[:, 1:] > 0, found.ids[:, 1:], IGNORED)
        # The window before has had these; before the very first there is none.
        labels[int(first == 0) :, : length - stride] = IGNORED
        yield found, labels


class Place(NamedTuple):
    """Which tokens are in a row."""

    tokens: Readable
    start: int
    count: int


class Places(Sequence[str]):
    """Where rows begin, put into words only when somebody asks."""

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, row: int) -> str: ...
    @overload
    def __getitem__(self, row: slice) -> Places: ...
    def __getitem__(self, row: int | slice) -> str | Places:
        if isinstance(row, slice):
            return Places(self._places[row])
        tokens, start, count = self._places[row]
        last = (start + count - 1) % len(tokens)
        if tokens.number(start) == tokens.number(last):
            return tokens.where(start)
        return f"{tokens.where(start)}, to {tokens.where(last)}"


def turns(weights: Sequence[float]) -> np.ndarray:
    """[period]: whose turn it is, so that after any number of turns each has had its share, to less than one.

    A turn is due from when its source has had less than its share until the source would lag by one. What is to be over
    soonest is taken first, and that always suffices (Baruah, Cohen, Plaxton, Varvel 1996, "Proportionate progress").
    """
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight / sum(exact) for weight in exact]
    period = lcm(*(share.denominator for share in shares))
    if period > SHARES:
        period = SHARES
        counts = [max(1, int(share * period)) for share in shares]
        counts[counts.index(max(counts))] += period - sum(counts)
    else:
        counts = [int(share * period) for share in shares]
    taken = [0] * len(counts)
    # Of each source, its next turn: (from when on, source), and once it is due: (until when, source).
    waiting, due = [(1, source) for source in range(len(counts))], []
    order = np.zeros(period, np.int64)
    for turn in range(1, period + 1):
        while waiting and waiting[0][0] <= turn:
            source = heappop(waiting)[1]
            heappush(due, (-(-(taken[source] + 1) * period // counts[source]), source))
        source = heappop(due)[1]
        order[turn - 1] = source
        taken[source] += 1
        heappush(waiting, (taken[source] * period // counts[source] + 1, source))
    return order


def permuted(index: int, size: int, keys: Sequence[int]) -> int:
    """Where a permutation of 0 … size - 1 puts index; it takes no memory, whatever the size.

    A Feistel network permutes the next power of 4; what falls outside is sent through again until it falls inside
    (Black and Rogaway 2002, "Ciphers with arbitrary finite domains").
    """
    half = max((size - 1).bit_length() + 1, 2) // 2
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & mask)
        index = left << half | right
        if index < size:
            return index


def _mixed(x: int) -> int:
    """64 bits, each of which depends on all of x: the finaliser of SplitMix64 (Steele, Lea and Flood 2014)."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 2**64 - 1
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 2**64 - 1
    return x ^ x >> 31


@lru_cache(1024)
def _epoch(seed: int, source: int, epoch: int) -> tuple[tuple[int, ...], int]:
    """(keys of the order of rows, where the circle begins) as 64-bit numbers."""
    digest = blake2b(f"{seed} {source} {epoch}".encode(), digest_size=56).digest()
    *keys, begin = (int.from_bytes(digest[i : i + 8], "little") for i in range(0, 56, 8))
    return tuple(keys), begin


def _rows(places: Sequence[Place], length: int) -> Rows:
    ids = np.zeros((len(places), length + 1), np.int64)
    segment = np.zeros_like(ids)
    for row, (tokens, start, count) in enumerate(places):
        first = min(count, len(tokens) - start)
        for at, begin, size in ((0, start, first), (first, 0, count - first)):  # what goes on at the circle's beginning
            if size:
                ids[row, at : at + size] = tokens.read(begin, begin + size)
                segment[row, at] = 1
                segment[row, at + tokens.begins(begin, begin + size)] = 1
        np.cumsum(segment[row, :count], out=segment[row, :count])
    return Rows(torch.from_numpy(ids), torch.from_numpy(segment), Places(places))
