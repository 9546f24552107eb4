"""Corpora that every machine has: Python's own standard library, as it is installed."""

from __future__ import annotations

import math
import sysconfig
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from ..errors import InputError

NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "__pycache__"}


def standard_library(limit: int | None = None) -> list[str]:
    """The text of the standard library's Python files, sorted by path; about `limit` characters of it, if given.

    Raises InputError where the installation has no sources.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    size = 0
    for path in sorted(folder.rglob("*.py")):
        if NOT_LIBRARY & set(path.relative_to(folder).parts) or (limit is not None and size >= limit):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):  # a file that tests other encodings
            continue
        if text:
            texts.append(text)
            size += len(text)
    if not texts:
        raise InputError(f"{folder}: this Python was installed without its library sources")
    return texts


def split(documents: list[str], every: int = 20) -> tuple[list[str], list[str]]:
    """(training, held out): every 20th document is held out whole."""
    held = documents[every - 1 :: every]
    return [text for i, text in enumerate(documents) if i % every != every - 1], held


def unigram_bits(documents: Iterable[str]) -> float:
    """The entropy of single bytes, in bits per byte: what a model must beat to have learned any order."""
    counts = Counter[int]()
    for text in documents:
        counts.update(text.encode("utf-8"))
    total = sum(counts.values())
    return -sum(n / total * math.log2(n / total) for n in counts.values())
