"""A sentence a line, from a file or stdin."""

from __future__ import annotations

import sys
from pathlib import Path


def read_sentences(path: Path | None, purpose: str) -> list[str]:
    """Each line, without its end (Windows' too); None is stdin. Raises InputError for bytes that are no UTF-8, and
    where nothing is there for the purpose ("translate")."""
    from ..errors import InputError

    source, data = (str(path), path.read_bytes()) if path is not None else ("stdin", sys.stdin.buffer.read())
    try:
        lines = data.decode().removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{source}: byte 0x{data[error.start]:02X} at offset {error.start:,} is not UTF-8") from None
    lines = [line.removesuffix("\r") for line in (lines[:-1] if lines[-1] == "" else lines)]
    if not any(line.strip() for line in lines):
        raise InputError(f"{source}: nothing to {purpose}: give a sentence a line")
    return lines
