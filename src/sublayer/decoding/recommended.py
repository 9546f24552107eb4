"""What a checkpoint says of how its tokens are best chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError, SpecError
from ..text.ending import read_json
from ..text.metadata import read_metadata
from ..weights.load import gguf_file
from .request import read_options

OURS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_new_tokens",
}  # of generation_config.json
GGUF = {
    "temperature": "general.sampling.temp",
    "top_k": "general.sampling.top_k",
    "top_p": "general.sampling.top_p",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


def recommended(path: Path) -> tuple[dict[str, Any], str]:
    """(options of generation, the file that gives them): of a folder's generation_config.json, or a GGUF file.

    Empty where nothing is said. `do_sample: false` is temperature 0. Raises InputError, naming the file, for a value
    that generation does not take.
    """
    gguf = gguf_file(path)
    if gguf is not None:
        file = gguf
        found: dict[str, Any] = _named(read_metadata(gguf), GGUF)
    else:
        file = path / "generation_config.json"
        data = read_json(file) if file.is_file() else {}
        found = {"temperature": 0.0} if data.get("do_sample") is False else _named(data, OURS)
    if found.get("top_k") in (0, -1):  # theirs for: all
        found["top_k"] = None
    try:
        read_options(found)
    except SpecError as error:
        raise InputError(f"{file}: {error}") from None
    return found, file.name


def _named(data: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: data[theirs] for ours, theirs in names.items() if data.get(theirs) is not None}
