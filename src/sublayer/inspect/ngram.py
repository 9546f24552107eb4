"""The judge that any trained model has to beat: an interpolated Kneser–Ney n-gram model over bytes.

Symbols are the 256 bytes and END, which closes each document and also fills the places before it. An n-gram is one
int64, its symbols the digits of a number of base 257, the oldest first: grams of one history lie side by side in a
sorted array. Source: Kneser and Ney 1995; interpolated, with three discounts an order: Chen and Goodman 1998, eq. 22.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import InputError, UsageError
from ..text.tokenizer import utf8

SYMBOLS = 257
END = 256
LONGEST = 7  # 257^7 is below 2^63
PORTION = 1 << 21  # symbols counted at a time: what bounds memory, beside the distinct n-grams

Codes = NDArray[np.int64]


def ngram_bits(train_texts: Iterable[str], held_texts: Iterable[str], order: int = 5) -> float:
    """Bits per byte of held-out documents under an n-gram model of the training documents.

    Every byte is charged, and the end of every document; the sum is divided by the bytes. Texts are read once, so
    they may come from generators. Raises InputError where either has none, UsageError for an order not from 1 to 7.
    """
    model = Ngram.count(train_texts, order)
    bits, size = 0.0, 0
    for grams, documents in _portions(held_texts, order):
        bits -= float(np.log2(model.probabilities(grams)).sum())
        size += len(grams) - documents
    if not size:
        raise InputError("no held-out text to judge by")
    return bits / size


@dataclass(frozen=True)
class Level:
    """The n-grams of one order: p(w | h) = kept[hw] + spare[h] · p(w | h without its oldest symbol).

    A history that was never seen leaves everything to the shorter one.
    """

    grams: Codes
    kept: NDArray[np.float64]
    histories: Codes
    spare: NDArray[np.float64]

    def probabilities(self, grams: Codes, shorter: NDArray[np.float64]) -> NDArray[np.float64]:
        return _look_up(self.grams, self.kept, grams, 0.0) + shorter * _look_up(
            self.histories, self.spare, grams // SYMBOLS, 1.0
        )


@dataclass(frozen=True)
class Ngram:
    """A model over bytes and END. For every history the probabilities of the 257 symbols sum to 1, none being 0."""

    levels: tuple[Level, ...]  # of the orders 1, 2, …

    @classmethod
    def count(cls, texts: Iterable[str], order: int = 5) -> Ngram:
        """The model of some documents. Raises InputError for no text at all, UsageError as `ngram_bits`."""
        if not 1 <= order <= LONGEST:
            raise UsageError(f"order={order}: n-grams of 1 to {LONGEST} bytes can be counted")
        grams, counts = np.empty(0, np.int64), np.empty(0, np.int64)
        for portion, _ in _portions(texts, order):
            more, new = np.unique(portion, return_counts=True)
            grams, counts = _summed(np.concatenate([grams, more]), np.concatenate([counts, new]))
        if not len(grams):
            raise InputError("no text to count n-grams in")
        levels: list[Level] = []
        for size in range(order, 0, -1):
            levels.append(_level(grams, counts))
            # A shorter gram counts once for each symbol that was seen before it, however often: "Francisco" is
            # frequent and yet unlikely after anything but "San".
            grams, counts = np.unique(grams % SYMBOLS ** (size - 1), return_counts=True)
        return cls(tuple(reversed(levels)))

    def probabilities(self, grams: Codes) -> NDArray[np.float64]:
        """p(last symbol | those before it) of each n-gram of the model's order."""
        found = np.full(len(grams), 1 / SYMBOLS)
        for size, level in enumerate(self.levels, 1):
            found = level.probabilities(grams % SYMBOLS**size, found)
        return found

    def distribution(self, history: bytes) -> NDArray[np.float64]:
        """p of each of the 257 symbols after the last bytes of a document that began with `history`."""
        order = len(self.levels)
        symbols = [*[END] * (order - 1), *history][len(history) :]
        code = sum(symbol * SYMBOLS**place for place, symbol in enumerate(reversed(symbols), 1))
        return self.probabilities(code + np.arange(SYMBOLS))


def _portions(texts: Iterable[str], order: int) -> Iterator[tuple[Codes, int]]:
    """The n-grams that end at each symbol of the documents, part by part, and how many of those symbols are END.

    Documents without text are passed over.
    """
    waiting: list[NDArray[np.uint16]] = []
    size = 0
    for text in texts:
        if not text:
            continue
        waiting.append(np.frombuffer(utf8(text), np.uint8).astype(np.uint16))
        size += len(waiting[-1])
        if size >= PORTION:
            yield from _grams(waiting, order)
            waiting, size = [], 0
    if waiting:
        yield from _grams(waiting, order)


def _grams(documents: list[NDArray[np.uint16]], order: int) -> Iterator[tuple[Codes, int]]:
    """The n-grams of some documents; the END that closes one is the first of those before the next."""
    before = np.full(order - 1, END, np.uint16)
    between = np.full(max(order - 1, 1), END, np.uint16)
    stream = np.concatenate([before, *(part for document in documents for part in (document, between))])
    # Of a run of END only the first is a symbol of the text.
    real = np.diff(stream == END, prepend=False) | (stream != END)
    for start in range(0, len(stream) - order + 1, PORTION):
        stop = min(start + PORTION, len(stream) - order + 1)
        codes = np.zeros(stop - start, np.int64)
        for place in range(order):
            codes = codes * SYMBOLS + stream[start + place : stop + place]
        codes = codes[real[start + order - 1 : stop + order - 1]]
        yield codes, int(np.count_nonzero(codes % SYMBOLS == END))


def _summed(grams: Codes, counts: Codes) -> tuple[Codes, Codes]:
    """Distinct n-grams in rising order with the sums of their counts."""
    order = np.argsort(grams, kind="stable")  # which merges what is already in order
    grams, counts = grams[order], counts[order]
    starts = _starts(grams)
    return grams[starts], np.add.reduceat(counts, starts)


def _starts(values: Codes) -> NDArray[np.intp]:
    """Where in sorted values a new one begins."""
    return np.flatnonzero(np.diff(values, prepend=-1))


def _level(grams: Codes, counts: Codes) -> Level:
    histories = grams // SYMBOLS
    starts = _starts(histories)
    totals = np.add.reduceat(counts, starts)
    discounts = _discounts(counts)[np.minimum(counts, 3)]
    kept = (counts - discounts) / np.repeat(totals, np.diff(starts, append=len(grams)))
    return Level(grams, kept, histories[starts], np.add.reduceat(discounts, starts) / totals)


def _discounts(counts: Codes) -> NDArray[np.float64]:
    """What is taken from counts of (0,) 1, 2, and 3 or more; from how many n-grams occur 1, 2, 3 and 4 times.

    Where too few do for the estimate to mean anything, half of what could be taken.
    """
    n = [int(np.count_nonzero(counts == count)) for count in range(5)]
    if all(n[1:]):
        y = n[1] / (n[1] + 2 * n[2])
        found = [0.0, *(count - (count + 1) * y * n[count + 1] / n[count] for count in (1, 2, 3))]
        if all(0 < found[count] < count for count in (1, 2, 3)):
            return np.array(found)
    return np.array([0.0, 0.5, 1.0, 1.5])


def _look_up(keys: Codes, values: NDArray[np.float64], wanted: Codes, otherwise: float) -> NDArray[np.float64]:
    """values[i] where keys[i] is wanted; keys are sorted."""
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], otherwise)
