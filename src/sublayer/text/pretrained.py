"""Tokenizers of the tokenizers library: any that a tokenizer.json describes."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from ..errors import InputError
from ..files import replacing
from .bulk import to_bytes
from .difference import DifferenceStream, streamed
from .ending import marks, write_eos
from .tokenizer import MAX_SIZE, Ids, Names, Policy, check_id, check_policy, utf8

BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


class Pretrained:
    """A tokenizer of the tokenizers library. See Tokenizer for what the methods promise."""

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        *,
        eos: tuple[int, ...] = (),
        unknown: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Takes model over: special tokens are no longer found in text, and nothing is cut off or padded.

        unknown is the id for what the vocabulary lacks: the one special token that text may produce.
        config is the rest of what tokenizer_config.json said, kept for `save`.
        Raises InputError for ids that no vocabulary has.
        """
        model.encode_special_tokens = True
        # Files often keep the last limits that somebody set, such as 128 tokens for training sentence embeddings.
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._added = model.get_added_tokens_decoder()
        self._specials = {id: token.content for id, token in self._added.items() if token.special}
        self._config = dict(config or {})
        self.size = max(model.get_vocab().values(), default=-1) + 1
        if self.size > MAX_SIZE:
            raise InputError(f"a token has the id {self.size - 1}, beyond the {MAX_SIZE} of any vocabulary")
        self.eos = eos
        self._forged = np.zeros(self.size, bool)
        self._forged[[id for id in self._specials if id != unknown]] = True

    @property
    def library(self) -> tokenizers.Tokenizer:
        """What it stands on."""
        return self._model

    def encode(self, text: str, *, framed: bool = False, specials: Policy = "text") -> list[int]:
        """As Tokenizer.encode. Raises InputError also for text that the vocabulary holds as a special token only.

        That happens in SentencePiece vocabularies, where "</s>" is a piece like any other.
        """
        self._check(text, specials)
        model = self._matching if specials == "special" else self._model
        with _told():
            encoding = model.encode(text, add_special_tokens=False)
        if specials != "special":
            self._refuse_forged(np.array(encoding.ids, np.uint32))
        return model.post_process(encoding).ids if framed else encoding.ids

    def encode_batch(self, texts: Sequence[str], *, specials: Policy = "text") -> list[Ids]:
        for text in texts:
            self._check(text, specials)
        model = self._matching if specials == "special" else self._model
        with _told():
            encodings = model.encode_batch_fast(list(texts), add_special_tokens=False)
        ids = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        if specials != "special":
            for one in ids:
                self._refuse_forged(one)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        text = self._decode(ids)
        # Where bytes are not UTF-8, the library replaces whole runs of them; a stream has shown the good ones already.
        return streamed(self, ids) if "\ufffd" in text else text

    def stream(self) -> "DifferenceStream":
        return DifferenceStream(self._decode)

    def token_bytes(self, token: int) -> bytes:
        """As Tokenizer.token_bytes. What stands for a space between words ("▁") is one; WordPiece's "##" is nothing."""
        check_id(token, self.size)
        piece = self._model.id_to_token(token)
        if piece is None or token in self._specials:
            return b""
        if token in self._added:
            return piece.encode("utf-8")
        if self._byte_fallback and (byte := BYTE_PIECE.fullmatch(piece)):
            return bytes((int(byte[1], 16),))
        if isinstance(self._model.model, tokenizers.models.WordPiece):
            return piece.removeprefix(self._model.model.continuing_subword_prefix).encode("utf-8")
        if isinstance(self._model.decoder, tokenizers.decoders.ByteLevel) and (data := to_bytes(piece)) is not None:
            return data
        return piece.replace("▁", " ").encode("utf-8")

    def save(self, folder: Path | str) -> None:
        """Writes tokenizer.json and tokenizer_config.json, as Hugging Face's libraries read them too.

        Where the folder's other files name another end of text, generation_config.json is set right.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "tokenizer.json") as path:
            path.write_text(self._model.to_str(pretty=True), encoding="utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        write_eos(folder, self.eos, self._model.id_to_token, self._model.token_to_id, config)

    @property
    def marks(self) -> dict[str, int]:
        """The ids of bos_token, pad_token and so on, as far as tokenizer_config.json names them."""
        return marks(self._config, self._model.token_to_id)

    def name_of(self, token: int) -> str | None:
        """How a token is called, special or not."""
        return self._model.id_to_token(token)

    def to_json(self) -> dict[str, Any]:
        """What its tokenizer.json says."""
        return json.loads(self._model.to_str())

    @cached_property
    def _matching(self) -> tokenizers.Tokenizer:
        """The same tokenizer, which finds special tokens in text. A copy: a switch would show in other threads."""
        return tokenizers.Tokenizer.from_str(self._model.to_str())  # what __init__ switched off is not stored

    @cached_property
    def _byte_fallback(self) -> bool:
        return bool(getattr(self._model.model, "byte_fallback", False))

    @cached_property
    def _special_names(self) -> Names:
        return Names({name: id for id, name in self._specials.items()})

    def _check(self, text: str, specials: Policy) -> None:
        check_policy(specials)
        utf8(text)
        if specials == "error":
            self._special_names.refuse(text)

    def _refuse_forged(self, ids: Ids) -> None:
        if self._forged[ids].any():
            names = ", ".join(repr(self._specials[id]) for id in np.unique(ids[self._forged[ids]]).tolist())
            raise InputError(f"the text holds {names}, which this tokenizer knows only as a special token")

    def _decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            check_id(token, self.size)
        return self._model.decode(list(ids), skip_special_tokens=True)


@contextmanager
def _told() -> Iterator[None]:
    """A text that the library refuses (of a table of words without an unknown) is a user's mistake."""
    try:
        yield
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"the tokenizer cannot encode this text: {error}") from None
