"""The ids that end a text, as a checkpoint's folder records them beside its tokenizer."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import read_bounded, write_json
from .tokenizer import MAX_SIZE

LARGEST = 1 << 28
"""Bytes of the largest file of a tokenizer that is read; the largest published is some 40 MB."""


def read_eos(folder: Path, id_of: Callable[[str], int | None]) -> tuple[int, ...] | None:
    """From generation_config.json, else config.json, else tokenizer_config.json; None where none says.

    id_of: the id of a token's name. Raises InputError for a value that is no id, and for a name that is no token.
    """
    for name in ("generation_config.json", "config.json"):
        found = read_json(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(type(token) is int and 0 <= token < MAX_SIZE for token in ids):
                raise InputError(f"{folder / name}: eos_token_id is a token id or a list of them, got {found!r}")
            return ids
    path, config = folder / "tokenizer_config.json", read_config(folder)
    content = _content(config.get("eos_token"))
    if content is None:
        return () if "eos_token" in config else None
    if not isinstance(content, str):
        raise InputError(f"{path}: eos_token is the text of a token, got {content!r}")
    eos = id_of(content)
    if eos is None:
        raise InputError(f"{path}: eos_token {content!r} is not in the vocabulary of the tokenizer")
    return (eos,)


def write_eos(
    folder: Path,
    eos: tuple[int, ...],
    name_of: Callable[[int], str | None],
    id_of: Callable[[str], int | None],
    config: Mapping[str, Any],
) -> None:
    """Writes tokenizer_config.json (config, and the name of the first id), so that `read_eos` reads eos back.

    Where that is not enough (several ids, or the folder's other files say otherwise), generation_config.json is set.
    """
    named = {"eos_token": name_of(eos[0]) if eos else None}
    write_json(folder / "tokenizer_config.json", {**config, **named})
    if read_eos(folder, id_of) != eos:
        path = folder / "generation_config.json"
        write_json(path, (read_json(path) if path.is_file() else {}) | {"eos_token_id": list(eos)})


def marks(config: Mapping[str, Any], id_of: Callable[[str], int | None]) -> dict[str, int]:
    """ "bos_token", "eos_token", "unk_token", "pad_token" → id, of those that a tokenizer_config.json names."""
    found: dict[str, int] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        content = _content(config.get(name))
        id = id_of(content) if isinstance(content, str) else None
        if id is not None:
            found[name] = id
    return found


def read_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json; empty if there is none."""
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The whole of a tokenizer's file, of `most` bytes (None: LARGEST). Raises InputError where it cannot be read."""
    try:
        return read_bounded(path, LARGEST if most is None else most)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises InputError for anything else, and for strings that are no text."""
    raw = read_bytes(path)
    try:
        data = json.loads(raw)
        if b"\\ud" in raw.lower():  # half a character, which JSON can say and no UTF-8 can
            json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = f"U+{ord(error.object[error.start]):04X}"
        raise InputError(f"{path}: holds {half}, half a character, which no text can") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _content(token: Any) -> Any:
    """The text of a token, which may stand in an object with how it is matched."""
    return token.get("content") if isinstance(token, dict) else token
