"""Vectors of words: neighbours, analogies, files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import InputError, UsageError, nearest
from ..files import read_tensors, replacing, write_json, write_tensors
from .corpus import words_of

FILE, VOCABULARY, TEXT = "vectors.safetensors", "vocabulary.json", "vectors.txt"


@dataclass(frozen=True, eq=False)
class Vectors:
    """A vector for each word."""

    words: tuple[str, ...]
    """The vocabulary, the most frequent first."""
    counts: np.ndarray
    """[V]: how often each occurred."""
    table: Tensor
    """[V, D]."""
    about: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """How they were trained."""

    @cached_property
    def number(self) -> dict[str, int]:
        """The row of each word."""
        return {word: row for row, word in enumerate(self.words)}

    @cached_property
    def unit(self) -> Tensor:
        """[V, D]: the vectors at length 1."""
        return torch.nn.functional.normalize(self.table, dim=1)

    def of(self, word: str) -> Tensor:
        """[D]: the vector of a word at length 1. Raises UsageError, with the nearest, for a word that has none."""
        if word not in self.number:
            raise UsageError(f"no vector for {word!r}{nearest(word, self.words)}")
        return self.unit[self.number[word]]

    def near(self, word: str, top: int = 10) -> list[tuple[str, float]]:
        """The words nearest by cosine, the nearest first, each with it."""
        return self._nearest(self.of(word), {word}, top)

    def analogy(self, a: str, b: str, c: str, top: int = 10) -> list[tuple[str, float]]:
        """a is to b as c is to …: the words nearest to b − a + c by cosine, those three left out."""
        return self._nearest(self.of(b) - self.of(a) + self.of(c), {a, b, c}, top)

    def text(self, text: str) -> Tensor:
        """[D]: the mean over a text's words, each weighted by 1e-3 / (1e-3 + its frequency); 0 where none is known.

        The weights are those of Arora et al. 2017, without which a mean says "the" and "of".
        """
        rows = torch.tensor([self.number[word] for word in words_of(text) if word in self.number], dtype=torch.long)
        if not len(rows):
            return torch.zeros(self.table.shape[1])
        frequency = torch.from_numpy(self.counts / self.counts.sum()).float()[rows]
        return (self.unit[rows] * (1e-3 / (1e-3 + frequency))[:, None]).mean(0)

    def _nearest(self, vector: Tensor, without: set[str], top: int) -> list[tuple[str, float]]:
        cosines = self.unit @ (vector / vector.norm().clamp(min=1e-12))
        best = cosines.topk(min(len(self.words), top + len(without)))
        found = [(self.words[row], value) for value, row in zip(*(x.tolist() for x in best), strict=True)]
        return [(word, value) for word, value in found if word not in without][:top]

    def save(self, folder: Path | str) -> None:
        """Writes vectors.safetensors, vocabulary.json, and vectors.txt in the format of word2vec, each atomically."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / FILE) as beside:
            write_tensors(beside, {"vectors": self.table}, {"words": str(len(self.words))})
        kept = {"about": dict(self.about), "words": list(self.words), "counts": self.counts.tolist()}
        write_json(folder / VOCABULARY, kept)
        with replacing(folder / TEXT) as beside, beside.open("w", encoding="utf-8") as file:
            file.write(f"{len(self.words)} {self.table.shape[1]}\n")
            for word, row in zip(self.words, self.table.tolist(), strict=True):
                file.write(f"{word} {' '.join(f'{value:.6g}' for value in row)}\n")

    @classmethod
    def load(cls, folder: Path | str) -> Vectors:
        """What `save` wrote. Raises InputError for a folder without vectors, or with broken ones."""
        folder = Path(folder)
        try:
            kept = json.loads((folder / VOCABULARY).read_text(encoding="utf-8"))
            tensors, _ = read_tensors(folder / FILE)
            words, counts, table = tuple(kept["words"]), np.array(kept["counts"]), tensors["vectors"]
        except FileNotFoundError as error:
            raise InputError(f"{folder}: no word vectors: {Path(error.filename or FILE).name} is missing") from None
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{folder}: broken word vectors: {error}") from None
        if not len(words) == len(counts) == len(table):
            raise InputError(f"{folder}: {len(words)} words, {len(counts)} counts and {len(table)} vectors")
        return cls(words, counts, table, kept["about"])


def search(vectors: Vectors, texts: Sequence[str], query: str, top: int = 10) -> list[tuple[int, float]]:
    """(number of the text, cosine) of those nearest to a query by the mean of their words' vectors."""
    wanted = vectors.text(query)
    if not bool(wanted.any()):
        raise UsageError(f"no word of {query!r} has a vector")
    means = torch.nn.functional.normalize(torch.stack([vectors.text(text) for text in texts]), dim=1)
    best = (means @ (wanted / wanted.norm())).topk(min(top, len(texts)))
    return [(number, value) for value, number in zip(*(x.tolist() for x in best), strict=True)]
