"""A checkpoint for others: from a folder or file that `load` reads to one that transformers or llama.cpp opens."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from ..errors import InputError, SpecError, UsageError, WeightsError
from ..files import replacing, replacing_folder, write_json
from ..gguf_header import model_name, part, part_count
from ..nn.head import Pooled
from ..nn.sublayer import Model
from ..recipes import from_hf, to_hf
from ..text import BytePairs, Pretrained, Tokenizer, load_tokenizer
from ..text.chat import ChatTemplate
from ..text.load import has_tokenizer
from ..text.metadata import read_metadata
from ..text.portable import portable
from ..text.tokenizer import frame
from .context import CONFIG, trained_length, write_trained_length
from .gguf.encoders import dressed
from .hub import local
from .licence import read_licence
from .load import Progress, gguf_file, load, read_config, read_json, read_spec, stored_dtype
from .pooling import KINDS as KINDS_OF_POOLING
from .pooling import Pooling, read_pooling
from .save import save

KINDS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.float64: "f32"}

MODULE, PARTS_OF_MODULE = "[0-9]_*", ("config.json", "model.safetensors")  # folders of sentence-transformers
# What a Hugging Face folder holds beside the weights, and what of its config.json no spec says: they go along as is.
CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "generation_config.json",
    "preprocessor_config.json", "processor_config.json",
    "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    *(f"{MODULE}/{name}" for name in PARTS_OF_MODULE),
    "README.md", "LICENSE", "LICENSE.md", "LICENSE.txt",
)  # fmt: skip
KEPT = (
    "bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "max_position_embeddings", "n_positions",
    "id2label", "label2id", "problem_type",
)  # fmt: skip
# All that an export may replace.
OURS = (
    *(name for name in CARRIED if "/" not in name),
    MODULE,
    "config.json",
    "spec.json",
    "*.safetensors",
    "*.safetensors.index.json",
)


def export(
    source: Path | str,
    out: Path | str,
    *,
    to: Literal["hf", "gguf"],
    quantize: str | None = None,
    dtype: torch.dtype | None = None,
    shard_size: int | None = None,
    force: bool = False,
    progress: Progress | None = None,
    note: Callable[[str], object] = lambda line: None,
) -> list[Path]:
    """Writes a checkpoint (a folder, a GGUF file, a name of the hub) as a folder of Hugging Face's or as a GGUF file;
    gives the files that are there then.

    The tokenizer and the chat template go along. Nothing is seen at out before all of it is written.
    quantize: GGUF's type of the matrices, such as "q8_0". dtype: of the other values; None: as they are stored.
    shard_size: bytes of weights above which they are cut into several files, which for model.gguf are
    model-00001-of-00003.gguf and so on. force: whether out may be replaced. note: told, in a line each, what is not
    exported as it is.
    Raises UsageError for an out that is there already, SpecError for a model and InputError for a tokenizer that the
    format cannot express, naming the part, and WeightsError as `load` and `save` do.
    """
    source, out = local(source), Path(out)
    if to not in ("hf", "gguf"):
        raise UsageError(f'to={to!r}: "hf" or "gguf"')
    if to == "hf" and quantize is not None:
        raise UsageError(f"quantize={quantize!r}: for gguf; of weights as hf, dtype is what can be chosen")
    spec, _ = read_spec(source)  # a path that holds no model is told as such
    to_hf(spec if to == "hf" else dressed(spec))  # before any weight is loaded
    there = _check_out(source, out, to, force, shard_size is not None)
    if dtype is None:
        dtype = stored_dtype(source)
    if to == "hf":
        _export_hf(source, out, dtype, shard_size, progress, note)
        return sorted(out.iterdir())
    written = _export_gguf(source, out, dtype, quantize, shard_size, progress, note)
    for file in there - set(written):  # in another number of parts
        file.unlink()
    return written


def _check_out(source: Path, out: Path, to: str, force: bool, in_parts: bool) -> set[Path]:
    """What is there under the names that will be written, or of such parts."""
    there = {out} if out.exists() and not (out.is_dir() and not any(out.iterdir())) else set[Path]()
    if to == "gguf" and in_parts:
        there |= {file for file in out.parent.glob("*.gguf") if model_name(file) == model_name(out)}
    file = gguf_file(source)
    sources = {source} if file is None else {part(file, i) for i in range(1, part_count(file) + 1)}
    if {path.resolve() for path in sources} & {path.resolve() for path in {out, *there}}:
        raise UsageError(f"{out}: is what is exported; choose another place")
    if to == "gguf" and out.is_dir():
        raise UsageError(f"{out}: is a folder; name the file, such as {out / 'model.gguf'}")
    if to == "gguf" and out.suffix != ".gguf":
        raise UsageError(f"{out}: a GGUF file is known by its name's end; name it {out.name}.gguf")
    if to == "gguf" and part_count(out) > 1:
        raise UsageError(f"{out}: is the name of a part; name the whole, such as {model_name(out)}.gguf")
    if to == "hf" and out.exists() and not out.is_dir():
        raise UsageError(f"{out}: is a file; name a folder")
    above = next(folder for folder in out.absolute().parents if folder.exists())
    if not os.access(above, os.W_OK):  # told before anything is read
        raise WeightsError(f"{out}: cannot be written: {above} is not for writing")
    if not above.is_dir() and above != out.absolute():
        raise UsageError(f"{out}: cannot be written: {above} is a file")
    if there and not force:
        raise UsageError(f"{min(there)}: is there already; --force replaces it")
    if there and to == "hf":
        other = next(_others(out), None)
        if other is not None:
            raise UsageError(
                f"{out}: holds {other.relative_to(out)}, which belongs to no checkpoint; it is not replaced"
            )
    return there


def _others(out: Path) -> Iterator[Path]:
    """What lies in a folder and belongs to no checkpoint."""
    for one in sorted(out.iterdir()):
        known = [pattern for pattern in OURS if one.match(pattern)]
        if one.is_dir() and known == [MODULE]:
            yield from (inner for inner in sorted(one.iterdir()) if inner.name not in PARTS_OF_MODULE)
        elif one.is_dir() or not known or known == [MODULE]:
            yield one


# --- hf ---


def _export_hf(
    source: Path, out: Path, dtype: torch.dtype, shard_size: int | None, progress: Progress | None, note: Any
) -> None:
    theirs = (source / "config.json").exists() and not (source / "spec.json").exists()
    tokenizer = None if theirs else _tokenizer(source, note)
    model = load(source, dtype=dtype, progress=progress)
    length = trained_length(source, model.spec)
    with replacing_folder(out) as beside:
        try:
            save(model, beside, layout="hf", shard_size=shard_size, progress=progress)
        except WeightsError as error:  # the name beside it is nothing to a user
            raise WeightsError(str(error).replace(str(beside), str(out))) from None
        config = read_json(beside / "config.json")
        given = {key: value for key, value in (read_config(source) or {}).items() if key in KEPT}
        if theirs:
            for path in (path for name in CARRIED for path in source.glob(name) if path.is_file()):
                (beside / path.relative_to(source)).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, beside / path.relative_to(source))
        elif tokenizer is not None:
            given |= _write_tokenizer(tokenizer, source, beside, model.spec)
            if length is not None:
                write_trained_length(beside, length)
        licence = read_licence(source)
        if licence is not None and not theirs:  # as the hub's model cards say it
            (beside / "README.md").write_text(f"---\nlicense: {json.dumps(licence[0])}\n---\n", encoding="utf-8")
        if "architectures" in config:
            write_json(beside / "config.json", _lengthened(config | given, length))


def _lengthened(config: dict[str, Any], length: int | None) -> dict[str, Any]:
    """With the trained length, where it has none of its own and the family reads one as that and no more."""
    if length is None or config.keys() & set(CONFIG):
        return config
    longer = config | {"max_position_embeddings": length}
    try:
        return longer if from_hf(longer)[0] == from_hf(config)[0] else config
    except SpecError:  # a key that it does not know
        return config


def _write_tokenizer(tokenizer: Tokenizer, source: Path, folder: Path, spec: Model) -> dict[str, Any]:
    """Writes the tokenizer's files; returns what config.json says of it."""
    same = portable(tokenizer)
    same.save(folder)
    before, _ = frame(tokenizer)
    bos = before[0] if len(before) == 1 else same.marks.get("bos_token")
    eos = list(tokenizer.eos)
    ends: Any = eos if len(eos) > 1 else eos[0] if eos else None
    ids = {"bos_token_id": bos, "eos_token_id": ends}
    if "pad_token" in same.marks:
        ids["pad_token_id"] = same.marks["pad_token"]
    if bos is not None:
        path = folder / "tokenizer_config.json"
        named = same.name_of(bos)
        write_json(path, {"bos_token": named} | read_json(path))
    template = _template(source)
    if template is not None:
        with replacing(folder / "chat_template.jinja") as path:
            path.write_text(template, encoding="utf-8")
    if spec.decoder is not None and spec.encoder is not None and eos:
        ids["decoder_start_token_id"] = eos[0]  # with which a target begins in training
    if spec.decoder is not None:
        write_json(folder / "generation_config.json", ids)
    return ids


# --- gguf ---


def _export_gguf(
    source: Path,
    out: Path,
    dtype: torch.dtype,
    quantize: str | None,
    shard_size: int | None,
    progress: Progress | None,
    note: Any,
) -> list[Path]:
    from .gguf.write import QUANTISED, write_gguf

    kind = KINDS[dtype] if quantize is None else quantize.lower()
    if quantize is not None and kind not in QUANTISED:
        raise UsageError(f"quantize={quantize!r}: one of {', '.join(QUANTISED)}; f32, f16 and bf16 are chosen as dtype")
    if dtype == torch.float64:
        note("float64 is rounded to F32, the widest that llama.cpp reads")
    spec, _ = read_spec(source)
    named = source.parent if source.name == "model" else source  # a run's result
    about: dict[str, Any] = {"general.name": model_name(named.resolve())}
    licence = read_licence(source)
    about |= {} if licence is None else {"general.license": licence[0]}
    tokenizer = _of_pieces(_tokenizer(source, note), source)
    if tokenizer is not None:
        from ..text.ggml_write import ggml_metadata

        try:
            about |= ggml_metadata(tokenizer, spec.vocab or tokenizer.size, note)
        except InputError as error:
            raise InputError(f"{source}: {error}") from None
        template = _template(source)
        about |= {} if template is None else {"tokenizer.chat_template": template}
    else:
        about["tokenizer.ggml.model"] = "none"
    if spec.decoder is None:
        about |= _pooled(source, spec, note)
    length = trained_length(source, spec)
    kept = {} if length is None else {"max_position_embeddings": length}
    model = load(source, dtype=dtype, progress=progress)
    plain = "f16" if kind in QUANTISED else kind
    out.parent.mkdir(parents=True, exist_ok=True)
    return write_gguf(
        model, out, kind=kind, plain=plain, about=about, config=kept, shard_size=shard_size, progress=progress,
        note=note,
    )  # fmt: skip


def _pooled(source: Path, spec: Model, note: Callable[[str], object]) -> dict[str, Any]:
    """How an encoder makes one vector of a text: its head says it, or the files beside it."""
    head = spec.head
    own = Pooling(head.pool, head.normalise) if isinstance(head, Pooled) and head.before is None else None
    pooling = own or read_pooling(source)
    if pooling is None:
        return {}
    lost = {
        "divides no vector by its length": not pooling.normalise,
        f"reads {pooling.length} tokens of a text": pooling.length is not None,
        f"puts {pooling.prefix!r} before a text": bool(pooling.prefix),
    }
    for what in (what for what, is_so in lost.items() if is_so):
        note(f"GGUF does not say that this model {what}")
    return {"{arch}.pooling_type": KINDS_OF_POOLING[pooling.pool]}


def _of_pieces(tokenizer: Tokenizer | None, source: Path) -> Tokenizer | None:
    """The SentencePiece model beside a tokenizer.json that was made from it, for GGUF holds the former alone."""
    path = source / "tokenizer.model"
    if not isinstance(tokenizer, Pretrained) or isinstance(tokenizer, BytePairs) or not path.is_file():
        return tokenizer
    pieces = load_tokenizer(path)
    return pieces if pieces.size == tokenizer.size else tokenizer


# --- both ---


def _tokenizer(source: Path, note: Callable[[str], object]) -> Tokenizer | None:
    path = gguf_file(source) or source
    if not has_tokenizer(path):
        note(f"{path}: no tokenizer there, so none goes along")
        return None
    return load_tokenizer(path)


def _template(source: Path) -> str | None:
    file = gguf_file(source)
    if file is not None:
        found = read_metadata(file).get("tokenizer.chat_template")
        return found if isinstance(found, str) else None
    template = ChatTemplate.read(source)
    return None if template is None else template.source
