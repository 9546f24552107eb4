"""The licence that a checkpoint comes with, from small files and metadata alone."""

from __future__ import annotations

import re
from pathlib import Path

from ..gguf_header import read_header
from .load import gguf_file

LARGEST = 64 << 10  # bytes of a README.md or a licence that are read: what is looked for stands in front
FILE = re.compile(r"(licen[sc]e|copying)(\.(md|txt))?", re.IGNORECASE)


def read_licence(path: Path) -> tuple[str, str] | None:
    """(its name, where that stands) of a folder or a GGUF file; None where nothing says."""
    gguf = gguf_file(path)
    if gguf is not None:
        metadata = read_header(gguf, tensors=False).metadata
        said = [metadata.get(f"general.license{end}") for end in ("", ".name")]
        found = next((one for one in reversed(said) if isinstance(one, str) and one), None)
        return (found, "general.license") if found else None
    readme = _front(path / "README.md")
    front = re.match(r"---\n(.*?)\n---\n", readme, re.DOTALL)
    said = re.findall(r"^(license|license_name):[ \t]*['\"]?([^'\"#\n]+)", front[1] if front else "", re.MULTILINE)
    keys = {key: value.strip() for key, value in said}
    named = keys.get("license")
    if named in (None, "other"):  # one that has no short name
        named = keys.get("license_name", named)
    if named:
        return named, "README.md"
    for file in sorted(path.glob("*")) if path.is_dir() else ():
        if FILE.fullmatch(file.name) and file.is_file():
            first = next((line.strip(" #*\t") for line in _front(file).splitlines() if line.strip(" #*\t")), None)
            if first:
                return first[:80], file.name
    return None


def _front(file: Path) -> str:
    try:
        with open(file, "rb") as opened:
            return opened.read(LARGEST).decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError:
        return ""
