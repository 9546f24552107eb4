"""Matrices and tables without values. `initialise` or a checkpoint sets them.

torch's own modules draw values as they are made: wasted, and on meta it imports the compiler, which takes a second.
"""

import torch
from torch import nn


class Projection(nn.Linear):
    """x Wᵀ + b: […, in] → […, out]; a torch.nn.Linear in every respect but that nothing is drawn."""

    def reset_parameters(self) -> None:
        pass


def table(rows: int, dim: int) -> nn.Embedding:
    """A table of vectors, looked up by id."""
    return nn.Embedding(rows, dim, _weight=torch.empty(rows, dim))
