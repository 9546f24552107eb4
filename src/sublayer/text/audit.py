"""What a tokenizer makes of a text, in figures: in all, by script, by kind of file; several tokenizers side by side.

Figures by script come from pieces: words, numbers, runs of signs, runs of white space, each encoded by itself with the
space before it. That is how most tokenizers see them anyway; those that do not are a little better in whole texts.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from functools import cache
from pathlib import PurePath
from typing import Any

import numpy as np

from ..errors import InputError
from .tokenizer import Ids, Tokenizer, utf8

# In order: a piece is of the first kind that fits it.
SPACED = ("Latin", "Greek", "Cyrillic", "Armenian", "Hebrew", "Arabic", "Devanagari", "Bengali", "Tamil", "Hangul")
UNSPACED = ("Han", "Kana", "Thai")
OTHERS = ("other letters", "digits", "emoji", "signs", "white space", "control")
_LETTERS = {name: rf"\p{{{name}}}" for name in (*SPACED, *UNSPACED)} | {"Kana": r"[\p{Hiragana}\p{Katakana}ー]"}
_CLASSES = {
    "digits": r"\p{N}+",
    **{name: rf"(?:{letter}\p{{M}}*)+" for name, letter in _LETTERS.items()},
    "other letters": r"(?:\p{L}\p{M}*)+",
    # Pictures with what joins and colours them; not the three signs that are pictures only if asked for.
    "emoji": r"(?:(?![©®™])\p{Extended_Pictographic}|[\p{Emoji_Modifier}\p{Regional_Indicator}\u200d\ufe0f])+",
    "signs": r"[\p{P}\p{S}]+",
    "control": r"[^\s\p{L}\p{N}\p{P}\p{S}]+",
}
SCRIPTS = (*SPACED, *UNSPACED, *OTHERS)

WORDS = (*SPACED, "other letters")
"""Scripts that write spaces between words, whose tokens per word can be counted."""

BATCH = 2**21  # characters that are encoded together


@dataclass
class Figures:
    """Sums over a part of the text; the ratios that are read from them."""

    bytes: int = 0
    """Of UTF-8."""
    tokens: int = 0
    words: int = 0
    """Of scripts that write spaces between them."""
    word_tokens: int = 0
    whole_words: int = 0
    """Words that are one token, and not the one for the unknown."""
    lost_bytes: int = 0
    """Of pieces of text that do not come back from their tokens."""

    @property
    def bytes_per_token(self) -> float | None:
        """Of the bytes that come back: a token that loses its text says nothing of it."""
        return (self.bytes - self.lost_bytes) / self.tokens if self.tokens else None

    @property
    def tokens_per_word(self) -> float | None:
        return self.word_tokens / self.words if self.words else None

    @property
    def whole_share(self) -> float | None:
        return self.whole_words / self.words if self.words else None

    @property
    def lost_share(self) -> float:
        return self.lost_bytes / self.bytes if self.bytes else 0.0

    def add_words(self, other: "Figures") -> None:
        self.words += other.words
        self.word_tokens += other.word_tokens
        self.whole_words += other.whole_words
        self.lost_bytes += other.lost_bytes


@dataclass
class Report:
    """What one tokenizer made of the text."""

    size: int
    """Its ids."""
    total: Figures = field(default_factory=Figures)
    scripts: dict[str, Figures] = field(default_factory=dict)
    """By script or kind of sign, in the order of SCRIPTS."""
    kinds: dict[str, Figures] = field(default_factory=dict)
    """By what the file's name ends with, the most text first."""
    unused: int = 0
    """Tokens, special ones apart, that did not occur."""
    changed: int = 0
    """Documents that do not come back from their tokens as they were."""
    refused: int = 0
    """Documents that it could not encode; the sums are of what was left without the characters that it refuses."""


@dataclass
class Audit:
    """Reports on the same text, by the names of the tokenizers."""

    documents: int
    bytes: int
    reports: dict[str, Report]


def audit(
    tokenizers: Mapping[str, Tokenizer],
    documents: Iterable[tuple[str, str]],
    progress: Callable[[int], object] | None = None,
) -> Audit:
    """Encodes (text, source) with each of the tokenizers; a source's name says what kind of file it is.

    progress is called with the bytes of text read so far. Memory grows with the distinct words.
    Raises InputError where there is no text.
    """
    found = Audit(0, 0, {name: Report(tokenizer.size) for name, tokenizer in tokenizers.items()})
    used = {name: np.zeros(tokenizer.size, bool) for name, tokenizer in tokenizers.items()}
    pieces: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for batch in _batches(documents):
        found.documents += len(batch)
        found.bytes += sum(len(utf8(text)) for text, _ in batch)
        for text, kind in batch:
            pieces[kind].update(_pieces()(text))
        for name, tokenizer in tokenizers.items():
            _add_texts(found.reports[name], tokenizer, batch, used[name])
        if progress:
            progress(found.bytes)
    if not found.bytes:
        raise InputError("no text to audit: all texts are empty, or there are none")
    for name, tokenizer in tokenizers.items():
        report = found.reports[name]
        _add_pieces(report, tokenizer, pieces)
        plain = np.array([bool(tokenizer.token_bytes(id)) for id in range(tokenizer.size)])
        report.unused = int((plain & ~used[name]).sum())
    return found


def kind_of(source: str) -> str:
    """What a source's file is called at its end: ".py" for "a/b.py", "b.py#2" and "b.py.gz:17"; "" for none."""
    name = re.sub(r"(:\d+)?(#\d+)?$", "", source)
    path = PurePath(name)
    if path.suffix in (".gz", ".zst"):
        path = path.with_suffix("")
    return path.suffix.lower()


def classify(piece: str) -> str:
    """The script of a piece, or what kind of signs it is made of: one of SCRIPTS."""
    bare = piece.removeprefix(" ")
    if not bare or bare.isspace():
        return "white space"
    return next(name for name, pattern in _compiled().items() if pattern.match(bare))


def _batches(documents: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    """Texts and the kinds of their files."""
    batch: list[tuple[str, str]] = []
    size = 0
    for text, source in documents:
        batch.append((text, kind_of(source)))
        size += len(text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@cache
def _pieces() -> Callable[[str], list[str]]:
    import regex  # which knows scripts, as re does not

    return regex.compile("|".join([*(f" ?{pattern}" for pattern in _CLASSES.values()), r"\s+(?!\S)|\s+"])).findall


@cache
def _compiled() -> dict[str, Any]:
    import regex

    return {name: regex.compile(pattern) for name, pattern in _CLASSES.items()}


def _add_texts(report: Report, tokenizer: Tokenizer, batch: Sequence[tuple[str, str]], used: np.ndarray) -> None:
    """Whole texts: tokens, which of the vocabulary, and whether the text comes back."""
    for (text, kind), (ids, whole) in zip(batch, _encoded(tokenizer, [text for text, _ in batch]), strict=True):
        used[ids] = True
        report.refused += not whole
        report.changed += tokenizer.decode(ids.tolist()) != text
        for figures in (report.total, report.kinds.setdefault(kind, Figures())):
            figures.bytes += len(text.encode())
            figures.tokens += len(ids)


def _add_pieces(report: Report, tokenizer: Tokenizer, pieces: Mapping[str, Counter[str]]) -> None:
    """Words, and the rest by script."""
    distinct = list(dict.fromkeys(piece for counts in pieces.values() for piece in counts))
    of_one: dict[str, Figures] = {}
    for piece, (ids, whole) in zip(distinct, _encoded(tokenizer, distinct), strict=True):
        figures = of_one[piece] = Figures(len(piece.encode()), len(ids))
        if classify(piece) in WORDS:
            figures.words, figures.word_tokens = 1, len(ids)
            figures.whole_words = whole and len(ids) == 1 and tokenizer.token_bytes(int(ids[0])) != b""
        if report.changed:
            figures.lost_bytes = _lost(piece, tokenizer.decode(ids.tolist()))
    sums: defaultdict[str, Figures] = defaultdict(Figures)
    for kind, counts in pieces.items():
        of_kind = report.kinds.setdefault(kind, Figures())
        for piece, count in counts.items():
            one = of_one[piece]
            many = Figures(*(count * value for value in vars(one).values()))
            script = sums[classify(piece)]
            script.bytes += many.bytes
            script.tokens += many.tokens
            for figures in (script, of_kind, report.total):
                figures.add_words(many)
    report.scripts = {name: sums[name] for name in SCRIPTS if name in sums}
    report.kinds = dict(sorted(report.kinds.items(), key=lambda item: (-item[1].bytes, item[0])))


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[tuple[Ids, bool]]:
    """The ids of each text, and whether it could be encoded: else they are of the parts of it that could."""
    try:
        return [(ids, True) for ids in tokenizer.encode_batch(texts)]
    except InputError:
        if len(texts) > 1:
            middle = len(texts) // 2
            return _encoded(tokenizer, texts[:middle]) + _encoded(tokenizer, texts[middle:])
    parts = _pieces()(texts[0])
    parts = parts if len(parts) > 1 else list(texts[0])
    found = _encoded(tokenizer, parts) if len(texts[0]) > 1 else []
    return [(np.concatenate([np.empty(0, np.uint32), *(ids for ids, _ in found)]), False)]


def _lost(piece: str, back: str) -> int:
    """Bytes of a piece that do not come back. The space before a word may; that it does not is seen in whole texts."""
    if back == piece:
        return 0
    bare = piece if piece.isspace() or back.startswith(" ") else piece.removeprefix(" ")
    kept = SequenceMatcher(None, bare, back, autojunk=False).get_matching_blocks()
    size = sum(len(bare[block.a : block.a + block.size].encode()) for block in kept)
    return len((bare if size else piece).encode()) - size
