"""Writing files so that nothing already written is ever lost, and tensors without pickle."""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from glob import escape
from math import prod
from pathlib import Path
from shutil import rmtree
from stat import S_ISDIR, S_ISREG
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor

NOT_WAITING = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # each on the systems that have it
MAP_NORESERVE = 0x4000  # Linux's; Python has a name for it from 3.13 on


@contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Yields a path beside `path` to write to; on success it is fsynced and renamed over `path`, else removed.

    What a killed process left beside `path` is removed too.
    """
    path = Path(path)
    clean(path.parent, escape(path.name))
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.touch()
        mode = beside.stat().st_mode  # what a new file gets here; some writers make private ones
        beside.unlink()
        yield beside
        beside.chmod(mode)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
        _sync(path.parent)
    except OSError as error:
        # A write does not know its file; and the name beside it is nothing to a user.
        if error.errno is not None and error.filename in (None, str(beside)):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path | str, data: Any) -> None:
    """Writes as UTF-8, through `replacing`; half a character, as in a path of other bytes, as JSON's \\ud8ff."""
    text = json.dumps(data, ensure_ascii=False, indent=1) + "\n"
    with replacing(path) as beside:
        beside.write_bytes(text.encode("utf-8", "backslashreplace"))


@contextmanager
def replacing_folder(path: Path | str) -> Iterator[Path]:
    """Yields a new folder beside `path` to write to; on success it takes the place of `path`, else it is removed.

    What stood at `path` goes, so whoever calls makes sure that it may. What killed processes left is removed too.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    clean(path.parent, escape(path.name))
    beside, former = (path.with_name(f".{path.name}{kind}.{os.getpid()}.partial") for kind in ("", ".former"))
    try:
        beside.mkdir()
        yield beside
        for file in beside.iterdir():
            _sync(file)
        _sync(beside)
        if path.exists():
            os.rename(path, former)
        os.rename(beside, path)
        _sync(path.parent)
    except OSError as error:  # the name beside it is nothing to a user
        if error.errno is not None and str(error.filename).startswith(str(beside)):
            raise OSError(error.errno, error.strerror, str(error.filename).replace(str(beside), str(path))) from error
        raise
    finally:
        if former.exists() and not path.exists():
            os.rename(former, path)
        for folder in (beside, former):
            rmtree(folder, ignore_errors=True)


def clean(folder: Path, pattern: str) -> None:
    """Removes what killed processes have left of files and folders whose names were to match a pattern."""
    for left in folder.glob(".*.partial"):
        name, _, process = left.name[1:].removesuffix(".partial").rpartition(".")
        if not fnmatchcase(name.removesuffix(".former"), pattern):
            continue
        if process == str(os.getpid()) or not _alive(process):  # in a container every process may have the same number
            if left.is_dir():
                rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _alive(process: str) -> bool:
    """Whether a process of this number may still be writing."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (ValueError, PermissionError):
        return True
    return True


def open_regular(path: Path) -> BinaryIO:
    """A file opened for reading; never a pipe or a device, which might never answer. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | NOT_WAITING)  # what it is is asked of what was opened, not of the name
    mode = os.fstat(handle).st_mode
    if S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    raise OSError(f"{'a folder' if S_ISDIR(mode) else 'a pipe or a device'}, not a file")


def read_bounded(path: Path, most: int) -> bytes:
    """The whole of a regular file. Raises OSError where it cannot be read, or has more than so many bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise OSError(f"{size} bytes, more than {most}")
        return file.read(size)


def mapped(file: BinaryIO) -> mmap.mmap:
    """A file as memory, whose pages are copied where they are written to: no write reaches the file.

    No memory is set aside for such copies, so that a file larger than the machine's memory can be mapped and its
    header read. Raises OSError, and ValueError for an empty file.
    """
    if sys.platform != "linux":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | MAP_NORESERVE
    return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One safetensors file. Raises SafetensorError or OSError where it cannot be written."""
    from safetensors.torch import save_file

    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, dict(metadata))


def stream_tensors(
    path: Path, kinds: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """One safetensors file of the tensors that `kinds` announces, in that order; only one at a time is in memory.

    Raises ValueError for a tensor that is not as announced, OSError where the file cannot be written.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in kinds.items():
        begin, end = end, end + dtype.itemsize * prod(shape)
        header[name] = {"dtype": _SAFETENSORS[str(dtype)], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the values are aligned
    given = iter(tensors)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, kind in kinds.items():
            found, tensor = next(given)
            if (found, (tensor.dtype, tuple(tensor.shape))) != (name, kind):
                raise ValueError(
                    f"{found}: a {tensor.dtype} of {list(tensor.shape)} where {name}, {kind} was announced"
                )
            file.write(raw(tensor))


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor's values, in order; not copied where they lie so already."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


_SAFETENSORS = {"torch.float64": "F64", "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16"}


def read_tensors(
    path: Path | str, device: torch.device | str | None = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors, metadata) of a safetensors file. Raises SafetensorError or OSError for one that is not whole."""
    from safetensors import safe_open

    with safe_open(path, "pt", device=str(device or "cpu")) as file:
        names: list[str] = file.keys()
        return {name: file.get_tensor(name) for name in names}, file.metadata() or {}
