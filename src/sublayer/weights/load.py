"""Loading a checkpoint: spec, config.json or GGUF metadata → model on meta → tensors streamed in, one at a time."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError, UsageError, WeightsError
from ..files import read_bounded
from ..gguf_header import models_in, read_header
from ..names import SAME, Row, expand, matches
from ..nn.sublayer import Model, ModelOp
from ..recipes import from_hf, ignored, names
from .gguf import Architecture, Source, reader
from .gguf.checkpoint import GgufCheckpoint
from .hub import local
from .safetensors import SCALED, SafeTensors
from .scaled import Scaled, quantisation

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
PICKLES = "pickled weights can run code and are not read; convert to safetensors"
MAX_JSON_BYTES = 64 << 20  # no config or index of a real model comes near


Progress = Callable[[str, int, int], object]
"""Called with what is done ("reading", "writing"), the bytes so far, and of how many."""


def load(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> ModelOp:
    """The model of a folder, Sublayer's (spec.json) or Hugging Face's (config.json), or of a GGUF file (or of a folder
    with one and no more), in evaluation mode; or of the hub, as "org/name" or "org/name@revision" (see `hub.local`).

    Weights are converted to dtype; GGUF's quantised blocks are dequantised, with a warning. Raises WeightsError, naming
    tensor and file, for a file cut short and for missing, extra or mis-shaped tensors; SpecError for an architecture or
    a config key that no recipe models; UsageError for a device that is not there. Pickled files are never read.
    """
    _check_device(device)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UsageError(f"dtype={dtype!r}: expected a floating-point dtype, such as torch.float32")
    with _opened(local(path)) as (spec, family, files):
        unread = ignored(family, spec) if family is not None else ()
        spell = _spelling(family, files)
        if family is not None:
            spec, tied = _settle_tying(spec, family, files, spell)
            unread = (*unread, *map(spell, unread), *tied)
        _check_layers(spec, files, path)
        model = spec.empty(device="meta")
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        table = names(family, spec) if family is not None else None
        rows = [Row(name, name) for name in shapes] if table is None else expand(table, model, len(files.names))
        rows = [Row(tuple(map(spell, row.their_names)), row.ours, row.change) for row in rows]
        _check_names(files, rows, unread, path)
        for row in rows:
            _check_shapes(row, files, shapes)
        model.make_room(device, dtype)  # only now: a file that does not fit costs no memory
        _fill_all(rows, files, model, progress)
    return model.eval()


def load_into(model: ModelOp, path: Path | str) -> None:
    """Fills a model from a folder of Sublayer's layout that holds the same architecture.

    Raises WeightsError as `load`, before any weight has changed where a name or a shape does not fit.
    """
    with Checkpoint.open(Path(path)) as files:
        shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
        rows = [Row(name, name) for name in shapes]
        _check_names(files, rows, (), path)
        for row in rows:
            _check_shapes(row, files, shapes)
        _fill_all(rows, files, model)


def _fill_all(rows: list[Row], files: Files, model: ModelOp, progress: Progress | None = None) -> None:
    parameters = dict(model.named_parameters())
    done, total = 0, sum(parameter.nbytes for parameter in parameters.values())
    for row in rows:
        _fill(row, files, parameters)
        done += sum(parameters[name].nbytes for name in row.our_names)
        if progress:
            progress("reading", done, total)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Model, Any, Files]]:
    """(spec, the recipe's module that read it, the tensors)"""
    file = gguf_file(path)
    if file is not None:
        source = _read_source(file)
        table, config, spec, family = _read_gguf(source)
        yield spec, family, GgufCheckpoint(source, table, config)
        return
    spec, family = read_spec(path)
    with Checkpoint.open(path, getattr(family, "FILE", "model")) as files:
        method = quantisation(read_json(path / "config.json"))[1] if family is not None else None
        yield spec, family, files if method is None else Scaled(files, method)


def _check_device(device: torch.device | str) -> None:
    if str(device) == "meta":
        raise UsageError("device 'meta' holds no values; Model.build(device=\"meta\") makes a model without weights")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter is torch's for a backend that is not built in
        raise UsageError(f"device {str(device)!r} cannot be used: {str(error).splitlines()[0]}") from None


def read_spec(folder: Path) -> tuple[Model, Any]:
    """The spec of a folder or a GGUF file, and the recipe's module that read it from config.json or what says the same
    (None: it was in spec.json).

    Raises WeightsError for a folder with neither, SpecError naming the file for what is not known or modelled.
    """
    folder = local(folder, weights=False)
    file = gguf_file(folder)
    if file is not None:
        return _read_gguf(_read_source(file))[2:]
    if not folder.is_dir():
        raise WeightsError(f"{folder}: {_why_not(folder)}")
    ours, theirs = folder / "spec.json", folder / "config.json"
    path = ours if ours.exists() else theirs
    if not path.exists():
        inner = f"; its result is {folder / 'model'}" if (folder / "model" / "spec.json").exists() else ""
        raise WeightsError(f"{folder}: neither spec.json (Sublayer) nor config.json (Hugging Face) is in it{inner}")
    try:
        return (Model.from_json(read_json(ours)), None) if path is ours else from_hf(quantisation(read_json(theirs))[0])
    except SpecError as error:
        raise SpecError(f"{path}: {error}") from None


def _why_not(path: Path) -> str:
    """Why no model is read from a path that is no folder."""
    if not path.exists():
        beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
        close = get_close_matches(path.name, [one.name for one in beside], n=1)
        return f"no such folder (did you mean {close[0]!r}?)" if close else "no such folder"
    if path.suffix in PICKLED:
        return PICKLES
    inside = "the folder that holds it" if path.suffix in (".safetensors", ".json") else "a folder or a .gguf file"
    return f"expected {inside}"


def read_config(path: Path) -> dict[str, Any] | None:
    """What config.json says, or what a GGUF file's metadata say as one; None for a folder of Sublayer's own."""
    file = gguf_file(path)
    if file is not None:
        return _read_gguf(_read_source(file))[1]
    return None if (path / "spec.json").exists() else read_json(path / "config.json")


def stored_dtype(path: Path | str) -> torch.dtype:
    """The narrowest dtype that holds every weight of a checkpoint as it is stored; float32 for quantised blocks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of blocks `load` tells
        with _opened(Path(path)) as (_, _, files):
            kinds = {files.dtype(name) for name in files.names}
    floats = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
    found = torch.float16 if kinds & floats.keys() == {"F16"} else torch.bfloat16
    for kind in kinds & floats.keys():
        found = torch.promote_types(found, floats[kind])
    return found if kinds & floats.keys() else torch.float32


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names: it, or that of the one model in a folder without another description; of a model
    in parts the first."""
    if path.suffix == ".gguf" and not path.is_dir():
        return path
    if not path.is_dir() or any((path / name).exists() for name in ("spec.json", "config.json")):
        return None
    found = models_in(path)
    if len(found) > 1:
        raise WeightsError(f"{path}: holds {found[0].name} and {len(found) - 1} more GGUF models; name one of them")
    return found[0] if found else None


def _read_source(file: Path) -> Source:
    header = read_header(file)
    try:
        return Source(header)
    except SpecError as error:
        raise SpecError(f"{file}: {error}") from None


def _read_gguf(source: Source) -> tuple[Architecture, dict[str, Any], Model, Any]:
    """(table, config.json, spec, the recipe's module)"""
    try:
        table = reader(source)
        config = table.config(source)
        spec, family = from_hf(config)
    except SpecError as error:
        raise SpecError(f"{source.path}: {error}") from None
    except (TypeError, ValueError, AttributeError, KeyError, ArithmeticError) as error:  # as recipes.from_hf has it
        raise SpecError(f"{source.path}: its metadata hold a value of the wrong type: {error}") from None
    return table, config, spec.replace(head=None, tied=False) if table.headless else spec, family


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file of bounded size. Raises WeightsError naming the file and the place of a mistake."""
    try:
        data = json.loads(read_bounded(path, MAX_JSON_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(data, dict):
        raise WeightsError(f"{path}: expected a JSON object")
    return data


class Checkpoint:
    """The files of a folder, opened together: which tensor lies where, read one at a time."""

    def __init__(self, where: dict[str, SafeTensors]) -> None:
        self.where = where
        self.names = where.keys()

    @classmethod
    @contextmanager
    def open(cls, folder: Path, stem: str = "model") -> Iterator[Checkpoint]:
        """STEM.safetensors, or all shards of an index. Raises WeightsError for a broken or doubled one."""
        where: dict[str, SafeTensors] = {}
        for path, listed in _files(folder, stem).items():
            opened = SafeTensors(path)
            for name in opened.names:
                if name in where:
                    raise WeightsError(f"{path}: tensor {name} is also in {where[name].path.name}")
                where[name] = opened
            lost = next((name for name in listed if name not in opened.entries), None)
            if lost is not None:
                raise WeightsError(
                    f"{path}: tensor {lost} is missing, which {stem}.safetensors.index.json places there"
                )
        yield cls(where)

    def read(self, name: str) -> Tensor:
        """A view of the file's memory map, not to be written to."""
        return self.where[name].read(name)

    def shape(self, name: str) -> list[int]:
        return self.where[name].shape(name)

    def dtype(self, name: str) -> str:
        """As safetensors writes it: "F32", "BF16", "I64"."""
        return self.where[name].dtype(name)

    def read_into(self, name: str, whole: Tensor) -> None:
        """Fills a tensor, and lets go of the pages that its values were read from."""
        whole.copy_(self.read(name))
        self.where[name].release(name)

    def file(self, name: str) -> Path:
        return self.where[name].path

    def called(self, name: str) -> str:
        """What the file calls a tensor, there or not."""
        return name


Files = Checkpoint | GgufCheckpoint | Scaled


def _files(folder: Path, stem: str) -> dict[Path, list[str]]:
    """The files of a checkpoint, and the tensors that an index says are in each."""
    whole = folder / f"{stem}.safetensors"
    if whole.exists():  # before an index, as transformers has it
        return {whole: []}
    index = folder / f"{stem}.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(isinstance(name, str) for name in shards.values()):
            raise WeightsError(f"{index}: weight_map is missing or not a table of file names")
        names = sorted(set(shards.values()))
        bad = next((name for name in names if Path(name).name != name or not name.endswith(".safetensors")), None)
        if bad is not None:
            raise WeightsError(f"{index}: {bad!r} is not a safetensors file of this folder")
        here = {path.name for path in folder.iterdir()}  # what is no name of a file at all is asked for nowhere
        missing = next((name for name in names if name not in here), None)
        if missing is not None:
            raise WeightsError(f"{index}: shard {missing} is missing")
        listed: dict[Path, list[str]] = {folder / name: [] for name in names}
        for tensor, name in shards.items():
            listed[folder / name].append(tensor)
        return listed
    pickled = next((p.name for p in folder.iterdir() if p.suffix in PICKLED), None)
    if pickled is not None:
        raise WeightsError(f"{folder / pickled}: {PICKLES}")
    raise WeightsError(f"{folder}: no {stem}.safetensors and no {stem}.safetensors.index.json")


def _settle_tying(spec: Model, family: Any, files: Files, spell: Callable[[str], str]) -> tuple[Model, tuple[str, ...]]:
    """(spec, names of tensors not read): a head stored beside a tied embedding is kept where it differs, for the
    weights win over the config's flag."""
    theirs = {row.our_names[0]: spell(row.their_names[0]) for row in names(family, spec)}
    head = theirs.get("head.weight")
    if not spec.tied or head is None or head not in files.names:
        return spec, ()
    table = theirs[f"{'decoder' if spec.decoder else 'encoder'}.embed.tokens.weight"]
    if table not in files.names:
        return spec, (head,)
    one, other = files.read(head), files.read(table)
    pairs = zip(one.split(1024), other.split(1024), strict=False)  # in parts: the wider copies stay small
    if one.shape == other.shape and all(torch.equal(a.double(), b.double()) for a, b in pairs):
        return spec, (head,)
    warnings.warn(f"{head} differs from {table} though the config ties them: kept apart", stacklevel=3)
    return spec.replace(tied=False), ()


def _spelling(family: Any, files: Files) -> Callable[[str], str]:
    """From a name in a family's table to the one in the files: those of a base class lack its PREFIX, those of a model
    of several parts have one of PREFIXES in its place, and older ones RENAMED ends."""
    prefix, others = getattr(family, "PREFIX", ""), getattr(family, "PREFIXES", ())
    found = next((p for p in (*others, prefix) if any(name.startswith(p) for name in files.names)), "")
    ends = [
        (new, old) for new, old in getattr(family, "RENAMED", ()) if any(name.endswith(old) for name in files.names)
    ]

    def spell(name: str) -> str:
        name = found + name.removeprefix(prefix) if name.startswith(prefix) else name
        for new, old in ends:
            name = name.removesuffix(new) + old if name.endswith(new) else name
        return name

    return spell


def _check_layers(spec: Model, files: Files, path: Path | str) -> None:
    """Before they are built, even without memory: each layer takes a tensor at least."""
    layers = sum(len(trunk.blocks) for trunk in (spec.encoder, spec.decoder) if trunk is not None)
    if layers > len(files.names):
        raise WeightsError(f"{path}: the description has {layers} layers, the checkpoint {len(files.names)} tensors")


def _check_names(files: Files, rows: list[Row], ignored: Iterable[str], path: Path | str) -> None:
    wanted = {name for row in rows for name in row.their_names}
    missing = sorted(wanted - files.names)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightsError(
            f"{path}: tensor {files.called(missing[0])}{more} missing from the checkpoint, which has"
            f" {len(files.names)} tensors"
        )
    extra = sorted(name for name in files.names - wanted if not matches(ignored, name))
    if extra:
        more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
        raise WeightsError(f"{files.file(extra[0])}: tensor {files.called(extra[0])}{more} has no place in the model")


def _check_shapes(row: Row, files: Files, shapes: dict[str, torch.Size]) -> None:
    """Tries the row's change on shapes alone."""
    for name in row.their_names:
        dtype = files.dtype(name)
        if dtype in SCALED:
            raise WeightsError(
                f"{files.file(name)}: {files.called(name)} holds {dtype}, which needs scales that no recipe models; "
                "load a release in BF16, or dequantise it first"
            )
        if dtype not in ("F64", "F32", "F16", "BF16"):
            raise WeightsError(f"{files.file(name)}: {files.called(name)} holds {dtype}, not floating-point weights")
    name = row.their_names[0]
    given = [files.shape(name) for name in row.their_names]
    wanted = [list(shapes[name]) for name in row.our_names]
    try:
        found = [list(t.shape) for t in row.change.into([torch.empty(shape, device="meta") for shape in given])]
    except (RuntimeError, IndexError, ValueError):
        found = None
    if found != wanted:
        parts = ", ".join(f"{ours} {shape}" for ours, shape in zip(row.our_names, wanted, strict=True))
        raise WeightsError(
            f"{files.file(name)}: {files.called(name)} is {given[0]}, which does not give the model's {parts}"
        )


@torch.no_grad()
def _fill(row: Row, files: Files, parameters: dict[str, torch.nn.Parameter]) -> None:
    if row.change is SAME:
        files.read_into(row.their_names[0], parameters[row.our_names[0]])
        return
    ours = row.change.into([files.read(name) for name in row.their_names])
    for key, value in zip(row.our_names, ours, strict=True):
        parameters[key].copy_(value)
