"""How the tokenizers library cuts a text into pieces, as one pattern that makes tiktoken cut it in the same places."""

import re
import unicodedata
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

from .patterns import DEEPSEEK_V3, DIGIT, GPT2, PATTERNS, QWEN2, QWEN35, TEKKEN


class Cut(NamedTuple):
    """One pattern for tiktoken; what it reads otherwise than the library would is cut by the library."""

    pattern: str
    unlike: re.Pattern[str] | None
    """Characters that the two regex engines put into different classes: their Unicode tables may differ in age."""


def cut(pre_tokenizer: dict[str, Any] | None) -> Cut | None:
    """The pattern that cuts as a tokenizer.json's pre_tokenizer does; None where none is known to."""
    found = list(steps(pre_tokenizer or {}))
    if not found or found[-1] != "bytes" or "bytes" in found[:-1] or None in found:
        return None
    pattern = _PATTERNS.get(tuple(str(step) for step in found[:-1]))
    return Cut(pattern, _unlike(pattern)) if pattern else None


def steps(step: dict[str, Any]) -> Iterator[str | None]:
    """Each step's pattern, in order; "bytes" where characters become bytes; None for a step of another kind."""
    match step:
        case {"type": "Sequence", "pretokenizers": list(inner)}:
            for one in inner:
                yield from steps(one)
        case {"type": "ByteLevel", "add_prefix_space": False}:
            if step.get("use_regex", True):
                yield GPT2
            yield "bytes"
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Isolated", "invert": False}:
            yield pattern
        case {"type": "Split", "pattern": {"Regex": str(pattern)}, "behavior": "Removed", "invert": True}:
            yield pattern  # nothing lies between matches of the patterns that are known
        case {"type": "Digits", "individual_digits": True}:
            yield DIGIT
        case _:
            yield None


def _grouped(pattern: str, tail: str = r"\s+(?!\S)|\s+") -> str:
    """The branches before the tail as one group.

    The engine hands a group without look-around to a faster one whole, and tries loose branches one by one: 1.7 times
    as fast, and the same matches, since nothing follows the group that could send it back.
    """
    head = pattern.removesuffix("|" + tail)
    return f"(?:{head})|{tail}"


def _digits_first() -> str:
    """GPT-2's pattern inside what single digits leave over: a run of spaces before a digit ends there, and is whole."""
    return _grouped(r"\p{N}|'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?[^\s\p{L}\p{N}]+", r"\s+(?![^\s\p{N}])|\s+")


def _deepseek() -> str:
    """Its three patterns as one. Each cuts what those before it cut: numbers, runs of ideographs and kana, the rest.

    The third finds nothing in numbers, and words and marks in the other two, apart. It matches no control or format
    character, nor a code without a character: a run of them, up to one that a letter follows, is a piece.
    """
    numbers, ideographs, words = DEEPSEEK_V3
    east = ideographs.strip("[]+")

    def inside(kinds: str) -> str:
        return rf"[[{east}]&&[{kinds}]]"

    def outside(kinds: str) -> str:
        return rf"[[{kinds}]--[{east}]]"

    letters, marks = r"\p{L}\p{M}", r"\p{P}\p{S}"
    head = "|".join([
        numbers,
        rf"{inside('^' + letters[:5] + marks)}?{inside(letters)}+",
        rf"{inside(marks)}+",
        words.partition("|[^")[0],
        rf"[^\r\n\p{{L}}\p{{P}}\p{{S}}\p{{N}}{east}]?{outside(letters)}+",
        rf" ?{outside(marks)}+[\r\n]*",
        r"\s*[\r\n]+",
    ])  # fmt: skip
    nothing = "|".join([
        rf"(?:{inside('^' + letters + marks)}(?!{inside(letters)}))+",
        rf"(?:[^\s\p{{L}}\p{{M}}\p{{P}}\p{{S}}\p{{N}}{east}](?!{outside(letters)}))+",
    ])  # fmt: skip
    return _grouped(head, rf"\s+(?![^\s\p{{N}}{east}])|\s+|{nothing}")


_PATTERNS: dict[tuple[str, ...], str] = {
    (GPT2,): _grouped(PATTERNS["gpt2"]),
    (DIGIT, GPT2): _digits_first(),
    DEEPSEEK_V3: _deepseek(),
    **{(pattern,): _grouped(pattern) for pattern in (*PATTERNS.values(), QWEN2, QWEN35, TEKKEN)},
}


@cache
def _unlike(pattern: str) -> re.Pattern[str] | None:
    """Finds the characters that tiktoken's engine and the library put into different classes of pattern."""
    differ = set().union(*(_class_differs(kind) for kind in set(re.findall(r"\\p\{\w+\}|\\s", pattern))))
    if pattern == _PATTERNS[DIGIT, GPT2]:
        differ |= _digits_differ()
    return re.compile(f"[{re.escape(''.join(sorted(differ)))}]") if differ else None


@cache
def _class_differs(kind: str) -> frozenset[str]:
    from tokenizers import Regex, pre_tokenizers

    pieces = pre_tokenizers.Split(Regex(kind + "+"), "removed").pre_tokenize_str(_characters())
    return frozenset(set("".join(piece for piece, _ in pieces)) ^ _outside(kind))


@cache
def _digits_differ() -> frozenset[str]:
    """The library's Digits has a table of its own."""
    from tokenizers import pre_tokenizers

    runs = pre_tokenizers.Digits(individual_digits=False).pre_tokenize_str(_characters())  # other, digits, other, …
    return frozenset(set("".join(piece for piece, _ in runs[::2])) ^ _outside(DIGIT))


def _outside(kind: str) -> set[str]:
    """The characters outside a class, as tiktoken's engine has it."""
    import tiktoken

    single_bytes = {bytes((byte,)): byte for byte in range(256)}
    outside = kind.replace(r"\p", r"\P").replace(r"\s", r"\S")
    engine = tiktoken.Encoding("", pat_str=outside, mergeable_ranks=single_bytes, special_tokens={})
    return set(bytes(engine.encode_ordinary(_characters())).decode("utf-8"))


@cache
def _characters() -> str:
    """All whose class may depend on the age of a table: not ASCII, the old ideographs and Hangul, or private ones."""
    old = (*range(0x80, 0x3400), *range(0xA000, 0xAC00), *range(0xD7A4, 0xD800), *range(0xF900, 0x20000))
    new = filter(lambda code: unicodedata.category(chr(code)) == "Cn", range(0x20000, 0x33480))
    return "".join(map(chr, (*old, *new, *range(0xE0000, 0xE0200))))
