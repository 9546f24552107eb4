"""Skip-gram with negative sampling (Mikolov et al. 2013, arXiv 1310.4546).

B pairs, K negative words of a pair, D width, V words.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UsageError
from .corpus import Corpus, neighbours
from .tables import Tables, adagrad
from .vectors import Vectors

PORTION = 100_000  # words whose pairs are shuffled together


class SkipGram(Tables):
    """A word predicts its neighbours, against words drawn by count^0.75; frequent words are passed over at random.

    window: each word looks 1 … window words far, drawn anew each epoch. sample: the t of 1 − sqrt(t / f), the chance to
    pass over a word of frequency f; 0: none is passed over. As pairs go in batches, each step is AdaGrad's where
    word2vec's own is plain. Raises UsageError for numbers that cannot be meant.
    """

    def __init__(
        self,
        corpus: Corpus,
        dim: int = 100,
        *,
        window: int = 5,
        negatives: int = 5,
        sample: float = 1e-3,
        rate: float = 0.1,
        batch: int = 4096,
        seed: int = 0,
    ) -> None:
        if min(dim, window, negatives, batch) < 1 or sample < 0 or rate <= 0:
            raise UsageError("dim, window, negatives and batch are at least 1, sample at least 0, and rate above 0")
        self.corpus = corpus
        self.window, self.negatives, self.rate, self.batch, self.seed = window, negatives, rate, batch, seed
        self.settings: dict[str, Any] = {
            "method": "skipgram", "dim": dim, "window": window, "negatives": negatives, "sample": sample, "rate": rate,
            "batch": batch, "seed": seed,
        }  # fmt: skip
        frequency = corpus.counts / corpus.counts.sum()
        self.keep = np.minimum(1, np.sqrt(sample / frequency)) if sample else np.ones(len(frequency))
        noise = np.cumsum(corpus.counts**0.75)
        self.noise = noise / noise[-1]
        V, generator = len(corpus.words), torch.Generator().manual_seed(seed)
        word = (torch.rand(V, dim, generator=generator) - 0.5) / dim  # as word2vec begins; contexts at 0
        self.tensors = {"word": word, "context": torch.zeros(V, dim)}
        self.tensors |= {f"{name} squares": torch.ones(V, dim) for name in ("word", "context")}

    def epoch(self, number: int) -> float:
        draw = np.random.default_rng((self.seed, number))
        kept = draw.random(len(self.corpus.ids)) < self.keep[self.corpus.ids]
        ids, document = self.corpus.ids[kept], self.corpus.document[kept]
        total, pairs = 0.0, 0
        for start in range(0, len(ids), PORTION):
            stop = min(start + PORTION, len(ids))
            reach = draw.integers(1, self.window + 1, stop - start)
            here, there = neighbours(document, self.window, start, stop, reach)
            order = draw.permutation(len(here))
            words, contexts = ids[here[order]], ids[there[order]]
            negatives = np.searchsorted(self.noise, draw.random((len(words), self.negatives)), side="right")
            pairs += len(words)
            for first in range(0, len(words), self.batch):
                part = slice(first, first + self.batch)
                outputs = np.concatenate([contexts[part, None], negatives[part]], 1)
                total += self.step(torch.from_numpy(words[part]).long(), torch.from_numpy(outputs).long())
        return total / max(1, pairs)

    def step(self, words: Tensor, outputs: Tensor) -> float:
        """One batch of words [B] and their context and negatives [B, 1 + K]; returns the sum of losses."""
        tables, dim = self.tensors, self.tensors["word"].shape[1]
        loss, d_word, d_outputs = negative_sampling(
            tables["word"][words], tables["context"][outputs], (outputs != outputs[:, :1])[:, 1:]
        )
        adagrad(tables["word"], tables["word squares"], words, d_word, self.rate)
        rows, gradients = outputs.flatten(), d_outputs.view(-1, dim)
        adagrad(tables["context"], tables["context squares"], rows, gradients, self.rate)
        return float(loss)

    def vectors(self) -> Vectors:
        return Vectors(self.corpus.words, self.corpus.counts, self.tensors["word"], self.settings)


def negative_sampling(word: Tensor, outputs: Tensor, counted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """−log σ(u · v) − Σ log σ(−u · n), summed over pairs, with its gradients (eq. 4, arXiv 1310.4546).

    word: u [B, D]; outputs: v and the n [B, 1 + K, D]; counted: [B, K], False for a negative that is the context
    itself. Returns (loss, gradient of word, gradient of outputs).
    """
    scores = torch.bmm(outputs, word[..., None])[..., 0]
    scores[:, 0].neg_()  # softplus(−score) for the context, softplus(score) for a negative
    counts = F.pad(counted.to(scores.dtype), (1, 0), value=1.0)
    slope = scores.sigmoid() * counts
    slope[:, 0].neg_()
    loss = (F.softplus(scores) * counts).sum()
    return loss, torch.bmm(slope[:, None], outputs)[:, 0], slope[..., None] * word[:, None]
