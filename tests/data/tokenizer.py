"""Tokenizers small enough to foretell, for the tests of this folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sublayer.errors import InputError
from sublayer.text import Bytes

END = Bytes(("<|end|>",))
"""Ids are bytes; 256 ends a text."""


@dataclass(frozen=True)
class Letters:
    """An id is a letter's place in the alphabet times `step`; without marks unless eos is given."""

    alphabet: str
    size: int
    step: int = 1
    eos: tuple[int, ...] = ()

    def encode(self, text: str, *, framed: bool = False, specials: Any = "text") -> list[int]:
        if not set(text) <= set(self.alphabet):
            raise InputError("a letter that the alphabet lacks")
        return [self.alphabet.index(letter) * self.step for letter in text]

    def encode_batch(self, texts: Sequence[str], *, specials: Any = "text") -> list[np.ndarray]:
        return [np.array(self.encode(text), np.int64) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.alphabet[id // self.step] for id in ids)

    def stream(self) -> "LetterStream":
        return LetterStream(self)

    def token_bytes(self, token: int) -> bytes:
        place, rest = divmod(token, self.step)
        return b"" if rest or place >= len(self.alphabet) else self.alphabet[place].encode()

    def save(self, folder: Path | str) -> None:
        (Path(folder) / "alphabet.txt").write_text(self.alphabet, encoding="utf-8")


@dataclass(frozen=True)
class LetterStream:
    """A letter at a time."""

    letters: Letters

    def push(self, token: int) -> str:
        return self.letters.decode([token])

    def finish(self) -> str:
        return ""
