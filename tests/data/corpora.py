"""Documents, and what is made of them, for the tests of tokens on disk."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from sublayer.data.readers import Document
from sublayer.data.shards import Tokens
from sublayer.text import Bytes
from tests.data.tokenizer import END, Letters

ABC = Letters("abc", 3)
MARKED = Letters("abc", 4, eos=(3,))


def named(texts: Sequence[str]) -> list[Document]:
    return [Document(text, f"docs/é{number}.txt") for number, text in enumerate(texts)]


def naive(texts: Sequence[str]) -> list[int]:
    return list(chain.from_iterable([256, *text.encode()] for text in texts))


def held_texts(tokens: Tokens) -> list[str]:
    """The documents, read back from their bytes."""
    return [END.decode(tokens.document(number).tolist()) for number in range(tokens.documents)]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def many(count: int, size: int = 40) -> list[Document]:
    """Documents no two of which are alike."""
    return [Document(f"document {number}\n" * (size // 12), f"{number}") for number in range(count)]


class Counting(Bytes):
    """Counts the texts that it is asked to encode."""

    count = 0

    def encode_batch(self, texts: Sequence[str], **options: Any) -> list[Any]:
        Counting.count += len(texts)
        return super().encode_batch(texts, **options)
