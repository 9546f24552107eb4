"""Episodes: what a robot saw and did, a safetensors file each; headers are read at once, the rest step by step.

A file holds "actions" [T, A] floating, "images" uint8 [T, H, W, C] or [T, I, H, W, C] where there are any, and in its
metadata "instruction", a text.

T steps of an episode, A dimensions of an action, I images of an observation, C channels, H and W pixels.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from hashlib import blake2b
from math import prod
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import InputError
from ..files import replacing, write_tensors
from .batches import permuted

SUFFIX = ".safetensors"
FLOATS = ("F64", "F32", "F16", "BF16")
MAX_PIXELS = 2**26  # of the images of one step
MAX_ACTIONS = 2**27  # numbers of all episodes together, which ranges are taken of
MAX_INSTRUCTION = 1 << 16  # characters


@dataclass(frozen=True)
class Episode:
    """One file, of which no more than the header has been read."""

    path: Path
    steps: int
    """T."""
    dimensions: int
    """A."""
    shape: tuple[int, int, int, int] | None
    """(I, C, H, W) of a step's images; None where there are none."""
    instruction: str
    """What was to be done; "" where nothing is said."""

    def actions(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """float64 [steps, A]. Raises InputError naming the file for values that are not finite."""
        found = self._read("actions", start, self.steps if stop is None else stop).double().numpy()
        if not np.isfinite(found).all():
            raise InputError(f"{self.path}: actions from step {start} on are not all finite")
        return found

    def images(self, step: int) -> Tensor:
        """uint8 [I, H, W, C] of one step."""
        found = self._read("images", step, step + 1)[0]
        return found if found.dim() == 4 else found[None]

    def _read(self, name: str, start: int, stop: int) -> Tensor:
        try:
            with safe_open(self.path, "pt") as file:
                return file.get_slice(name)[start:stop]
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.path}: cannot be read: {error}") from None


def episodes(paths: str | Iterable[str], without: Path | None = None) -> list[Episode]:
    """The episodes of files, folders and globs, in the order of their names; what lies in `without` is left out.

    Raises InputError naming the file that is no episode, or whose sizes are not those of the first.
    """
    files = [file for path in ([paths] if isinstance(paths, str) else paths) for file in _files(path)]
    own = None if without is None else without.resolve()
    found = [_header(file) for file in files if own is None or own not in file.resolve().parents]
    if not found:
        raise InputError(f"{paths}: no episodes: expected files {SUFFIX} that hold actions")
    first = found[0]
    for other in found:
        if (other.dimensions, other.shape) != (first.dimensions, first.shape):
            said = [f"{one.dimensions} dimensions and images {one.shape}" for one in (other, first)]
            raise InputError(f"{other.path}: actions of {said[0]}; {first.path} has {said[1]}")
    return found


def write_episode(
    path: Path | str, actions: np.ndarray, images: np.ndarray | None = None, instruction: str = ""
) -> None:
    """Writes one episode, whole or not at all. actions: [T, A]; images: uint8 [T, H, W, C] or [T, I, H, W, C]."""
    tensors = {"actions": torch.as_tensor(actions)}
    if images is not None:
        tensors["images"] = torch.as_tensor(images)
    with replacing(path) as beside:
        write_tensors(beside, tensors, {"instruction": instruction})
        _header(beside)


def parted(source: Sequence[Episode], held: float) -> tuple[list[Episode], list[Episode]]:
    """Episodes to train on, and a share held out whole: a file's name alone decides on which side it falls.

    Raises InputError where that leaves one side empty.
    """
    digests = [blake2b(episode.path.name.encode(errors="replace"), digest_size=4).digest() for episode in source]
    kept = [int.from_bytes(digest, "little") / 2**32 < held for digest in digests]
    if all(kept) or not any(kept):
        raise InputError(
            f"too few episodes to hold out a share of {held}: {len(source):,}; give more, or a larger data.held"
        )
    sides = [[one for one, out in zip(source, kept, strict=True) if out == side] for side in (False, True)]
    return sides[0], sides[1]


def all_actions(source: Sequence[Episode]) -> np.ndarray:
    """float64 [N, A], of all steps. Raises InputError for more than memory is meant to hold."""
    count = sum(episode.steps * episode.dimensions for episode in source)
    if count > MAX_ACTIONS:
        raise InputError(f"{count:,} numbers of actions are more than {MAX_ACTIONS:,}")
    return np.concatenate([episode.actions() for episode in source])


def pixels(images: Tensor) -> Tensor:
    """uint8 […, H, W, C] → float32 […, C, H, W] from −1 to 1, as models of actions read them.

    Raises InputError for another dtype.
    """
    if images.dtype != torch.uint8:
        raise InputError(f"images of an observation are uint8, got {images.dtype}")
    return images.movedim(-1, -3).float().div(127.5).sub(1)


class Moments:
    """All moments of some episodes that `steps` actions follow, in an order that the seed alone decides."""

    def __init__(self, source: Sequence[Episode], steps: int, seed: int = 0) -> None:
        """Raises InputError where no episode is so long."""
        self.source, self.steps, self.seed = [one for one in source if one.steps >= steps], steps, seed
        if not self.source:
            raise InputError(f"no episode has {steps} steps or more")
        self.firsts = np.cumsum([0, *(episode.steps - steps + 1 for episode in self.source)])

    def __len__(self) -> int:
        return int(self.firsts[-1])

    def __getitem__(self, number: int) -> tuple[Episode, int]:
        """(episode, step), by number in the order of the files."""
        owner = int(np.searchsorted(self.firsts, number, "right")) - 1
        return self.source[owner], int(number - self.firsts[owner])

    def drawn(self, row: int) -> tuple[Episode, int]:
        """The moment of a row of the endless list of all epochs; each is another order of all moments."""
        epoch, turn = divmod(row, len(self))
        digest = blake2b(f"episodes {self.seed} {epoch}".encode(), digest_size=48).digest()
        keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, 48, 8)]
        return self[permuted(turn, len(self), keys)]


def _files(path: str) -> list[Path]:
    if Path(path).is_dir():
        return sorted(file for file in Path(path).rglob(f"*{SUFFIX}") if not file.name.startswith("."))
    found = (
        sorted(map(Path, glob(path, recursive=True))) if has_magic(path) and not os.path.exists(path) else [Path(path)]
    )
    return [file for file in found if not file.is_dir()]


def _header(path: Path) -> Episode:
    try:
        with safe_open(path, "pt") as file:
            names: list[str] = file.keys()
            held = {name: file.get_slice(name) for name in names if name in ("actions", "images")}
            sizes = {name: (tuple[int, ...](part.get_shape()), str(part.get_dtype())) for name, part in held.items()}
            instruction = (file.metadata() or {}).get("instruction", "")
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: not a safetensors file: {error}") from None
    shape, kind = sizes.get("actions", ((), ""))
    if len(shape) != 2 or not prod(shape) or kind not in FLOATS:
        raise InputError(f"{path}: actions are floating [T, A], got {kind or 'none'} {list(shape)}")
    if len(instruction) > MAX_INSTRUCTION:
        raise InputError(f"{path}: an instruction of more than {MAX_INSTRUCTION:,} characters")
    if "images" not in sizes:
        return Episode(path, shape[0], shape[1], None, instruction)
    seen, kind = sizes["images"]
    if len(seen) not in (4, 5) or kind != "U8" or seen[0] != shape[0] or not 0 < prod(seen[1:]) <= MAX_PIXELS:
        wanted = f"uint8 [{shape[0]}, H, W, C] or [{shape[0]}, I, H, W, C], of at most {MAX_PIXELS:,} values a step"
        raise InputError(f"{path}: images are {wanted}, got {kind} {list(seen)}")
    count, height, width, channels = seen[1:] if len(seen) == 5 else (1, *seen[1:])
    return Episode(path, shape[0], shape[1], (count, channels, height, width), instruction)
