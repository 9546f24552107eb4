"""Reading the tokenizers that checkpoints bring, in whatever format they come."""

from pathlib import Path
from typing import Any

import tokenizers

from ..errors import InputError
from .bulk import BYTE_OF
from .byte_pairs import BytePairs
from .bytes import Bytes
from .ending import read_eos, read_json
from .pretrained import Pretrained
from .tokenizer import Tokenizer


def load_tokenizer(path: Path | str) -> Tokenizer:
    """The tokenizer of a checkpoint's folder, from its tokenizer.json.

    The ids that end a text come from generation_config.json, else config.json, else tokenizer_config.json.
    Raises InputError where tokenizer.json is missing or is not one.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise InputError(f"{path}: no tokenizer.json there, neither Sublayer's own nor Hugging Face's")
    data = read_json(file)
    if data.get("type") == "Bytes":
        return Bytes.from_json(data)
    try:
        model = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{file}: not a tokenizer that the tokenizers library reads: {error}") from None
    eos = read_eos(file.parent, model.token_to_id)
    config = file.parent / "tokenizer_config.json"
    about = read_json(config) if config.is_file() else None
    if _is_byte_level(data):
        return BytePairs(model, eos=eos, config=about)
    return Pretrained(model, eos=eos, unknown=_unknown(data["model"], model), config=about)


def _is_byte_level(data: dict[str, Any]) -> bool:
    """Whether a tokenizer.json is a BPE over bytes, all of them."""
    model, decoder = data["model"], data.get("decoder") or {}
    plain = not any(model.get(key) for key in ("continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"))
    return (
        model.get("type", "BPE") == "BPE"
        and plain
        and decoder.get("type") == "ByteLevel"
        and BYTE_OF.keys() <= model.get("vocab", {}).keys()
    )


def _unknown(data: dict[str, Any], model: tokenizers.Tokenizer) -> int | None:
    if "unk_id" in data:  # Unigram names the id, the other models the token
        return data["unk_id"]
    return model.token_to_id(data.get("unk_token") or "")
