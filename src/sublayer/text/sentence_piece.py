"""SentencePiece models (unigram, and BPE with byte fallback), through the library of that name."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError
from ..files import replacing
from .difference import DifferenceStream
from .ending import marks, write_eos
from .tokenizer import Ids, Names, Policy, check_id, check_policy, utf8

Frame = tuple[tuple[int, ...], tuple[int, ...]]
"""Ids before and after a text."""


class SentencePiece:
    """A SentencePiece model. See Tokenizer for what the methods promise.

    Its control pieces ("<s>", "</s>") are its special tokens. Where they are asked for inside a text, what stands
    between them is encoded as texts of their own: a space is put before each if the model puts one before a text.
    """

    def __init__(
        self,
        model: bytes,
        *,
        eos: tuple[int, ...] | None = None,
        frame: Frame = ((), ()),
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """model: what a `.model` file holds. eos: the model's own, if None. config: as Pretrained's.

        Raises InputError for what the library does not take.
        """
        from sentencepiece import SentencePieceProcessor

        self._model = SentencePieceProcessor()
        try:
            self._model.LoadFromSerializedProto(model)
            self.size = self._model.get_piece_size()
            self._model.id_to_piece(list(range(self.size)))  # refuses a piece that is not UTF-8, which would come later
        except Exception as error:  # RuntimeError, or whatever its C++ throws
            raise InputError(f"not a SentencePiece model: {error}") from None
        own = self._model.eos_id()
        self.eos = eos if eos is not None else (own,) if own >= 0 else ()
        self._frame, self._config = frame, dict(config or {})

    @property
    def bos(self) -> tuple[int, ...]:
        """The model's own id for the begin of a text, if it has one."""
        return (self._model.bos_id(),) if self._model.bos_id() >= 0 else ()

    def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
        ids = self._encode((text,), specials)[0]
        return [*self._frame[0], *ids, *self._frame[1]] if framed else ids

    def encode_batch(self, texts: Sequence[str], *, specials: Policy = "text") -> list[Ids]:
        return [np.array(ids, np.uint32) for ids in self._encode(texts, specials)]

    def decode(self, ids: Sequence[int]) -> str:
        return self._decode(ids)

    def stream(self) -> DifferenceStream:
        return DifferenceStream(self._decode)

    def token_bytes(self, token: int) -> bytes:
        check_id(token, self.size)
        if token in self._special_ids or self._model.is_unknown(token):
            return b""
        piece = self._model.id_to_piece(token)
        return bytes((int(piece[3:5], 16),)) if self._model.is_byte(token) else piece.replace("▁", " ").encode("utf-8")

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.model and tokenizer_config.json. A tokenizer.json there, which would be read first, goes."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "tokenizer.model") as path:
            path.write_bytes(self.to_bytes())
        (folder / "tokenizer.json").unlink(missing_ok=True)
        before, after = self._frame
        framing = {"add_bos_token": bool(before), "add_eos_token": bool(after)}
        write_eos(folder, self.eos, self._model.id_to_piece, self.id_of, self._config | framing)

    def to_bytes(self) -> bytes:
        """What its tokenizer.model holds."""
        return self._model.serialized_model_proto()

    @property
    def marks(self) -> dict[str, int]:
        """The ids of bos_token, pad_token and so on, as far as tokenizer_config.json names them."""
        return marks(self._config, self.id_of)

    def name_of(self, token: int) -> str | None:
        """How a token is called, special or not."""
        return self._model.id_to_piece(token)

    def id_of(self, piece: str) -> int | None:
        """The id of a piece; None if there is none."""
        found = self._model.piece_to_id(piece)
        return None if self._model.is_unknown(found) and self._model.id_to_piece(found) != piece else found

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(filter(self._model.is_control, range(self.size)))

    @cached_property
    def _names(self) -> Names:
        return Names({self._model.id_to_piece(token): token for token in self._special_ids})

    def _encode(self, texts: Sequence[str], specials: Policy) -> list[list[int]]:
        check_policy(specials)
        for text in texts:
            utf8(text)
            if specials == "error":
                self._names.refuse(text)
        if specials != "special":
            return self._model.encode(list(texts), out_type=int)
        return [list(self._encode_parts(text)) for text in texts]

    def _encode_parts(self, text: str) -> Iterator[int]:
        for part in self._names.split(text):
            yield from [part] if isinstance(part, int) else self._model.encode(part, out_type=int)

    def _decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            check_id(token, self.size)
        return self._model.decode([token for token in ids if token not in self._special_ids])
