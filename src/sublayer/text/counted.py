"""Tokenizers that only count: one id for each character, or for each of the most frequent words.

They are here to be compared with. What they have not counted they cannot write: it is refused with its place or, where
they have an id for the unknown, lost, and shown as U+FFFD. How much that is, `sublayer tokenizer audit` says.
"""

import re
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, ClassVar, Self

import numpy as np

from ..errors import InputError, UsageError, nearest
from .plain import Plain
from .tokenizer import Ids, Names, check_id, utf8
from .train import Progress, count_pieces

LOST = "\ufffd"


@dataclass(frozen=True)
class _Counted(Plain):
    """The units in order of their ids, then the id of the unknown, then the one that ends a text, if there are such."""

    units: Sequence[str]
    end: str | None = None
    """Name of the special token that ends a text."""
    unknown: str | None = None
    """Name of the id for what is none of the units; without it, such a text is refused."""

    unit: ClassVar[str]  # what one is called
    kind: ClassVar[type]  # of units

    def __post_init__(self) -> None:
        object.__setattr__(self, "units", self.kind(self.units))  # a list of them may have been given
        utf8("".join(self.units))
        if len(set(self.units)) != len(self.units) or not all(self.units):
            raise InputError(f"{type(self).__name__}.units: each {self.unit} once, and none empty")
        if self.end is not None and self.end in ("", self.unknown):
            raise UsageError(f"{type(self).__name__}.end: a name of its own is needed, got {self.end!r}")

    @property
    def size(self) -> int:
        return len(self.units) + (self.unknown is not None) + (self.end is not None)

    @property
    def eos(self) -> tuple[int, ...]:
        return () if self.end is None else (self.size - 1,)

    @property
    def unknown_id(self) -> int | None:
        return None if self.unknown is None else len(self.units)

    def look_up(self, text: str, place: int) -> Ids:
        utf8(text)
        return self.find(text, place)

    @abstractmethod
    def find(self, text: str, place: int) -> Ids:
        """The ids of a text without surrogates that begins at `place` of a longer one."""

    def _known(self, found: np.ndarray, units: Sequence[str], place: int) -> Ids:
        """found: an id for each of units, -1 where there is none."""
        if self.unknown is None and len(lost := np.flatnonzero(found < 0)):
            at = int(lost[0])
            raise InputError(
                f"the {self.unit} {units[at]!r} at character {place + sum(map(len, units[:at]))} of the text is none of"
                f" the {len(self.units)} that this tokenizer has counted"
            )
        return np.where(found < 0, len(self.units), found).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(map(self.text_of, ids))

    def stream(self) -> "CountedStream":
        return CountedStream(self)

    def text_of(self, token: int) -> str:
        """What an id reads as: its unit, U+FFFD for the unknown, nothing for the end."""
        check_id(token, self.size)
        if token < len(self.units):
            return self.units[token]
        return LOST if token == self.unknown_id else ""

    def token_bytes(self, token: int) -> bytes:
        """As Tokenizer.token_bytes; the unknown stands for no bytes, for nobody knows which they were."""
        check_id(token, self.size)
        return self.units[token].encode() if token < len(self.units) else b""

    @cached_property
    def names(self) -> Names:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Names({} if self.end is None else {self.end: self.size - 1})

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` reads back from a tokenizer.json."""
        units = self.units if isinstance(self.units, str) else list(self.units)
        return {"type": type(self).__name__, "units": units, "end": self.end, "unknown": self.unknown}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The tokenizer that `to_json` wrote. Raises InputError for an unknown key or a wrong value."""
        known = ("type", "units", "end", "unknown")
        for key in data:
            if key not in known:
                raise InputError(f"{cls.__name__}.{key}: unknown key{nearest(key, known)}")
        units, end, unknown = data.get("units"), data.get("end"), data.get("unknown")
        listed = str if cls.kind is str else list
        if not isinstance(units, listed) or not all(isinstance(unit, str) for unit in units):
            raise InputError(f"{cls.__name__}.units: expected {'a string' if listed is str else 'a list of strings'}")
        for key, name in (("end", end), ("unknown", unknown)):
            if not isinstance(name, str | None):
                raise InputError(f"{cls.__name__}.{key}: expected a name or null, got {name!r}")
        try:
            return cls(units, end, unknown)
        except UsageError as error:
            raise InputError(str(error)) from None


class CountedStream:
    """The StreamDecoder of what only counts: nothing ever waits."""

    def __init__(self, tokenizer: _Counted) -> None:
        self._tokenizer = tokenizer

    def push(self, token: int) -> str:
        return self._tokenizer.text_of(token)

    def finish(self) -> str:
        return ""


class Characters(_Counted):
    """An id for each character of the text that it was made from, in the order of their code points.

    Characters("ab") has the ids a → 0, b → 1. See Tokenizer for what the methods promise.
    """

    units: str
    unit, kind = "character", str

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        end: str | None = None,
        unknown: str | None = None,
        progress: Progress | None = None,
    ) -> "Characters":
        """All the characters of texts. Raises InputError where they hold none."""
        found: set[str] = set()
        read = 0
        for text in texts:
            found.update(text)
            read += len(utf8(text))
            if progress:
                progress("count", read, None)
        if not found:
            raise InputError("no text to train on: all texts are empty, or there are none")
        return cls("".join(sorted(found)), end, unknown)

    def find(self, text: str, place: int) -> Ids:
        codes = np.frombuffer(text.encode("utf-32-le"), "<u4")
        return self._known(self._table[np.minimum(codes, len(self._table) - 1)], text, place)

    @cached_property
    def _table(self) -> np.ndarray:
        """Code point → id, up to the last that has one; and -1."""
        codes = np.frombuffer(self.units.encode("utf-32-le"), "<u4")
        table = np.full(int(codes.max(initial=0)) + 2, -1, np.int64)
        table[codes] = np.arange(len(codes))
        return table


class Words(_Counted):
    """An id for each of the most frequent words, the most frequent first. See Tokenizer for what the methods promise.

    A word is a run of letters, digits and "_", or one sign, with the space before it; or a run of white space.
    """

    units: tuple[str, ...]
    unit, kind = "word", tuple

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab: int,
        *,
        end: str | None = "<|endoftext|>",
        unknown: str | None = "<|unknown|>",
        progress: Progress | None = None,
    ) -> "Words":
        """A tokenizer of `vocab` ids, special ones included. Of equally frequent words, the first by code points.

        Raises UsageError where the special ids leave none for a word; InputError where texts hold nothing, or fewer
        words than asked for.
        """
        wanted = vocab - (end is not None) - (unknown is not None)
        if wanted < 1:
            raise UsageError(f"vocab={vocab}: the special tokens leave no id for a word; ask for more")
        counts = count_pieces(texts, WORD.findall, progress or (lambda stage, done, total: None))
        if len(counts) < wanted:
            most = vocab - wanted + len(counts)
            raise InputError(
                f"vocab={vocab}: this text has only {len(counts)} different words; ask for {most} or fewer, or give"
                " more text"
            )
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return cls(tuple(word for word, _ in islice(ranked, wanted)), end, unknown)

    def find(self, text: str, place: int) -> Ids:
        words = WORD.findall(text)
        ids = self._ids
        return self._known(np.fromiter((ids.get(word, -1) for word in words), np.int64, len(words)), words, place)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: id for id, word in enumerate(self.units)}


WORD = re.compile(r" ?\w+| ?[^\w\s]|\s+(?!\S)|\s+")
