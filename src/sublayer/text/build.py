"""A tokenizer of the tokenizers library from the parts that other formats hold."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from ..errors import InputError
from .merges import Pair
from .patterns import DIGIT


def byte_level(
    vocab: Mapping[str, int],
    merges: Sequence[Pair],
    patterns: Sequence[str],
    *,
    specials: Mapping[str, int] | None = None,
    ordinary: Mapping[str, int] | None = None,
    frame: tuple[Sequence[str], Sequence[str]] = ((), ()),
    nfc: bool = False,
    ignore_merges: bool = False,
) -> tokenizers.Tokenizer:
    """A byte-level BPE that cuts text by patterns, one inside what the other left over.

    vocab: a character for each byte (see bulk.BYTE_OF). specials and ordinary: tokens beside it, the ordinary ones
    found in any text. frame: the special tokens before and after a text.
    Raises InputError for merges of tokens that the vocabulary lacks.
    """
    specials, ordinary = specials or {}, ordinary or {}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    data = {
        "version": "1.0",
        "added_tokens": added_tokens(specials, ordinary),
        "normalizer": {"type": "NFC"} if nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*map(_step, patterns), to_bytes]},
        "post_processor": framing(*frame, specials),
        "decoder": to_bytes,
        "model": {
            "type": "BPE",
            # The library numbers added tokens one after the other, unless the vocabulary has their names.
            "vocab": {**vocab, **specials, **ordinary},
            "merges": merges,
            "ignore_merges": ignore_merges,
        },
    }
    return from_json(data)


def added_tokens(specials: Mapping[str, int], ordinary: Mapping[str, int]) -> list[dict[str, Any]]:
    """The entries for tokens that are found in a text as they stand."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    kinds = ((specials, True), (ordinary, False))
    added = [
        {"id": id, "content": name, "special": special, **flags} for of, special in kinds for name, id in of.items()
    ]
    return sorted(added, key=lambda token: token["id"])


def framing(before: Sequence[str], after: Sequence[str], specials: Mapping[str, int]) -> dict[str, Any] | None:
    """The post-processor that puts special tokens around a text; None where there are none."""
    if not before and not after:
        return None

    def around(name: str) -> list[dict[str, Any]]:
        text = {"Sequence": {"id": name, "type_id": 0}}
        marks = [[{"SpecialToken": {"id": special, "type_id": 0}} for special in side] for side in (before, after)]
        return [*marks[0], text, *marks[1]]

    used = {name: {"id": name, "ids": [specials[name]], "tokens": [name]} for name in (*before, *after)}
    return {
        "type": "TemplateProcessing",
        "single": around("A"),
        "pair": [*around("A"), *around("B")],
        "special_tokens": used,
    }


def _step(pattern: str) -> dict[str, Any]:
    if pattern == DIGIT:  # as its users have it: the library's own table of digits is newer than its regex engine's
        return {"type": "Digits", "individual_digits": True}
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def from_json(data: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """What the library makes of a tokenizer.json. Raises InputError for what it does not take."""
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"the tokenizers library does not take it: {error}") from None
