"""Training byte-level BPE: count a corpus's distinct pieces, then join the most frequent pair of neighbours, and again.

The result is, id for id, that of the tokenizers library's trainer, ties included: of pairs that are equally frequent,
the one with the smaller ids. It is written anew because that library counts pairs in 32 bits and wraps around without
a word, cannot be interrupted, and takes more of both time and memory (`make bench ONLY=tokenizer`).
Source: Sennrich et al. 2016, arXiv 1508.07909; over bytes, as GPT-2.
"""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from typing import Any, Literal

import numpy as np
import tokenizers

from ..errors import InputError, UsageError, nearest
from .bulk import BYTE_OF
from .byte_pairs import BytePairs
from .patterns import PATTERNS
from .tokenizer import utf8

KNOWN = 2**25
"""UTF-8 bytes of the distinct pieces that are kept; training takes about 60 bytes of memory for each."""

LEAST = 2
"""How often a pair has to occur to become a token: what occurs once teaches nothing."""

WINDOW = 2**18
"""Characters that are cut into pieces at a time, and so of the longest piece."""

AHEAD = 3  # pieces at a window's end that may come out otherwise in the whole text: no pattern looks further ahead

Pattern = Literal["gpt2", "cl100k", "o200k"]
Progress = Callable[[Literal["count", "merge"], int, int | None], object]
"""Called with what is going on, how much of it is done and of how much: bytes of text read, of an unknown number of
them (None), then merges."""


def train_bpe(
    texts: Iterable[str],
    vocab: int,
    *,
    pattern: Pattern = "gpt2",
    end: str | None = "<|endoftext|>",
    specials: Sequence[str] = (),
    progress: Progress | None = None,
) -> BytePairs:
    """A byte-level BPE tokenizer of `vocab` ids, learned from texts: bytes, then merges, then the end of a text.

    Ids 0 to 255 are the bytes in GPT-2's order; then each merge has the next id, so that a token's id is its rank; the
    special token `end`, if any, and then `specials` are the last ones, where they disturb no rank.

    texts are read once, one at a time. The same texts give the same tokenizer, in whatever order they come. Memory is
    bounded by the distinct pieces: once they exceed KNOWN bytes, the rarest are forgotten until half is left (then the
    order of the texts does count).

    Raises UsageError for a vocabulary smaller than 256 and the end, for an unknown pattern, and for an end that is a
    token too; InputError where texts hold nothing, or too little for so large a vocabulary, with the number possible.
    """
    if pattern not in PATTERNS:
        raise UsageError(f"pattern={pattern!r}: no such pattern{nearest(pattern, PATTERNS)}")
    if end == "":
        raise UsageError('end="": the special token needs a name; None does without one')
    smallest = 256 + (end is not None) + len(specials)
    if vocab < smallest:
        what = "the bytes" + (" and the end" if end else "") + (f" and {len(specials)} special" if specials else "")
        raise UsageError(f"vocab={vocab}: the smallest is {smallest}, {what}")
    import regex  # which knows the classes \p{…}, as re does not

    show = progress or (lambda stage, done, total: None)
    find = regex.compile(PATTERNS[pattern]).findall
    merges = _learn(count_pieces(texts, find, show), vocab - smallest, show)
    if len(merges) < vocab - smallest:
        most = smallest + len(merges)
        raise InputError(
            f"vocab={vocab}: after {most} tokens no pair of neighbours occurs {LEAST} times in this text;"
            f" ask for {most} or fewer, or give more text"
        )
    return _tokenizer(merges, pattern, end, specials)


def count_pieces(texts: Iterable[str], find: Callable[..., list[str]], show: Progress) -> Counter[str]:
    """How often each piece occurs, of those that find(text, start, stop) cuts text into; in bounded memory (KNOWN).

    Raises InputError where texts hold nothing.
    """
    pieces = Counter[str]()
    read, check = 0, KNOWN
    for text in texts:
        read += len(utf8(text))
        for some in _cut(find, text):
            pieces.update(some)
        if read >= check:
            pieces, size = _bounded(pieces)
            check = read + KNOWN - size  # before that, they cannot be too many again
        show("count", read, None)
    if not read:
        raise InputError("no text to train on: all texts are empty, or there are none")
    return _bounded(pieces)[0]


def _cut(find: Callable[..., list[str]], text: str) -> Iterator[list[str]]:
    """The pieces of text, some at a time."""
    start = 0
    while start < len(text):
        stop = start + WINDOW
        some = find(text, start, stop)
        if stop < len(text) and len(some) > AHEAD:
            stop -= sum(map(len, some[-AHEAD:]))
            del some[-AHEAD:]
        yield some
        start = stop


def _bounded(pieces: Counter[str]) -> tuple[Counter[str], int]:
    """The pieces, the rarest left out where they are too many; and their bytes."""
    sizes = np.fromiter((len(piece.encode()) for piece in pieces), np.int64, len(pieces))
    if sizes.sum() <= KNOWN:
        return pieces, int(sizes.sum())
    counts = np.fromiter(pieces.values(), np.int64, len(pieces))
    frequent = np.argsort(-counts, kind="stable")
    kept = np.zeros(len(pieces), bool)
    kept[frequent[np.cumsum(sizes[frequent]) <= KNOWN // 2]] = True
    return Counter(dict(compress(pieces.items(), kept))), int(sizes[kept].sum())


def _learn(pieces: Counter[str], wanted: int, show: Progress) -> list[tuple[int, int]]:
    """The pairs of ids that were joined, in order: the first makes id 256. Fewer than wanted where none is left."""
    text = _Text(pieces)
    del pieces  # in memory they take as much as the text made of them
    merges: list[tuple[int, int]] = []
    while len(merges) < wanted and (pair := text.most_frequent()):
        text.join(*pair, new=256 + len(merges))
        merges.append(pair)
        if len(merges) % 64 == 0 or len(merges) == wanted:
            show("merge", len(merges), wanted)
    return merges


class _Text:
    """Distinct pieces, one after the other, as linked lists of tokens; a token is known by the place of its first byte.

    Two neighbours become a pair when the later of them is made, all over the text at once, and from then on such a pair
    can only become rarer. So its places are written down once; those that are no longer true are seen when it is used.
    """

    def __init__(self, pieces: Counter[str]) -> None:
        data = [piece.encode() for piece in pieces]
        lengths = np.fromiter(map(len, data), np.int64, len(data))
        ends = np.cumsum(lengths)
        size = int(lengths.sum())
        ids = np.empty(256, np.int32)
        ids[list(BYTE_OF.values())] = np.arange(256)
        self.token = ids[np.frombuffer(b"".join(data), np.uint8)]  # -1: inside a token that begins before
        self.next = np.arange(1, size + 1, dtype=np.int32)  # -1: the piece's last
        self.next[ends - 1] = -1
        self.previous = np.arange(-1, size - 1, dtype=np.int32)  # -1: its first
        self.previous[ends - lengths] = -1
        self.piece = np.repeat(np.arange(len(data), dtype=np.int32), lengths)
        self.frequency = np.fromiter(pieces.values(), np.int64, len(pieces))
        self.counts: dict[int, int] = {}
        self.places: dict[int, np.ndarray] = {}
        self.queue: list[tuple[int, int]] = []  # (-count, pair), in which the count may be an older, larger one
        places = np.flatnonzero(self.next >= 0).astype(np.int32)
        self._add(places, (self.token[places] << 8 | self.token[self.next[places]]).astype(np.uint16))  # sorts faster

    def most_frequent(self) -> tuple[int, int] | None:
        while self.queue:
            count, pair = heapq.heappop(self.queue)
            now = self.counts.get(pair, 0)
            if now == -count:
                return pair >> 32, pair & 0xFFFFFFFF
            if now:
                heapq.heappush(self.queue, (-now, pair))
        return None

    def join(self, a: int, b: int, new: int) -> None:
        """Makes every a b the token `new`."""
        pair = a << 32 | b
        del self.counts[pair]
        first = self.places.pop(pair)
        second = self.next[first]
        still = (self.token[first] == a) & (second >= 0)
        still &= self.token[second] == b
        first, second = first[still], second[still]
        if a == b:
            odd = _odd(first, second)
            first, second = first[odd], second[odd]

        before, after = self.previous[first], self.next[second]
        self.token[second] = -1
        # Of a b a b, the pair in the middle goes as what follows b; what precedes a is -1 by now, and in no pair.
        preceded, followed = np.flatnonzero(before >= 0), np.flatnonzero(after >= 0)
        self._remove(
            np.concatenate((_pairs(self.token[before[preceded]], a), _pairs(b, self.token[after[followed]]))),
            self.frequency[self.piece[np.concatenate((first[preceded], first[followed]))]],
        )
        self.token[first] = new
        self.next[first] = after
        self.previous[after[followed]] = first[followed]

        # Of new new, the pair is found after the first, not before the second.
        before = self.previous[first]
        before = before[before >= 0]
        places = np.concatenate((before[self.token[before] != new], first[followed]))
        self._add(places, _pairs(self.token[places], self.token[self.next[places]]))

    def _add(self, places: np.ndarray, pairs: np.ndarray) -> None:
        """Counts the pairs that begin at these places; equal numbers in `pairs` are equal pairs."""
        order = np.argsort(pairs, kind="stable")
        starts = _starts(pairs[order])
        places = places[order]
        counts = np.add.reduceat(self.frequency[self.piece[places]], starts) if len(starts) else starts
        names = _pairs(self.token[places[starts]], self.token[self.next[places[starts]]])
        for pair, count, here in zip(names.tolist(), counts.tolist(), np.split(places, starts[1:]), strict=False):
            if count >= LEAST:
                self.counts[pair] = count
                self.places[pair] = here.copy()  # a view would keep the others' places alive
                heapq.heappush(self.queue, (-count, pair))

    def _remove(self, pairs: np.ndarray, frequency: np.ndarray) -> None:
        order = np.argsort(pairs, kind="stable")
        pairs = pairs[order]
        starts = _starts(pairs)
        counts = np.add.reduceat(frequency[order], starts) if len(starts) else starts
        for pair, count in zip(pairs[starts].tolist(), counts.tolist(), strict=True):
            if pair in self.counts:
                self.counts[pair] -= count
                if self.counts[pair] < LEAST:
                    del self.counts[pair], self.places[pair]


def _pairs(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    """One number for two ids, in the order of (a, b)."""
    return np.asarray(a, np.int64) << 32 | np.asarray(b, np.int64)


def _starts(ordered: np.ndarray) -> np.ndarray:
    """Where each new number begins."""
    return np.flatnonzero(np.concatenate((np.ones(min(1, len(ordered)), bool), ordered[1:] != ordered[:-1])))


def _odd(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """In runs a a a a, where each pair overlaps the next, the first, third, … of the pairs; places ascend."""
    index = np.arange(len(first))
    begins = np.concatenate(([True], first[1:] != second[:-1]))[: len(first)]
    return (index - np.maximum.accumulate(np.where(begins, index, 0))) % 2 == 0


def _tokenizer(merges: list[tuple[int, int]], pattern: str, end: str | None, specials: Sequence[str] = ()) -> BytePairs:
    tokens = list(BYTE_OF)
    tokens.extend(tokens[a] + tokens[b] for a, b in merges)
    names = [*([] if end is None else [end]), *specials]
    taken = next((name for name in names if name in tokens or names.count(name) > 1), None)
    if taken is not None:
        said = "end" if taken == end else "specials"
        raise UsageError(f"{said}={taken!r}: the text's own characters made this token; choose a name that no text has")
    last = len(tokens)
    data: dict[str, Any] = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": PATTERNS[pattern]}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
            ],
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {
            "type": "BPE",
            "vocab": {token: id for id, token in enumerate(tokens)},
            "merges": [(tokens[a], tokens[b]) for a, b in merges],
        },
    }
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    data["added_tokens"] = [{"id": last + i, "content": name, **flags} for i, name in enumerate(names)]
    if end is not None:
        begin = {"SpecialToken": {"id": end, "type_id": 0}}
        one, two = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
        data["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [begin, one],
            "pair": [begin, one, begin, two],
            "special_tokens": {end: {"id": end, "ids": [last], "tokens": [end]}},
        }
    model = tokenizers.Tokenizer.from_str(json.dumps(data))
    return BytePairs(model, eos=() if end is None else (last,))
