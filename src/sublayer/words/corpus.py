"""Text as numbers of words: what word vectors are trained on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import regex

from ..errors import InputError, UsageError

WORD = regex.compile(r"\p{L}[\p{L}\p{M}]*(?:['’]\p{L}[\p{L}\p{M}]*)*")


def words_of(text: str) -> list[str]:
    """The words of a text in lower case: runs of letters, with apostrophes inside."""
    return WORD.findall(text.lower())


@dataclass(frozen=True, eq=False)
class Corpus:
    """The words of some documents, rare ones left out; windows reach over a word left out, never over documents."""

    words: tuple[str, ...]
    """The vocabulary, the most frequent first; words of one count by alphabet."""
    counts: np.ndarray
    """[V] int64: how often each occurs."""
    ids: np.ndarray
    """[N] int32: the words of all documents in order."""
    document: np.ndarray
    """[N] int32: which document each belongs to."""

    @classmethod
    def read(cls, texts: Iterable[str], least: int = 5, most: int | None = None) -> Corpus:
        """The words that occur at least `least` times, of them the `most` most frequent. Memory: 8 bytes a word.

        Raises UsageError for counts below 1, InputError where fewer than two words remain.
        """
        if least < 1 or (most is not None and most < 1):
            raise UsageError(f"least={least}, most={most}: counts are at least 1")
        seen, found, document = dict[str, int](), array("i"), array("i")
        for number, text in enumerate(texts):
            ids = [seen.setdefault(word, len(seen)) for word in words_of(text)]
            found.extend(ids)
            document.extend([number] * len(ids))
        ids, documents = np.array(found, np.int32), np.array(document, np.int32)
        count = np.bincount(ids, minlength=len(seen))
        names = list(seen)
        order = sorted((i for i in range(len(names)) if count[i] >= least), key=lambda i: (-count[i], names[i]))[:most]
        if len(order) < 2:
            raise InputError(
                f"{len(order)} of {len(names)} words occur {least} times: vectors need more text, or rarer words"
            )
        number = np.full(len(names), -1, np.int32)
        number[order] = np.arange(len(order))
        ids = number[ids]
        kept = ids >= 0
        return cls(tuple(names[i] for i in order), count[order], ids[kept], documents[kept])

    @property
    def stamp(self) -> str:
        """Another one when any word of the text is."""
        digest = hashlib.blake2b(self.ids.tobytes() + self.document.tobytes(), digest_size=8)
        digest.update("\n".join(self.words).encode())
        return digest.hexdigest()


def neighbours(
    document: np.ndarray, window: int, start: int, stop: int, reach: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(places, places of their neighbours) of the words start … stop: those at most `window` words away, both ways.

    reach: [stop − start], how far each word looks itself; None: the whole window.
    """
    here, there = list[np.ndarray](), list[np.ndarray]()
    places = np.arange(start, stop)
    for distance in (*range(-window, 0), *range(1, window + 1)):
        other = places + distance
        within = (other >= 0) & (other < len(document))
        within &= document[np.clip(other, 0, len(document) - 1)] == document[places]
        if reach is not None:
            within &= reach >= abs(distance)
        here.append(places[within])
        there.append(other[within])
    return np.concatenate(here), np.concatenate(there)
