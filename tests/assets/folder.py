"""A folder of Sublayer's from a table of names and another container's tensors."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

import sublayer
from sublayer.names import Row, expand
from sublayer.nn.sublayer import Model


@torch.no_grad()
def write(folder: Path, spec: Model, names: Sequence[Row], theirs: Mapping[str, Tensor]) -> Path:
    """Writes spec.json and model.safetensors; all of `theirs` are used, each once."""
    model, left = spec.empty(), dict(theirs)
    for row in expand(names, model):
        ours = row.change.into([left.pop(name) for name in row.their_names])
        for name, value in zip(row.our_names, ours, strict=True):
            parameter = model.get_parameter(name)
            assert parameter.shape == value.shape, name
            parameter.copy_(value)
    assert not left, sorted(left)
    sublayer.save(model, folder)
    return folder
