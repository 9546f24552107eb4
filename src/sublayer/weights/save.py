"""Saving a model as a folder of safetensors. Nothing written is lost: files are written beside, then renamed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError
from torch import Tensor

from ..errors import UsageError, WeightsError
from ..files import replacing, write_tensors
from ..names import expand
from ..nn.sublayer import ModelOp
from ..recipes import names, to_hf


def save(model: ModelOp, path: Path | str, *, layout: Literal["sublayer", "hf"] = "sublayer") -> None:
    """Writes model.safetensors and spec.json, or, as "hf", config.json and the names transformers reads.

    A tied head is stored once. Raises, before anything that stood there is touched: SpecError for a model no Hugging
    Face class has; WeightsError for a model without values, for a folder that holds a checkpoint of another layout or
    in shards, beside which this one would not be read, and for a file that cannot be written.
    """
    if layout not in ("sublayer", "hf"):
        raise UsageError(f'layout={layout!r}: "sublayer" or "hf"')
    folder = Path(path)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise WeightsError("the model was built on meta and has no values to save")
    if layout == "hf":
        config, family = to_hf(model.spec)
        dtype = next(iter(parameters.values())).dtype
        kept = {"dtype": str(dtype).removeprefix("torch.")} if "architectures" in config else {}  # not in diffusers
        about: dict[str, Any] = config | kept
        tensors: dict[str, Tensor] = {}
        for row in expand(names(family, model.spec), model):
            theirs = row.change.back([parameters[name] for name in row.our_names])
            tensors |= dict(zip(row.their_names, theirs, strict=True))
        described, name = "config.json", getattr(family, "FILE", "model")
    else:
        about, tensors = model.spec.to_json(), parameters
        described, name = "spec.json", "model"
    others = {"spec.json", "config.json", f"{name}.safetensors.index.json"} - {described}
    other = next((name for name in sorted(others) if (folder / name).exists()), None)
    if other is not None:
        raise WeightsError(
            f"{folder}: holds {other} of another checkpoint; save into another folder, or remove that one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Both are whole before either is renamed.
        with replacing(folder / f"{name}.safetensors") as weights, replacing(folder / described) as description:
            write_tensors(weights, tensors, {"format": "pt"})
            description.write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{folder}: cannot be written: {error}") from None
