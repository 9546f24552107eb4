"""How many tokens a checkpoint was trained on at once."""

from __future__ import annotations

import json
from pathlib import Path

from ..files import replacing
from ..gguf_header import read_header
from ..nn.sublayer import Model
from .load import gguf_file, read_json

TRAINED = "model_max_length"
"""The key of tokenizer_config.json that says so where no config.json does: a folder of Sublayer's."""
ENDLESS = 1 << 40  # what stands there where nobody said


def trained_length(path: Path, spec: Model) -> int | None:
    """Of a folder or a GGUF file: the positions that the model has learned, else what its config says; None: unknown.

    Raises WeightsError for a file that is not what its name says.
    """
    if spec.context is not None:
        return spec.context
    file = gguf_file(path)
    if file is not None:
        metadata = read_header(file, tensors=False).metadata
        return _length(metadata.get(f"{metadata.get('general.architecture')}.context_length"))
    for name, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", TRAINED)):
        config = read_json(path / name) if (path / name).is_file() else {}
        inner = config.get("text_config")  # of models that see too
        found = _length(config.get(key, inner.get(key) if isinstance(inner, dict) else None))
        if found is not None:
            return found
    return None


def write_trained_length(folder: Path, length: int) -> None:
    """Notes the length in a folder's tokenizer_config.json, beside what it says."""
    path = folder / "tokenizer_config.json"
    config = (read_json(path) if path.is_file() else {}) | {TRAINED: length}
    with replacing(path) as beside:
        beside.write_text(json.dumps(config, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def _length(said: object) -> int | None:
    return said if type(said) is int and 1 < said < ENDLESS else None
