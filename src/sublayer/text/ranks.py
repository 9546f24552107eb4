"""tiktoken's files: a line for each token, its bytes in base 64 and its rank, which is its id."""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from ..errors import InputError
from .byte_pairs import BytePairs
from .ending import read_bytes
from .patterns import PATTERNS

END = "<|endoftext|>"
FILL = {"<|fim_prefix|>": 100258, "<|fim_middle|>": 100259, "<|fim_suffix|>": 100260}


class Published(NamedTuple):
    """What a file of ranks does not say about itself."""

    pattern: str
    specials: dict[str, int]
    eos: str = END
    frame: tuple[str, ...] = ()


def _llama3() -> dict[str, int]:
    names = ["begin_of_text", "end_of_text", *(f"reserved_special_token_{i}" for i in range(4))]
    names += ["start_header_id", "end_header_id", "reserved_special_token_4", "eot_id"]
    names += [f"reserved_special_token_{i}" for i in range(5, 251)]
    return {f"<|{name}|>": 128_000 + i for i, name in enumerate(names)}


# By the number of their ranks. Sources: tiktoken's openai_public.py, and Llama 3's tokenizer.py.
PUBLISHED = {
    50_256: Published("gpt2", {END: 50_256}),  # r50k_base, GPT-2's
    50_280: Published("gpt2", {END: 50_256}),  # p50k_base, in which the end stands between two ranks
    100_256: Published("cl100k", {END: 100_257, **FILL, "<|endofprompt|>": 100_276}),
    128_000: Published("cl100k", _llama3(), "<|end_of_text|>", ("<|begin_of_text|>",)),
    199_998: Published("o200k", {END: 199_999, "<|endofprompt|>": 200_018}),
}


def load_ranks(path: Path, pattern: str | None, specials: Mapping[str, int] | None) -> BytePairs:
    """pattern: one of PATTERNS or a regex; with specials, for a file that is not one of those published.

    The first of the specials ends a text. Raises InputError for a line that is no token, and for an unknown file.
    """
    ranks = _read(path)
    known = PUBLISHED.get(len(ranks))
    if known is None and (pattern is None or specials is None):
        raise InputError(
            f"{path}: {len(ranks)} ranks, not those of a published tokenizer: say how it cuts text and what "
            "its special tokens are, with pattern=… and specials={name: id}"
        )
    chosen = dict(known.specials if specials is None and known else specials or {})
    end = known.eos if known and known.eos in chosen else next(iter(chosen), None)
    cut = pattern or (known.pattern if known else "")
    frame = known.frame if known and specials is None else ()
    taken = {rank: token for token, rank in ranks.items()}
    for name, id in chosen.items():
        if id in taken:
            raise InputError(f"{path}: special token {name!r}: id {id} is that of {taken[id]!r}")
    try:
        eos = () if end is None else (chosen[end],)
        return BytePairs.from_ranks(ranks, PATTERNS.get(cut, cut), chosen, eos=eos, before=frame)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def is_ranks(data: bytes) -> bool:
    """Whether a file begins as one of ranks does. (Llama 3 has such a file under SentencePiece's usual name.)"""
    first = data[:4096].split(b"\n", 1)[0].split()
    return len(first) == 2 and first[1].isdigit() and _bytes(first[0]) is not None


def _read(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        parts = line.split()
        if not parts:
            continue
        token = _bytes(parts[0])
        if len(parts) != 2 or not parts[1].isdigit() or len(parts[1]) > 9 or not token:
            raise InputError(f"{path}:{number}: expected a token in base 64 and its rank, found {line[:60]!r}")
        if token in ranks:
            raise InputError(f"{path}:{number}: {token!r} has a rank already")
        ranks[token] = int(parts[1])
    if len(set(ranks.values())) != len(ranks):
        raise InputError(f"{path}: two tokens have one rank")
    if not ranks:
        raise InputError(f"{path}: no token in it")
    return ranks


def _bytes(base64_text: bytes) -> bytes | None:
    try:
        return base64.b64decode(base64_text, validate=True)
    except binascii.Error:
        return None
