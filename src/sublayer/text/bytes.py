"""Bytes: the tokenizer that needs no training — an id is a byte of the text's UTF-8."""

import codecs
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ..errors import InputError, nearest
from .plain import Plain
from .tokenizer import Ids, Names, check_id, utf8

BYTES = 256


@dataclass(frozen=True)
class Bytes(Plain):
    """Ids 0 to 255 are bytes; the specials follow from 256 on, the first of them being the one that ends a text.

    decode(encode(text)) == text for every text. See Tokenizer for what the methods promise.
    """

    specials: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        return BYTES + len(self.specials)

    @property
    def eos(self) -> tuple[int, ...]:
        return (BYTES,) if self.specials else ()

    def look_up(self, text: str, place: int) -> Ids:
        return np.frombuffer(utf8(text), np.uint8).astype(np.uint32)

    @cached_property
    def names(self) -> Names:  # pyright: ignore[reportIncompatibleVariableOverride]
        return Names({name: BYTES + i for i, name in enumerate(self.specials)})

    def decode(self, ids: Sequence[int], errors: str = "replace") -> str:
        """As Tokenizer.decode; with errors="strict", ids that are not UTF-8 raise InputError."""
        stream = ByteStream(self.token_bytes, errors)
        return "".join([stream.push(token) for token in ids]) + stream.finish()

    def stream(self) -> "ByteStream":
        return ByteStream(self.token_bytes)

    def token_bytes(self, token: int) -> bytes:
        check_id(token, self.size)
        return bytes((token,)) if token < BYTES else b""

    def to_json(self) -> dict[str, Any]:
        """What `load_tokenizer` reads back from a tokenizer.json."""
        return {"type": "Bytes", "specials": list(self.specials)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Bytes":
        """The tokenizer that `to_json` wrote. Raises InputError for an unknown key or a wrong value."""
        for key in data:
            if key not in ("type", "specials"):
                raise InputError(f"Bytes.{key}: unknown key{nearest(key, ('type', 'specials'))}")
        specials = data.get("specials", [])
        if not isinstance(specials, list) or not all(isinstance(special, str) for special in specials):
            raise InputError(f"Bytes.specials: expected a list of strings, got {specials!r}")
        return cls(tuple(specials))


class ByteStream:
    """A StreamDecoder for tokens that are bytes: at most three of them wait for the rest of their character."""

    def __init__(self, token_bytes: Callable[[int], bytes], errors: str = "replace") -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors)

    def push(self, token: int) -> str:
        # A special token ends whatever character stood before it: the bytes on its two sides are never joined.
        data = self._token_bytes(token)
        return self._decode(data) if data else self.finish()

    def finish(self) -> str:
        return self._decode(b"", final=True)

    def _decode(self, data: bytes, final: bool = False) -> str:
        try:
            return self._decoder.decode(data, final)
        except UnicodeDecodeError as error:
            raise InputError(f"the ids are not UTF-8: {error.reason} at bytes {list(error.object)}") from None
