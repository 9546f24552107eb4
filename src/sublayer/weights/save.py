"""Saving a model as a folder of safetensors. Nothing written is lost: files are written beside, then renamed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UsageError, WeightsError
from ..files import replacing, stream_tensors
from ..names import Row, expand
from ..nn.sublayer import ModelOp
from ..recipes import names, to_hf
from .load import Progress

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

Kind = tuple[torch.dtype, tuple[int, ...]]


def save(
    model: ModelOp,
    path: Path | str,
    *,
    layout: Literal["sublayer", "hf"] = "sublayer",
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Writes model.safetensors and spec.json, or, as "hf", config.json and the names transformers reads.

    dtype: of the stored values; the parameters' own, if None. shard_size: bytes above which the weights are cut into
    several files, with an index; a tensor larger than that has a file of its own. Beside the model, memory for one
    tensor is taken. A tied head is stored once.
    Raises, before anything that stood there is touched: SpecError for a model no Hugging Face class has; WeightsError
    for a model without values, for a folder that holds a checkpoint of another layout, beside which this one would not
    be read, for a value that float16 cannot hold, and for a file that cannot be written.
    """
    if layout not in ("sublayer", "hf"):
        raise UsageError(f'layout={layout!r}: "sublayer" or "hf"')
    folder = Path(path)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if any(parameter.is_meta for parameter in parameters.values()):
        raise WeightsError("the model was built on meta and has no values to save")
    dtype = dtype or next(iter(parameters.values())).dtype
    if dtype not in DTYPES.values():
        raise UsageError(f"dtype={dtype}: weights are stored as one of {', '.join(DTYPES)}")
    if layout == "hf":
        config, family = to_hf(model.spec)
        kept = {"dtype": str(dtype).removeprefix("torch.")} if "architectures" in config else {}  # not in diffusers
        about: dict[str, Any] = config | kept
        rows = expand(names(family, model.spec), model)
        described, stem = "config.json", getattr(family, "FILE", "model")
    else:
        about, rows = model.spec.to_json(), [Row(name, name) for name in parameters]
        described, stem = "spec.json", "model"
    shards = _shards(stem, _kinds(rows, parameters, dtype), shard_size)
    whole, index = f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    others = {"spec.json", "config.json", whole, index} - {described} - ({whole} if whole in shards else set())
    other = next((name for name in sorted(others) if (folder / name).exists()), None)
    if other is not None:
        raise WeightsError(
            f"{folder}: holds {other} of another checkpoint; save into another folder, or remove that one"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as beside:  # all are whole before any is renamed; the description is the last
            description = beside.enter_context(replacing(folder / described))
            if whole not in shards:
                _write_json(beside.enter_context(replacing(folder / index)), _index(shards))
            total = sum(map(_bytes, shards.values()))
            tensors = _tensors(rows, parameters, dtype, progress, total)
            for name, kinds in shards.items():
                file = beside.enter_context(replacing(folder / name))
                stream_tensors(file, kinds, islice(tensors, len(kinds)))
            if progress:
                progress("writing", total, total)
            _write_json(description, about)
    except OSError as error:
        raise WeightsError(f"{error.filename or folder}: cannot be written: {error.strerror}") from None


def _kinds(rows: Sequence[Row], parameters: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Kind]:
    """What the rows' tensors will be, from shapes alone."""
    bare = {name: torch.empty_like(parameter, device="meta") for name, parameter in parameters.items()}
    return {name: (dtype, tuple(tensor.shape)) for name, tensor in _tensors(rows, bare, dtype)}


@torch.no_grad()
def _tensors(
    rows: Sequence[Row],
    parameters: Mapping[str, Tensor],
    dtype: torch.dtype,
    progress: Progress | None = None,
    total: int = 0,
) -> Iterator[tuple[str, Tensor]]:
    """Their names and tensors, made one row after the other."""
    done = 0
    for row in rows:
        theirs = row.change.back([parameters[name] for name in row.our_names])
        for name, tensor in zip(row.their_names, theirs, strict=True):
            stored = tensor.to(dtype)
            if dtype == torch.float16 and not tensor.is_meta and bool((stored.isinf() & tensor.isfinite()).any()):
                most = float(tensor.abs().max())
                raise WeightsError(f"{name}: holds {most:.6g}, beyond float16's 65504; save as bfloat16 or float32")
            yield name, stored
            done += tensor.numel() * dtype.itemsize
            if progress:
                progress("writing", done, total)


def _shards(stem: str, kinds: Mapping[str, Kind], largest: int | None) -> dict[str, dict[str, Kind]]:
    """File → its tensors, in order."""
    shards = cut({name: _bytes({name: kind}) for name, kind in kinds.items()}, largest)
    count = len(shards)
    files = [f"{stem}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    files = files if count > 1 else [f"{stem}.safetensors"]
    return {file: {name: kinds[name] for name in shard} for file, shard in zip(files, shards, strict=True)}


def cut(sizes: Mapping[str, int], largest: int | None) -> list[list[str]]:
    """Names of tensors in turn, in groups whose bytes are at most so many together; a larger tensor is a group itself.

    Raises UsageError for no number of bytes.
    """
    if largest is not None and largest < 1:
        raise UsageError(f"shard_size={largest}: a number of bytes above 0")
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if largest is not None and groups[-1] and filled + size > largest:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    return groups


def _index(shards: Mapping[str, Mapping[str, Kind]]) -> dict[str, Any]:
    return {
        "metadata": {"total_size": sum(map(_bytes, shards.values()))},
        "weight_map": {name: file for file, shard in shards.items() for name in shard},
    }


def _bytes(kinds: Mapping[str, Kind]) -> int:
    return sum(dtype.itemsize * prod(shape) for dtype, shape in kinds.values())


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
