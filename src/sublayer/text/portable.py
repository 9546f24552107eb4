"""Our own tokenizers as the tokenizers library has them: the same ids for the same text, wherever it is read."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from ..errors import InputError
from .build import added_tokens, byte_level, framing, from_json
from .bulk import BYTE_OF
from .byte_pairs import BytePairs
from .bytes import Bytes
from .counted import Characters, Words
from .patterns import PATTERNS
from .pretrained import Pretrained
from .sentence_piece import SentencePiece
from .tokenizer import Tokenizer


def portable(tokenizer: Tokenizer) -> Pretrained | SentencePiece:
    """The tokenizer in a form whose `save` writes what other libraries read; those that have it are returned as is.

    Bytes become a BPE that merges nothing; characters and words, a table of words. What a text is framed with is kept.
    A text that `Characters` or `Words` refuse is an error there too. Raises InputError for a special token that is also
    a unit, which such a table cannot tell apart.
    """
    if isinstance(tokenizer, Pretrained | SentencePiece):
        return tokenizer
    if isinstance(tokenizer, Bytes):
        specials = {name: 256 + i for i, name in enumerate(tokenizer.specials)}
        model = byte_level(BYTE_OF, [], [PATTERNS["gpt2"]], specials=specials, frame=(tokenizer.specials[:1], ()))
        return BytePairs(model, eos=tokenizer.eos)
    if isinstance(tokenizer, Characters):
        return _table(tokenizer, r"[\s\S]")
    if isinstance(tokenizer, Words):
        return _table(tokenizer, _words())
    raise InputError(f"{type(tokenizer).__name__}: no tokenizer.json of other libraries expresses this tokenizer")


def _table(tokenizer: Characters | Words, pattern: str) -> Pretrained:
    vocab = {unit: id for id, unit in enumerate(tokenizer.units)}
    named = {name: id for name, id in ((tokenizer.unknown, tokenizer.unknown_id), (tokenizer.end, tokenizer.size - 1))
             if name is not None}  # fmt: skip
    specials: dict[str, int] = {name: id for name, id in named.items() if id is not None}
    if taken := next((name for name in specials if name in vocab), None):
        raise InputError(f"the special token {taken!r} is one of the tokenizer's {tokenizer.unit}s too")
    frame = [] if tokenizer.end is None else [tokenizer.end]
    model = from_json({
        "version": "1.0",
        "added_tokens": added_tokens(specials, {}),
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
        "post_processor": framing(frame, (), specials),
        "decoder": {"type": "Fuse"},
        # Without an unknown, a name that no unit has: then the library refuses what is none of them, as we do.
        "model": {"type": "WordLevel", "vocab": {**vocab, **specials}, "unk_token": tokenizer.unknown or ""},
    })  # fmt: skip
    config: dict[str, Any] = {} if tokenizer.unknown is None else {"unk_token": tokenizer.unknown}
    return Pretrained(model, eos=tokenizer.eos, unknown=tokenizer.unknown_id, config=config)


@cache
def _words() -> str:
    """`counted.WORD` with its classes as ranges of characters: the two regex engines have tables of their own."""
    word, space = _ranges(re.compile(r"\w").match), _ranges(re.compile(r"\s").match)
    return rf" ?[{word}]+| ?[^{word}{space}]|[{space}]+(?![^{space}])|[{space}]+"


def _ranges(belongs: Callable[[str], object]) -> str:
    """The inside of a character class."""

    def runs() -> Iterator[tuple[int, int]]:
        first = None
        for code in range(sys.maxunicode + 2):
            inside = code <= sys.maxunicode and not 0xD800 <= code < 0xE000 and belongs(chr(code))
            if inside and first is None:
                first = code
            elif not inside and first is not None:
                yield first, code - 1
                first = None

    return "".join(rf"\x{{{a:X}}}" if a == b else rf"\x{{{a:X}}}-\x{{{b:X}}}" for a, b in runs())
