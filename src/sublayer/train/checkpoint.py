"""Checkpoints of a run: folders that are whole or not there, without pickle.

A checkpoint is a model's folder (model.safetensors, spec.json, tokenizer.json) with training.safetensors and
training.json beside: `sublayer generate` opens it as it is, and a run goes on from it.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ..errors import WeightsError
from ..files import clean, read_tensors, replacing, replacing_folder, write_json, write_tensors
from ..nn.sublayer import ModelOp
from ..text.tokenizer import Tokenizer
from ..weights.load import load_into, read_json
from ..weights.save import save

NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    path: Path
    step: int

    @property
    def facts(self) -> dict[str, Any]:
        """training.json: numbers of the run at this step. Raises WeightsError for a damaged file."""
        return read_json(self.path / "training.json")

    def tensors(self) -> dict[str, Tensor]:
        """The training state. Raises WeightsError for a damaged file."""
        try:
            return read_tensors(self.path / "training.safetensors")[0]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{self.path / 'training.safetensors'}: cannot be read: {error}") from None

    def load_into(self, model: ModelOp) -> None:
        """Fills the model. Raises WeightsError, before any weight has changed, for a damaged file."""
        load_into(model, self.path)


def write(
    folder: Path,
    step: int,
    model: ModelOp,
    tokenizer: Tokenizer | None,
    tensors: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> Saved:
    """Writes a checkpoint beside, then renames it, over what a run that went back had left of this step. Raises OSError
    or WeightsError, with all else untouched."""
    target = folder / f"step-{step:08d}"
    with replacing_folder(target) as beside:
        save(model, beside)
        if tokenizer is not None:
            tokenizer.save(beside)
        with replacing(beside / "training.safetensors") as path:
            write_tensors(path, tensors, {"step": str(step)})
        write_json(beside / "training.json", {"step": step, **facts})
    return Saved(target, step)


def saved(folder: Path) -> list[Saved]:
    """The checkpoints of a folder, the oldest first. What a killed process left is removed."""
    if not folder.is_dir():
        return []
    clean(folder, "step-*")
    found = [(int(match[1]), path) for path in folder.iterdir() if (match := NAME.fullmatch(path.name))]
    return [Saved(path, step) for step, path in sorted(found)]


def best(found: Iterable[Saved], fact: str) -> Saved | None:
    """The checkpoint with the lowest value of a fact; damaged ones, and those without it, are passed over."""
    values: list[tuple[float, int, Saved]] = []
    for one in found:
        with suppress(WeightsError):
            value = one.facts.get(fact)
            if isinstance(value, int | float) and math.isfinite(value):
                values.append((value, one.step, one))
    return min(values)[2] if values else None


def prune(folder: Path, keep: int, fact: str, regular: Callable[[Saved], bool] = lambda one: True) -> None:
    """Removes all but the newest, the `keep` newest regular ones, and the one with the lowest value of a fact."""
    found = saved(folder)
    kept = [best(found, fact), *found[-1:], *[one for one in found if regular(one)][-keep:]]
    for one in found:
        if one not in kept:
            # Renamed first: half a folder must never look like a checkpoint.
            gone = folder / f".{one.path.name}.{os.getpid()}.partial"
            os.rename(one.path, gone)
            shutil.rmtree(gone)
