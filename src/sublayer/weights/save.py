"""Saving a model as a folder of safetensors. Nothing already written is lost: each file is written beside, then renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..files import replacing
from ..names import expand
from ..nn.sublayer import ModelOp
from ..recipes import to_hf


def save(model: ModelOp, path: Path | str, *, layout: Literal["sublayer", "hf"] = "sublayer") -> None:
    """Writes model.safetensors and spec.json, or, as "hf", config.json and the names transformers reads.

    A tied head is stored once. Raises SpecError, before anything is written, for a model no Hugging Face class has.
    """
    folder = Path(path)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if layout == "hf":
        config, family = to_hf(model.spec)
        dtype = next(iter(parameters.values())).dtype
        about: dict[str, Any] = config | {"dtype": str(dtype).removeprefix("torch.")}
        tensors = {}
        for row in expand(family.NAMES, parameters):
            theirs = row.change.back([parameters[name] for name in row.our_names])
            tensors |= dict(zip(row.their_names, theirs, strict=True))
        described = "config.json"
    else:
        about, tensors, described = model.spec.to_json(), parameters, "spec.json"
    folder.mkdir(parents=True, exist_ok=True)
    _write_tensors(folder / "model.safetensors", tensors)
    with replacing(folder / described) as beside:
        beside.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    with replacing(path) as beside, torch.no_grad():
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside, {"format": "pt"})
