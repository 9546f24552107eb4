"""Writing a GGUF file: the tables of this folder read backward, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
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
from ...files import clean, replacing
from ...gguf_header import COUNT, NUMBER, TOTAL, Header, Place, model_name, part
from ...names import Row, expand
from ...nn.sublayer import Model, ModelOp
from ...recipes import from_hf, names, to_hf
from ...recipes.difference import differences
from ..save import cut
from . import Architecture, Config, Source, k_quants, writer
from .checkpoint import concrete
from .encoders import bare, dressed
from .mixtures import FALLBACK, MIXTURES, types_of
from .tensors import CHUNK

BY_PACKAGE = ("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0", "mxfp4")
"""What the gguf package can make of values."""
QUANTISED = (*BY_PACKAGE, *MIXTURES)
KINDS = ("f32", "f16", "bf16", *QUANTISED)

# Matrices that llama.cpp reads as F32 only, by their module's name: routers, tables of positions, convolutions.
FULL = ("ffn_gate_inp", "ffn_gate_inp_shexp", "position_embd", "attn_rel_b", "token_types", "ssm_conv1d")
TRAINING = ("dropout", "balance_loss", "balance_rate", "z_loss")  # parts of a spec that do nothing when a model is run
LARGEST_HALF = 65504.0
SPLIT = {NUMBER: GGUFValueType.UINT16, COUNT: GGUFValueType.UINT16, TOTAL: GGUFValueType.INT32}  # as llama.cpp has them
MOST_PARTS = 65535

Progress = Callable[[str, int, int], object]  # as load and save have it


@dataclass(frozen=True)
class Planned:
    """A tensor of the file to be."""

    shape: tuple[int, ...]
    kind: str
    values: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """In bytes."""
        block, size = GGML_QUANT_SIZES[_type(self.kind)]
        return prod(self.shape) // block * size


def write_gguf(
    model: ModelOp,
    path: Path,
    *,
    kind: str = "f32",
    plain: str = "f16",
    about: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
    shard_size: int | None = None,
    progress: Progress | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """Writes a model's GGUF file, beside and then renamed; gives the paths of what is written.

    kind: of the matrices, one of KINDS; vectors and what llama.cpp reads as F32 only stay F32. Rows that are not whole
    blocks become shorter blocks in a mixture, or else `plain` ("f32", "f16" or "bf16"), of which `note` is told.
    about: more metadata, under full keys (the tokenizer's). config: keys of config.json that a spec does not say, such
    as max_position_embeddings.
    shard_size: bytes of tensors above which the file is cut into parts, path's name with -00001-of-00003 and so on; no
    tensor is cut. All are whole before any is renamed, the first as the last.
    Raises UsageError for an unknown kind, SpecError for what the format cannot express, WeightsError for a value that
    the type cannot hold and for a file that cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"quantize={kind!r}: one of {', '.join(KINDS)}")
    if any(name.startswith("head.") for name, _ in model.named_parameters()) and bare(model) is not model:
        note("the head is left out: of an encoder, GGUF holds the vectors that it makes of tokens")
    model = bare(model)
    described, family = to_hf(dressed(model.spec))
    described = {**(config or {}), **described}
    table = writer(described)
    metadata = table.metadata(described) | _general(kind)
    metadata |= {key.replace("{arch}", table.name): value for key, value in (about or {}).items()}
    if types := described.get("type_vocab_size"):
        metadata["tokenizer.ggml.token_type_count"] = types
    computed = {name: tensor.float().contiguous() for name, tensor in table.computed(described).items()}
    theirs = _Theirs(expand(names(family, dressed(model.spec)), model), model)
    plan = _chosen(_plan(table, described, computed, theirs), kind, plain, metadata, note)
    _check(model.spec, table, metadata, plan, computed)
    if not described.keys() & {"max_position_embeddings", "n_positions"}:
        written = metadata[f"{table.name}.context_length"]
        note(f"nothing says how many tokens the model was trained on at once, and GGUF asks: {written:,} is written")
    groups = cut({name: one.size for name, one in plan.items()}, shard_size)
    count = len(groups)
    if count > MOST_PARTS:
        raise UsageError(f"shard_size={shard_size}: makes {count} parts; they can be numbered up to {MOST_PARTS}")
    paths = [part(path, i, count) for i in range(1, count + 1)]
    tell = _telling(progress, sum(one.size for one in plan.values()))
    clean(path.parent, f"{escape(model_name(path))}-*-of-*.gguf")  # a killed one may have had other parts
    try:
        with ExitStack() as beside:  # left from behind: the first part gets its name last
            for i, (file, group) in enumerate(zip(paths, groups, strict=True)):
                split = {} if count == 1 else {NUMBER: i, COUNT: count, TOTAL: len(plan)}
                said, tensors = split | (metadata if i == 0 else {}), {name: plan[name] for name in group}
                _write(beside.enter_context(replacing(file)), table.name, said, tensors, tell)
    except OSError as error:
        raise WeightsError(f"{error.filename or path}: cannot be written: {error.strerror}") from None
    return paths


def _telling(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Takes the bytes of each piece that is written."""
    done = 0

    def tell(more: int) -> None:
        nonlocal done
        done += more
        if progress:
            progress("writing", done, total)

    return tell


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

    def changed(self, row: Row, i: int) -> Tensor:
        """One of a row's tensors of GGUF."""
        return row.change.into([self.read(name) for name in row.their_names])[i]


def _plan(table: Architecture, config: Config, computed: Mapping[str, Tensor], theirs: _Theirs) -> dict[str, Planned]:
    """Every tensor, as F32."""
    found = {name: Planned(tuple(tensor.shape), "F32", tensor.clone) for name, tensor in computed.items()}
    left = set(theirs.names)
    for row in concrete(table.rows(config), theirs.names, side="theirs"):
        left -= set(row.their_names)
        shapes = [tuple(t.shape) for t in row.change.into([theirs.read(name, bare=True) for name in row.their_names])]
        for i, (name, shape) in enumerate(zip(row.our_names, shapes, strict=True)):
            found[name] = Planned(shape, "F32", partial(theirs.changed, row, i))
    if left:
        raise SpecError(f"GGUF's {table.name} has no tensor for {min(left)}")
    return found


def _chosen(
    plan: Mapping[str, Planned], kind: str, plain: str, metadata: Mapping[str, Any], note: Callable[[str], object]
) -> dict[str, Planned]:
    """The same tensors, in the types that are to be stored."""
    widths = {name: one.shape[-1] for name, one in plan.items() if _is_matrix(name, one.shape)}
    wanted = types_of(kind, widths, metadata) if kind in MIXTURES else dict.fromkeys(widths, kind.upper())
    fitting = {name: _fitting(wanted[name], width, plain.upper()) for name, width in widths.items()}
    for other in sorted(set(fitting.values())):
        narrow = [name for name in fitting if fitting[name] == other != wanted[name]]
        if narrow:
            become = "stay" if other == plain.upper() else "become"
            block = GGML_QUANT_SIZES[_type(wanted[narrow[0]])][0]
            note(f"{len(narrow)} matrices {become} {other}, as their rows are no multiple of {block}: {narrow[0]}, …")
    return {name: replace(one, kind=fitting.get(name, one.kind)) for name, one in plan.items()}


def _is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    module, _, end = name.rpartition(".")
    inner = module.rpartition(".")[2]
    return len(shape) > 1 and end == "weight" and not inner.endswith("_norm") and inner not in FULL


def _fitting(kind: str, width: int, plain: str) -> str:
    while width % GGML_QUANT_SIZES[_type(kind)][0]:
        kind = FALLBACK.get(kind, plain)
    return kind


def _check(
    written: Model,
    table: Architecture,
    metadata: Mapping[str, Any],
    plan: Mapping[str, Planned],
    computed: Mapping[str, Tensor],
) -> None:
    """Raises SpecError unless what will be written reads back as the model's spec."""
    kept = {key: float(np.float32(v)) if isinstance(v, float) else v for key, v in metadata.items()}  # as it is stored
    nowhere = Path("GGUF")
    places = {name: Place(nowhere, one.shape, one.kind, 0, 0) for name, one in plan.items()}
    source = Source(Header((nowhere,), kept, places), _Computed(computed))  # pyright: ignore[reportArgumentType]
    spec, _ = from_hf(table.config(source))
    spec = spec.replace(head=None, tied=False) if table.headless else spec
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
    path: Path, name: str, metadata: Mapping[str, Any], plan: Mapping[str, Planned], tell: Callable[[int], None]
) -> None:
    file = _Writer(path, name)
    try:
        for key, value in metadata.items():
            if key != "general.architecture":  # which the writer has put there
                _add(file, key, value)
        for tensor, one in plan.items():
            file.add_tensor_info(tensor, one.shape, np.dtype(np.float32), one.size, _type(one.kind))
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()
        assert file.fout is not None
        out = file.fout[0]
        for tensor, one in plan.items():
            file.write_padding(out, out.tell())
            for piece in _stored(tensor, one):
                out.write(piece.data)
                tell(piece.nbytes)
        file.write_padding(out, out.tell())
    finally:
        file.close()


@torch.no_grad()
def _stored(name: str, one: Planned) -> Iterator[np.ndarray]:
    """A tensor as it is stored, some rows at a time."""
    whole = one.values()
    rows = whole.reshape(-1, whole.shape[-1] if whole.dim() else 1)
    for some in rows.split(max(1, CHUNK // max(1, rows.shape[1]))):
        values = some.float().cpu().contiguous()
        if one.kind not in ("F32", "BF16") and (values.abs() > LARGEST_HALF).any():  # scales, too, are stored in F16
            raise WeightsError(f"{name}: holds {values.abs().max():.6g}, beyond F16's {LARGEST_HALF:.0f}; use bf16")
        if one.kind not in ("F32", "BF16", "F16") and values.isnan().any():
            raise WeightsError(f"{name}: holds nan, which {one.kind} cannot; use bf16")
        if one.kind in k_quants.FORMS:
            yield k_quants.quantize(values, one.kind).numpy()
        else:
            yield np.ascontiguousarray(quantize(values.numpy(), _type(one.kind)))


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
    if key in SPLIT:
        file.add_key_value(key, value, SPLIT[key])
    elif isinstance(value, bool):
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
