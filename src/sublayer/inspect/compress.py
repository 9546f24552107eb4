"""What a general compressor makes of a text: a judge that every machine has, for a language model compresses too."""

from __future__ import annotations

import lzma
from collections.abc import Iterable

from ..errors import InputError
from ..text.tokenizer import utf8


def xz_bits(held_texts: Iterable[str], given: Iterable[str] = ()) -> float:
    """Bits per byte of held-out documents in one file that `xz -9` packs.

    given: training documents; the result is then what the held-out ones add to a packed file of those, for a model has
    seen them too. They help as far back as xz looks, which is 64 MiB. A zero byte closes each document, so that xz too
    stores where documents end; the division is by the bytes of the documents alone.
    Raises InputError where there is no held-out text. It takes about half a second a megabyte.
    """
    documents = [utf8(text) for text in held_texts]
    size = sum(map(len, documents))
    if not size:
        raise InputError("no held-out text to judge by")
    before, held = _closed(map(utf8, given)), _closed(documents)
    added = len(_packed(before + held)) - (len(_packed(before)) if before else 0)
    return 8 * added / size


def _closed(documents: Iterable[bytes]) -> bytes:
    return b"".join(part for document in documents if document for part in (document, b"\0"))


def _packed(data: bytes) -> bytes:
    return lzma.compress(data, preset=9)
