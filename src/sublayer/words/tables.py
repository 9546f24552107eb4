"""What the word vector models share: AdaGrad on rows of tables, and training that goes on where it was stopped."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..errors import InputError, UsageError
from ..files import read_tensors, replacing, write_tensors
from .corpus import Corpus
from .vectors import Vectors

UNFINISHED = "unfinished.safetensors"


class Tables(ABC):
    """A model of tables; an epoch depends on the seed, its number and the tables, and on nothing else."""

    corpus: Corpus
    settings: dict[str, Any]
    """All that changes what is learned."""
    tensors: dict[str, Tensor]
    """The tables and their sums of squares."""

    @abstractmethod
    def epoch(self, number: int) -> float:
        """Goes over the corpus once and returns the mean loss."""

    @abstractmethod
    def vectors(self) -> Vectors:
        """What has been learned."""


def fit(
    model: Tables, epochs: int, folder: Path | str | None = None, tell: Callable[[int, float], None] | None = None
) -> Vectors:
    """Trains for `epochs` and returns the vectors; tell: is given each epoch and its loss.

    With a folder the vectors are saved there in the end, and after each epoch all that training needs: a call that is
    stopped goes on there, and ends with the same vectors as if it had never been. Raises UsageError for fewer epochs
    than 1, and for a folder in which another training is unfinished.
    """
    if epochs < 1:
        raise UsageError(f"epochs={epochs}: at least 1")
    about = json.dumps({"corpus": model.corpus.stamp, "epochs": epochs, **model.settings}, sort_keys=True)
    unfinished = None if folder is None else Path(folder) / UNFINISHED
    done = 0
    if unfinished is not None:
        unfinished.parent.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():
            done = _taken_up(model, unfinished, about)
    for number in range(done, epochs):
        loss = model.epoch(number)
        if unfinished is not None and number + 1 < epochs:
            with replacing(unfinished) as beside:
                write_tensors(beside, model.tensors, {"about": about, "done": str(number + 1)})
        if tell is not None:
            tell(number + 1, loss)
    vectors = model.vectors()
    if unfinished is not None:
        vectors.save(unfinished.parent)
        unfinished.unlink(missing_ok=True)
    return vectors


def _taken_up(model: Tables, path: Path, about: str) -> int:
    try:
        tensors, metadata = read_tensors(path)
        before, done = metadata["about"], int(metadata["done"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise InputError(f"{path}: no unfinished training ({error}); remove it to begin anew") from None
    if before != about:
        raise UsageError(f"{path}: a training with other text or settings is unfinished; remove it, or go on with it")
    model.tensors = tensors
    return done


def adagrad(table: Tensor, squares: Tensor, rows: Tensor, gradients: Tensor, rate: float) -> None:
    """Moves rows [n] of a table [V, …] against gradients [n, …]; those of one row are added up first.

    squares [V, …] is the sum of squared gradients so far. Source: Duchi et al. 2011.
    """
    distinct, place = rows.unique(return_inverse=True)
    total = gradients.new_zeros(len(distinct), *gradients.shape[1:]).index_add_(0, place, gradients)
    known = squares[distinct].addcmul_(total, total)
    squares[distinct] = known
    table.index_add_(0, distinct, total / known.sqrt(), alpha=-rate)
