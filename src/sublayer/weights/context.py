"""How many tokens a checkpoint was trained on at once."""

from __future__ import annotations

from pathlib import Path

from ..files import write_json
from ..gguf_header import read_header
from ..nn.sublayer import Model
from .load import gguf_file, read_json

TRAINED = "model_max_length"
"""The key of tokenizer_config.json that says so where no config.json does: a folder of Sublayer's."""
CONFIG = ("max_position_embeddings", "n_positions")
"""What config.json calls it."""
ENDLESS = 1 << 40  # what stands there where nobody said
UNSAID: dict[str, int] = dict.fromkeys(("mamba", "mamba2", "jamba"), 1 << 20)
"""What GGUF files of these architectures hold where nobody said: no position ends them."""


def trained_length(path: Path, spec: Model) -> int | None:
    """Of a folder or a GGUF file: the positions that the model has learned, else what its config says, else the run
    that it is of; None: unknown.

    Raises WeightsError for a file that is not what its name says.
    """
    if spec.context is not None:
        return spec.context
    file = gguf_file(path)
    if file is not None:
        metadata = read_header(file, tensors=False).metadata
        name = str(metadata.get("general.architecture"))
        found = _length(metadata.get(f"{name}.context_length"))
        return None if found == UNSAID.get(name) else found
    for name, keys in (("config.json", CONFIG), ("tokenizer_config.json", (TRAINED,))):
        config = read_json(path / name) if (path / name).is_file() else {}
        inner = config.get("text_config")  # of models that see too
        for one in (config, inner if isinstance(inner, dict) else {}):
            for key in keys:
                if (found := _length(one.get(key))) is not None:
                    return found
    return _of_run(path) if spec.vocab is not None and spec.encoder is None else None


def _of_run(path: Path) -> int | None:
    """What the run was told of which a folder is the result or a checkpoint."""
    runs = [folder / "run.json" for folder in path.resolve().parents[:2]]
    data = next((read_json(run).get("data") for run in runs if run.is_file()), None)
    return _length(data.get("length")) if isinstance(data, dict) else None


def write_trained_length(folder: Path, length: int) -> None:
    """Notes the length in a folder's tokenizer_config.json, beside what it says."""
    path = folder / "tokenizer_config.json"
    config = (read_json(path) if path.is_file() else {}) | {TRAINED: length}
    write_json(path, config)


def _length(said: object) -> int | None:
    return said if type(said) is int and 1 < said < ENDLESS else None
