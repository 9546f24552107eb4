"""Tokenizers that come with a checkpoint: tokenizer.json, ours or Hugging Face's."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError
from .bytes import Bytes
from .tokenizer import Tokenizer, check_id, utf8


def load_tokenizer(folder: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, from its tokenizer.json.

    The ids that end a text come from generation_config.json, else config.json, else tokenizer_config.json.
    Raises InputError where tokenizer.json is missing or is not one.
    """
    folder = Path(folder)
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise InputError(f"{folder}: no tokenizer.json there, neither Sublayer's own nor Hugging Face's")
    data = _read(path)
    if data.get("type") == "Bytes":
        return Bytes.from_json(data)
    try:
        model = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path}: not a tokenizer that the tokenizers library reads: {error}") from None
    return Pretrained(model, eos=_eos(folder, model), unknown=_unknown(data["model"], model))


class Pretrained:
    """A tokenizer of the tokenizers library. See Tokenizer for what the methods promise."""

    def __init__(self, model: tokenizers.Tokenizer, *, eos: tuple[int, ...] = (), unknown: int | None = None) -> None:
        """Takes model over: special tokens are no longer found in text, and nothing is cut off or padded.

        unknown is the id for what the vocabulary lacks: the one special token that text may produce.
        """
        model.encode_special_tokens = True
        # Files often keep the last limits that somebody set, such as 128 tokens for training sentence embeddings.
        model.no_truncation()
        model.no_padding()
        self._model = model
        self._specials = {id: token.content for id, token in model.get_added_tokens_decoder().items() if token.special}
        self._unknown = unknown
        self.size = max(model.get_vocab().values()) + 1
        self.eos = eos

    def encode(self, text: str, *, framed: bool = False) -> list[int]:
        """As Tokenizer.encode. Raises InputError also for text that the vocabulary holds as a special token only.

        That happens in SentencePiece vocabularies, where "</s>" is a piece like any other.
        """
        utf8(text)
        encoding = self._model.encode(text, add_special_tokens=False)
        forged = self._specials.keys() & set(encoding.ids) - {self._unknown}
        if forged:
            names = ", ".join(repr(self._specials[id]) for id in sorted(forged))
            raise InputError(f"the text holds {names}, which this tokenizer knows only as a special token")
        return self._model.post_process(encoding).ids if framed else encoding.ids

    def decode(self, ids: Sequence[int]) -> str:
        for token in ids:
            check_id(token, self.size)
        return self._model.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> "PretrainedStream":
        return PretrainedStream(self)


class PretrainedStream:
    """The StreamDecoder of Pretrained.

    It decodes the ids not yet shown together with those shown last, for what a token reads as depends on the one before
    it: a leading space is kept or dropped, a character's bytes are spread over tokens. One difference to `decode`
    remains: where a run of byte-fallback tokens is not UTF-8, `decode` replaces the characters before the fault too.
    """

    def __init__(self, tokenizer: Pretrained) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._shown = 0  # how many of _ids the text returned so far covers

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._unseen()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        text = self._unseen()
        self._ids, self._shown = [], 0
        return text

    def _unseen(self) -> str:
        decode = self._tokenizer.decode
        return decode(self._ids)[len(decode(self._ids[: self._shown])) :]


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data


def _eos(folder: Path, model: tokenizers.Tokenizer) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name).get("eos_token_id") if (folder / name).is_file() else None
        if found is not None:
            ids = tuple(found) if isinstance(found, list) else (found,)
            if not all(type(token) is int and token >= 0 for token in ids):
                raise InputError(f"{folder / name}: eos_token_id is a token id or a list of them, got {found!r}")
            return ids
    path = folder / "tokenizer_config.json"
    token = _read(path).get("eos_token") if path.is_file() else None
    if token is None:
        return ()
    content = token.get("content") if isinstance(token, dict) else token
    if not isinstance(content, str):
        raise InputError(f"{path}: eos_token is the text of a token, got {content!r}")
    eos = model.token_to_id(content)
    if eos is None:
        raise InputError(f"{path}: eos_token {content!r} is not in the vocabulary of tokenizer.json")
    return (eos,)


def _unknown(data: dict[str, Any], model: tokenizers.Tokenizer) -> int | None:
    if "unk_id" in data:  # Unigram names the id, the other models the token
        return data["unk_id"]
    return model.token_to_id(data.get("unk_token") or "")
