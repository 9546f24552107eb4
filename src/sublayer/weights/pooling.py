"""How an encoder's checkpoint makes one vector of a text: what its files, or a GGUF file's metadata, say beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..errors import InputError, SpecError
from ..gguf_header import read_header
from ..nn.head import Pool
from ..spec import Spec
from ..text.ending import read_bytes, read_json
from .load import gguf_file

POOLS: dict[str, Pool] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}

KINDS: dict[Pool | None, int] = {None: 0, "mean": 1, "first": 2, "last": 3}
"""GGUF's numbers of them; None: vectors of tokens."""


class Pooling(Spec):
    """How a checkpoint makes one vector of a text."""

    pool: Pool = "mean"
    """The mean of its tokens, its first token or its last."""
    normalise: bool = True
    """Whether the vector is divided by its length."""
    length: int | None = None
    """Tokens of a text that are read, its special ones counted; None: all."""
    prefix: str = ""
    """What stands before each text."""

    def check(self) -> None:
        self.require(self.length is None or self.length >= 1, f"length is at least 1, got {self.length}")


def read_pooling(folder: Path | str) -> Pooling | None:
    """What the files of sentence-transformers say (modules.json, 1_Pooling, …), or a GGUF file's metadata; None where
    nothing does.

    Raises SpecError for another kind of pooling, and for modules beside an encoder, a pooling and a normalisation.
    """
    folder = Path(folder)
    if (file := gguf_file(folder)) is not None:
        return _of_gguf(file)
    if not (folder / "modules.json").is_file():
        return None
    modules = {kind: folder / path for kind, path in _modules(folder / "modules.json")}
    other = sorted(modules.keys() - {"Transformer", "Pooling", "Normalize"})
    if other or "Pooling" not in modules:
        raise SpecError(f"{folder / 'modules.json'}: {f'{other[0]} is not modelled' if other else 'it has no pooling'}")
    path = modules["Pooling"] / "config.json"
    asked = [key for key, value in read_json(path).items() if key.startswith("pooling_mode_") and value is True]
    if len(asked) != 1 or asked[0] not in POOLS:
        kind = " and ".join(asked) or "no kind of pooling"
        raise SpecError(f"{path}: {kind} is not modelled, but one of {', '.join(POOLS)} is")
    length = _read(folder / "sentence_bert_config.json").get("max_seq_length")
    texts = _read(folder / "config_sentence_transformers.json")
    prompts = texts.get("prompts")
    prefix = prompts.get(str(texts.get("default_prompt_name")), "") if isinstance(prompts, dict) else ""
    try:
        return Pooling(POOLS[asked[0]], "Normalize" in modules, length, prefix)
    except SpecError as error:
        raise SpecError(f"{folder}: {error}") from None


def _of_gguf(file: Path) -> Pooling | None:
    """GGUF says no more than the kind; llama.cpp divides by the length unless it is told not to."""
    metadata = read_header(file, tensors=False).metadata
    key = f"{metadata.get('general.architecture')}.pooling_type"
    kind, pools = metadata.get(key, KINDS[None]), list(KINDS)
    if type(kind) is not int or not 0 <= kind < len(pools):
        raise SpecError(f"{file}: {key}={kind!r} is not modelled, but numbers up to {len(pools) - 1} are")
    pool = pools[kind]
    return None if pool is None else Pooling(pool)


def _modules(path: Path) -> list[tuple[str, str]]:
    """(class, folder inside this one) of each module, in order."""
    try:
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in json.loads(read_bytes(path))]
    except (ValueError, TypeError, KeyError, RecursionError):
        raise InputError(f"{path}: expected a list of modules, each with its type and its path") from None
    outside = next((inner for _, inner in found if Path(inner).name != inner), None)
    if outside is not None:
        raise InputError(f"{path}: {outside!r} is no folder beside it")
    return found


def _read(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
