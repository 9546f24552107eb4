"""GloVe (Pennington et al. 2014): vectors whose products are the logarithms of how often words stand together.

B pairs, D width, V words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError, UsageError
from .corpus import Corpus, neighbours
from .tables import Tables, adagrad
from .vectors import Vectors

PORTION = 200_000  # words whose pairs are counted at a time


class Glove(Tables):
    """Weighted least squares on co-occurrence counts, where a pair d words apart counts 1 / d; AdaGrad, in batches.

    The vectors are the sums of a word's two, as its authors' are. Raises UsageError for numbers that cannot be meant,
    InputError for a corpus in which no words stand together.
    """

    def __init__(
        self,
        corpus: Corpus,
        dim: int = 100,
        *,
        window: int = 10,
        most: float = 100.0,
        power: float = 0.75,
        rate: float = 0.05,
        batch: int = 4096,
        seed: int = 0,
    ) -> None:
        if min(dim, window, batch) < 1 or min(most, power, rate) <= 0:
            raise UsageError("dim, window and batch are at least 1; most, power and rate are above 0")
        self.corpus = corpus
        self.most, self.power, self.rate, self.batch, self.seed = most, power, rate, batch, seed
        self.settings: dict[str, Any] = {
            "method": "glove", "dim": dim, "window": window, "most": most, "power": power, "rate": rate,
            "batch": batch, "seed": seed,
        }  # fmt: skip
        self.pairs, self.count = co_occurrences(corpus, window)
        if not len(self.count):
            raise InputError("no two words of the text stand together: there is nothing to learn")
        V, generator = len(corpus.words), torch.Generator().manual_seed(seed)
        shapes = {"word": (V, dim), "context": (V, dim), "word bias": (V,), "context bias": (V,)}
        begin = {name: (torch.rand(shape, generator=generator) - 0.5) / dim for name, shape in shapes.items()}
        self.tensors = begin | {f"{name} squares": torch.ones(shape) for name, shape in shapes.items()}

    def epoch(self, number: int) -> float:
        order = np.random.default_rng((self.seed, number)).permutation(len(self.count))
        total = 0.0
        for first in range(0, len(order), self.batch):
            part = order[first : first + self.batch]
            words, contexts = torch.from_numpy(self.pairs[part]).unbind(1)
            rows = {"word": words, "context": contexts, "word bias": words, "context bias": contexts}
            found = {name: self.tensors[name][index] for name, index in rows.items()}
            count = torch.from_numpy(self.count[part]).float()
            loss, gradients = least_squares(
                found["word"], found["context"], found["word bias"], found["context bias"], count, self.most, self.power
            )
            total += float(loss)
            for name, gradient in zip(rows, gradients, strict=True):
                adagrad(self.tensors[name], self.tensors[f"{name} squares"], rows[name], gradient, self.rate)
        return total / len(order)

    def vectors(self) -> Vectors:
        both = self.tensors["word"] + self.tensors["context"]
        return Vectors(self.corpus.words, self.corpus.counts, both, self.settings)


def co_occurrences(corpus: Corpus, window: int) -> tuple[np.ndarray, np.ndarray]:
    """(pairs [n, 2] int64, counts [n]): every two words within a window of each other, both ways, weighted 1 / d."""
    V, ids = len(corpus.words), corpus.ids.astype(np.int64)
    codes, counts = np.empty(0, np.int64), np.empty(0)
    for start in range(0, len(ids), PORTION):
        here, there = neighbours(corpus.document, window, start, min(start + PORTION, len(ids)))
        codes = np.concatenate([codes, ids[here] * V + ids[there]])
        codes, place = np.unique(codes, return_inverse=True)
        counts = np.bincount(place, np.concatenate([counts, 1 / np.abs(here - there)]), len(codes))
    return np.stack([codes // V, codes % V], 1), counts


def least_squares(
    word: Tensor, context: Tensor, word_bias: Tensor, context_bias: Tensor, count: Tensor, most: float, power: float
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """½ Σ f(x) (w · c + b + b̃ − log x)², f(x) = min(1, (x / most)^power), and its gradients (eq. 8 and 9; the half is
    its authors' code's). word, context: [B, D]; the biases and the counts x: [B]."""
    difference = (word * context).sum(1) + word_bias + context_bias - count.log()
    slope = (count / most).pow(power).clamp(max=1) * difference
    return (slope * difference).sum() / 2, (slope[:, None] * context, slope[:, None] * word, slope, slope)
