"""What every tokenizer can do."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from ..errors import InputError, UsageError

Policy = Literal["text", "special", "error"]
"""What the name of a special token inside a text is: characters like any other, that token, or a mistake."""

MAX_SIZE = 1 << 24
"""Ids of a tokenizer that is read, for each of which something is kept; the largest vocabularies have a million."""

Ids = np.ndarray[Any, np.dtype[np.uint32]]
"""Token ids of one text, [tokens]."""


class StreamDecoder(Protocol):
    """Ids in, one at a time; whole characters out. All its returns joined are what `decode` makes of all the ids."""

    def push(self, token: int) -> str:
        """The text that has become certain with this id; "" while a character is incomplete."""
        ...

    def finish(self) -> str:
        """What was held back: an incomplete character, as U+FFFD. The decoder is then as new."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back.

    Unless asked otherwise, text is content: the name of a special token inside it ("<|im_end|>") is encoded as the
    characters that it consists of, so that no text can forge a turn or an end. Special tokens decode to "".

    A byte order mark is a character like any other here. At the start of a file it belongs to the file, not to its
    text: whoever reads the file drops it, so that it never joins the first token.
    """

    @property
    def size(self) -> int:
        """Number of ids; they run from 0 to size - 1."""
        ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids at which a text ends, () if there are none; the first one is the one to write."""
        ...

    def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
        """The ids of text; framed: between the special tokens that its model expects around a text, if any.

        specials says what the name of a special token inside text is: "text", characters like any other; "special",
        that token; "error", a mistake.
        Raises InputError for a lone surrogate, which no encoding of text can express; with specials="error" also for
        the name of a special token, with its place.
        """
        ...

    def encode_batch(self, texts: Sequence[str], *, specials: Policy = "text") -> list[Ids]:
        """What `encode` makes of each text, as arrays of ids: the fast way for many or long texts. Never framed."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        ...

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes that an id stands for, alone; b"" for special tokens and for ids that name no token.

        Raises InputError for an id outside the vocabulary.
        """
        ...

    def save(self, folder: Path | str) -> None:
        """Writes into folder what `load_tokenizer` reads back: the same ids for every text, and the same eos."""
        ...


class Names:
    """Finds the names of tokens in text: the leftmost, and of those that start there the longest."""

    def __init__(self, ids: Mapping[str, int]) -> None:
        self._ids = {name: token for name, token in ids.items() if name}
        longest_first = sorted(self._ids, key=len, reverse=True)
        # With no names, a pattern that matches nowhere.
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def split(self, text: str) -> Iterator[str | int]:
        """The parts of text in order: what stands between names, and the ids of the names."""
        start = 0
        for found in self._pattern.finditer(text):
            if found.start() > start:
                yield text[start : found.start()]
            yield self._ids[found.group()]
            start = found.end()
        if start < len(text):
            yield text[start:] if start else text

    def length(self, token: int) -> int:
        """Characters of a token's name."""
        return next(len(name) for name, known in self._ids.items() if known == token)

    def refuse(self, text: str) -> None:
        """Raises InputError if a name stands in text."""
        if found := self._pattern.search(text):
            raise InputError(
                f"the text holds the special token {found.group()!r} at character {found.start()}: take it out, "
                'or encode with specials="text" (its characters) or "special" (the token)'
            )


def special_id(tokenizer: Tokenizer, name: str) -> int | None:
    """The id of a special token; None where the tokenizer has none of that name."""
    found = tokenizer.encode(name, specials="special")
    return found[0] if len(found) == 1 and not tokenizer.token_bytes(found[0]) else None


def frame(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that stand before and after a text that is framed."""
    for token in range(tokenizer.size):
        text = tokenizer.decode([token])  # of its own vocabulary, for some can encode nothing else
        bare = tokenizer.encode(text)
        framed = tokenizer.encode(text, framed=True)
        for at in range(len(framed) if bare else 0):
            if framed[at : at + len(bare)] == bare:
                return framed[:at], framed[at + len(bare) :]
    return [], []


def begun(tokenizer: Tokenizer, text: str, specials: Policy = "text") -> list[int]:
    """The ids of a text that is to be gone on with: behind what its model expects before a text, and without what it
    expects after one."""
    return [*frame(tokenizer)[0], *tokenizer.encode(text, specials=specials)]


def check_policy(specials: str) -> None:
    """Raises UsageError unless specials is one of the policies."""
    if specials not in ("text", "special", "error"):
        raise UsageError(f'specials: "text", "special" or "error", got {specials!r}')


def utf8(text: str) -> bytes:
    """The UTF-8 bytes of text. Raises InputError for a lone surrogate."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        place, code = error.start, ord(text[error.start])
        raise InputError(f"character {place} of the text is U+{code:04X}, a lone surrogate: no UTF-8 has it") from None


def check_id(token: int, size: int) -> None:
    """Raises InputError unless token is one of 0 … size - 1."""
    if not 0 <= token < size:
        raise InputError(f"token id {token} is outside the tokenizer's vocabulary: 0 to {size - 1}")
