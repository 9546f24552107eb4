"""Writing a GGUF file: the tables of this folder read backward, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFValueType, GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT, GGMLQuantizationType, LlamaFileType
from gguf.quants import quantize
from torch import Tensor

from ...errors import SpecError, UsageError, WeightsError
from ...files import replacing
from ...gguf_header import Header, Place
from ...names import Row, expand
from ...nn.sublayer import Model, ModelOp
from ...recipes import from_hf, names, to_hf
from ...recipes.difference import differences
from . import Architecture, Config, Source, writer
from .checkpoint import concrete
from .tensors import CHUNK

QUANTISED = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4")
"""What the gguf package can make of values."""
KINDS = ("f32", "f16", "bf16", *QUANTISED)

# Matrices that llama.cpp reads as F32 only, by their module's name: routers, tables of positions, convolutions.
FULL = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "token_types", "ssm_conv1d")
TRAINING = ("dropout", "balance_loss", "balance_rate", "z_loss")  # parts of a spec that do nothing when a model is run
LARGEST_HALF = 65504.0

Progress = Callable[[str, int, int], object]  # as load and save have it


@dataclass(frozen=True)
class Planned:
    """A tensor of the file to be."""

    row: Row
    """Hugging Face's tensors, and this one among GGUF's."""
    place: int
    """Which of the row's."""
    shape: tuple[int, ...]
    kind: str


def write_gguf(
    model: ModelOp,
    path: Path,
    *,
    kind: str = "f32",
    plain: str = "f16",
    about: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> None:
    """Writes a model's GGUF file, beside and then renamed.

    kind: of the matrices, one of KINDS; vectors and what llama.cpp reads as F32 only stay F32, and rows that are not
    whole blocks become `plain` ("f32", "f16" or "bf16"), of which `note` is told. about: more metadata, under full
    keys (the tokenizer's). config: keys of config.json that a spec does not say, such as max_position_embeddings.
    Raises UsageError for an unknown kind, SpecError for what the format cannot express, WeightsError for a value that
    F16 cannot hold and for a file that cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"quantize={kind!r}: one of {', '.join(KINDS)}")
    described, family = to_hf(model.spec)
    described = {**(config or {}), **described}
    table = writer(described)
    metadata = table.metadata(described) | _general(kind) | dict(about or {})
    computed = {name: tensor.float() for name, tensor in table.computed(described).items()}
    theirs = _Theirs(expand(names(family, model.spec), model), model)
    plan = _plan(table, described, theirs, kind, plain)
    _check(model.spec, table, metadata, plan, computed)
    if not described.keys() & {"max_position_embeddings", "n_positions"}:
        written = metadata[f"{table.name}.context_length"]
        note(f"nothing says how many tokens the model was trained on at once, and GGUF asks: {written:,} is written")
    narrow = [name for name, one in plan.items() if one.kind == plain.upper() and kind in QUANTISED]
    if narrow:
        block = GGML_QUANT_SIZES[_type(kind)][0]
        note(f"{len(narrow)} matrices stay {plain.upper()}, as their rows are no multiple of {block}: {narrow[0]}, …")
    try:
        with replacing(path) as beside:
            _write(beside, table.name, metadata, plan, computed, theirs, progress)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be written: {error}") from None


class _Theirs:
    """Hugging Face's tensors of a model, made when they are asked for."""

    def __init__(self, rows: Sequence[Row], model: ModelOp) -> None:
        self._rows = {name: (row, i) for row in rows for i, name in enumerate(row.their_names)}
        self._parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
        self._last: tuple[Row, list[Tensor]] | None = None
        self.names = self._rows.keys()

    def read(self, name: str, *, bare: bool = False) -> Tensor:
        """bare: on meta, with a shape and no values."""
        row, i = self._rows[name]
        if bare:
            return row.change.back([torch.empty_like(self._parameters[n], device="meta") for n in row.our_names])[i]
        if self._last is None or self._last[0] is not row:  # one of ours may be many of theirs, asked for in turn
            self._last = row, row.change.back([self._parameters[ours] for ours in row.our_names])
        return self._last[1][i]


def _plan(table: Architecture, config: Config, theirs: _Theirs, kind: str, plain: str) -> dict[str, Planned]:
    found: dict[str, Planned] = {}
    left = set(theirs.names)
    for row in concrete(table.rows(config), theirs.names, side="theirs"):
        left -= set(row.their_names)
        shapes = [tuple(t.shape) for t in row.change.into([theirs.read(name, bare=True) for name in row.their_names])]
        for i, (name, shape) in enumerate(zip(row.our_names, shapes, strict=True)):
            found[name] = Planned(row, i, shape, _kind(name, shape, kind, plain))
    if left:
        raise SpecError(f"GGUF's {table.name} has no tensor for {min(left)}")
    return found


def _kind(name: str, shape: tuple[int, ...], kind: str, plain: str) -> str:
    module, _, end = name.rpartition(".")
    inner = module.rpartition(".")[2]
    if len(shape) < 2 or end != "weight" or inner.endswith("_norm") or inner in FULL:
        return "F32"
    return kind.upper() if shape[-1] % GGML_QUANT_SIZES[_type(kind)][0] == 0 else plain.upper()


def _check(
    written: Model,
    table: Architecture,
    metadata: Mapping[str, Any],
    plan: Mapping[str, Planned],
    computed: Mapping[str, Tensor],
) -> None:
    """Raises SpecError unless what will be written reads back as the model's spec."""
    kept = {key: float(np.float32(v)) if isinstance(v, float) else v for key, v in metadata.items()}  # as it is stored
    places = {name: Place(one.shape, one.kind, 0, 0) for name, one in plan.items()}
    places |= {name: Place(tuple(tensor.shape), "F32", 0, 0) for name, tensor in computed.items()}
    source = Source(Header(Path("GGUF"), kept, places), _Computed(computed))  # pyright: ignore[reportArgumentType]
    spec, _ = from_hf(table.config(source))
    found = [one for one in differences(written, spec) if one.path.rpartition(".")[2] not in TRAINING]
    if found:
        path, mine, theirs = found[0]
        raise SpecError(f"GGUF's {table.name} cannot express {path}={mine!r}: it reads back as {theirs!r}")


class _Computed:
    """The few tensors whose values a table reads, before there is a file."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.names = tensors.keys()
        self._tensors = tensors

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def same(self, one: str, other: str) -> bool:
        return False  # a head of its own is written only where it is one


def _write(
    path: Path,
    name: str,
    metadata: Mapping[str, Any],
    plan: Mapping[str, Planned],
    computed: Mapping[str, Tensor],
    theirs: _Theirs,
    progress: Progress | None,
) -> None:
    file = _Writer(path, name)
    try:
        for key, value in metadata.items():
            if key != "general.architecture":  # which the writer has put there
                _add(file, key, value)
        sizes = {tensor: _bytes(one.shape, one.kind) for tensor, one in plan.items()}
        for tensor, values in computed.items():
            file.add_tensor_info(tensor, values.shape, np.dtype(np.float32), values.nbytes, _type("f32"))
        for tensor, one in plan.items():
            file.add_tensor_info(tensor, one.shape, np.dtype(np.float32), sizes[tensor], _type(one.kind))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        assert file.fout is not None
        out, done, total = file.fout[0], 0, sum(sizes.values())
        for values in computed.values():
            file.write_padding(out, out.tell())
            values.contiguous().numpy().tofile(out)
        for tensor, one in plan.items():
            file.write_padding(out, out.tell())
            for part in _values(tensor, one, theirs):
                out.write(part.data)
                done += part.nbytes
                if progress:
                    progress("writing", done, total)
        file.write_padding(out, out.tell())
    finally:
        file.close()


@torch.no_grad()
def _values(name: str, one: Planned, theirs: _Theirs) -> Iterator[np.ndarray]:
    """A tensor as it is stored, some rows at a time."""
    whole = one.row.change.into([theirs.read(their) for their in one.row.their_names])[one.place]
    rows = whole.reshape(-1, whole.shape[-1] if whole.dim() else 1)
    for part in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):
        values = np.ascontiguousarray(part.float().cpu().numpy())
        if one.kind == "F16" and (np.abs(values) > LARGEST_HALF).any():
            raise WeightsError(f"{name}: holds {np.abs(values).max():.6g}, beyond F16's {LARGEST_HALF:.0f}; use bf16")
        yield np.ascontiguousarray(quantize(values, _type(one.kind)))


class _Writer(GGUFWriter):
    """Writes lists of strings without any, too: the merges of a vocabulary of bytes."""

    def __init__(self, path: Path, name: str) -> None:
        super().__init__(path, name)
        assert self.data_alignment == GGUF_DEFAULT_ALIGNMENT

    def _pack_val(
        self, val: Any, vtype: GGUFValueType, add_vtype: bool, sub_type: GGUFValueType | None = None
    ) -> bytes:
        if vtype != GGUFValueType.ARRAY or len(val):
            return super()._pack_val(val, vtype, add_vtype, sub_type)
        return self._pack("I", vtype) + self._pack("I", GGUFValueType.STRING) + self._pack("Q", 0)


def _add(file: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        file.add_bool(key, value)
    elif isinstance(value, int):
        (file.add_uint32 if value >= 0 else file.add_int32)(key, value)
    elif isinstance(value, float):
        file.add_float32(key, value)
    elif isinstance(value, str):
        file.add_key_value(key, value, GGUFValueType.STRING)
    else:
        file.add_key_value(key, value, GGUFValueType.ARRAY)


def _general(kind: str) -> dict[str, Any]:
    by_kind = {"f32": "ALL_F32", "mxfp4": "MOSTLY_MXFP4_MOE"}
    found: dict[str, Any] = {
        "general.type": "model",
        "general.file_type": LlamaFileType[by_kind.get(kind, f"MOSTLY_{kind.upper()}")].value,
    }
    return found | ({"general.quantization_version": 2} if kind in QUANTISED else {})


def _type(kind: str) -> GGMLQuantizationType:
    return GGMLQuantizationType[kind.upper()]


def _bytes(shape: tuple[int, ...], kind: str) -> int:
    block, size = GGML_QUANT_SIZES[_type(kind)]
    return prod(shape) // block * size
