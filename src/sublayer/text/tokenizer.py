"""What every tokenizer can do."""

from collections.abc import Sequence
from typing import Protocol

from ..errors import InputError


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

    Text is always content: a special token's name inside it ("<|im_end|>") is encoded as the characters that it
    consists of, so that no text can forge a turn or an end. Special tokens are written by id only, and decode to "".
    """

    @property
    def size(self) -> int:
        """Number of ids; they run from 0 to size - 1."""
        ...

    @property
    def eos(self) -> tuple[int, ...]:
        """Ids at which a text ends, () if there are none; the first one is the one to write."""
        ...

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """The ids of text; framed: between the special tokens that its model expects around a text, if any.

        Raises InputError for a lone surrogate, which no encoding of text can express.
        """
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids; bytes that are not UTF-8 become U+FFFD.

        Raises InputError for an id outside the vocabulary.
        """
        ...

    def stream(self) -> StreamDecoder:
        """A decoder for ids that arrive one at a time."""
        ...


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
