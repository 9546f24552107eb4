"""Encoding in bulk: byte pairs through tiktoken, on all cores, where the ids are those of the tokenizers library."""

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, islice
from typing import Any

import numpy as np
import tokenizers

from .cuts import Cut, cut
from .merges import MOST_WORK, ranked
from .tokenizer import Ids, Names

# GPT-2 writes bytes as characters: those that can be seen as themselves, the others from U+0100 on.
_SEEN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_UNSEEN = sorted(set(range(256)) - set(_SEEN))
BYTE_OF = {chr(byte): byte for byte in _SEEN} | {chr(0x100 + i): byte for i, byte in enumerate(_UNSEEN)}
"""Character of a byte-level vocabulary → byte."""

# Through Latin-1, in which a character is a byte; U+FFFF stands for what is not of the alphabet.
_LATIN = {ord(character): chr(byte) for character, byte in BYTE_OF.items()}
_LATIN = dict.fromkeys(range(256), "\uffff") | _LATIN

PART = 1 << 17
"""Characters that go to a core at a time: parts of a long text, or many short texts."""

ABSENT = 1 << 30
"""Added to a byte: the id of one that the vocabulary lacks. The library leaves it out, and joins what is around it."""

# Every pattern in use begins a piece at a space after any other character (see patterns.py), and never looks back.
SAFE = re.compile(r"\S(?= )")


class Bulk:
    """What encodes in bulk. Ids that tiktoken cannot be proved to agree on are left to the library."""

    def __init__(
        self,
        model: tokenizers.Tokenizer,
        how: Cut,
        normalizer: Any,
        ids: Mapping[bytes, int],
        names: Names | None,
    ) -> None:
        """ids: token → id, in order of rank, the single bytes first; names: the tokens that are found in any text."""
        import tiktoken

        self._lacks = any(id >= ABSENT for id in islice(ids.values(), 256))
        self._model, self._unlike, self._normalizer, self._names = model, how.unlike, normalizer, names
        real = np.fromiter(ids.values(), np.int64, len(ids))
        merged = real[256:]
        in_order = bool((merged[1:] > merged[:-1]).all())
        # Where ids rise with rank they serve as ranks; else a table turns ranks into ids.
        self._table = None if in_order else real.astype(np.uint32)
        ranks = dict(ids)
        if not in_order:
            ranks = {token: id if id >= ABSENT else rank for rank, (token, id) in enumerate(ids.items())}
        # Without any special token, its search for them stops at every byte; this one is no text's.
        never = {"\U0010ffff" * 2: max(ranks.values()) + 1}
        self._engine = tiktoken.Encoding("", pat_str=how.pattern, mergeable_ranks=ranks, special_tokens=never)

    @classmethod
    def of(cls, model: tokenizers.Tokenizer) -> "Bulk | None":
        """For a byte-level BPE; None where tiktoken is not known to give the library's ids."""
        data = json.loads(model.to_str())
        normalizer, bpe = data["normalizer"], data["model"]
        how = cut(data["pre_tokenizer"])
        asked = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
        if how is None or any(bpe.get(option) for option in asked):
            return None
        if normalizer == {"type": "Sequence", "normalizers": []}:
            normalizer = None
        if normalizer not in (None, {"type": "NFC"}):
            return None
        names = _names(data["added_tokens"], plain=normalizer is None)
        if names is None:
            return None
        ids = _ids(bpe, {token["content"] for token in data["added_tokens"]}, model)
        if ids is None:
            return None
        found = Names(names) if names else None
        return cls(model, how, model.normalizer if normalizer else None, ids, found)

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text. Raises UnicodeEncodeError for a lone surrogate."""
        parts = [list(self._parts(text)) for text in texts]
        jobs = list(_batches([part for text in parts for part in text if isinstance(part, str)]))
        workers = min(len(jobs), _cores())
        if workers > 1:
            with ThreadPoolExecutor(workers) as pool:
                encoded = chain.from_iterable(pool.map(self._encode_all, jobs))
        else:
            encoded = chain.from_iterable(map(self._encode_all, jobs))
        return [
            _joined([next(encoded) if isinstance(part, str) else np.array([part], np.uint32) for part in text])
            for text in parts
        ]

    def _parts(self, text: str) -> Iterator[str | int]:
        """What can be encoded apart: between added tokens, and between a character and a space."""
        for part in [text] if self._names is None else self._names.split(text):
            start = 0
            if isinstance(part, str):
                while len(part) - start >= 2 * PART and (found := SAFE.search(part, start + PART)):
                    yield part[start : found.end()]
                    start = found.end()
                part = part[start:] if start else part
            yield part

    def _encode_all(self, parts: Sequence[str]) -> list[Ids]:
        return [self._encode(part) for part in parts]

    def _encode(self, text: str) -> Ids:
        if self._unlike is not None and not text.isascii() and self._unlike.search(text):
            return self._by_library(text)
        normal = text
        if self._normalizer is not None and not text.isascii():
            normal = self._normalizer.normalize_str(text)
        try:
            ids = self._engine.encode_to_numpy(normal, disallowed_special=())
        except UnicodeEncodeError:
            raise
        except ValueError:  # its regex engine gives up on white space of a million characters
            return self._by_library(text)
        if self._lacks and len(ids) and ids.max() >= ABSENT:
            return self._by_library(text)
        return ids if self._table is None else self._table[ids]

    def _by_library(self, text: str) -> Ids:
        return np.array(self._model.encode(text, add_special_tokens=False).ids, np.uint32)


def to_bytes(token: str) -> bytes | None:
    """The bytes of a byte-level vocabulary's token; None if it is of another kind."""
    try:
        return token.translate(_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return None


def _cores() -> int:
    """Those that this process may use, where the system tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _joined(arrays: list[Ids]) -> Ids:
    return arrays[0] if len(arrays) == 1 else np.concatenate([np.empty(0, np.uint32), *arrays])


def _batches(parts: Sequence[str]) -> Iterator[list[str]]:
    """Runs of parts of some PART characters together, for a thread's overhead is paid once a run."""
    batch: list[str] = []
    size = 0
    for part in parts:
        batch.append(part)
        size += len(part)
        if size >= PART:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _ids(bpe: Mapping[str, Any], added: set[str], model: tokenizers.Tokenizer) -> dict[bytes, int] | None:
    """Token → id in order of rank, the single bytes first."""
    split = [pair.split(" ", 1) if isinstance(pair, str) else pair for pair in bpe["merges"]]
    merges = [(left, right) for left, right in split]
    vocab = {token: id for token, id in bpe["vocab"].items() if to_bytes(token) is not None}
    ignores_merges = bool(bpe.get("ignore_merges"))
    if ignores_merges:
        # A name that is cut into several pieces is never a whole piece. (The branches that look ahead match no name.)
        whole = {name for name in added & vocab.keys() if len(model.pre_tokenizer.pre_tokenize_str(name)) == 1}
        vocab = {token: id for token, id in vocab.items() if token not in added or token in whole}

    @cache
    def merging() -> Any:
        """What merges, and does nothing else."""
        return tokenizers.models.BPE(vocab=bpe["vocab"], merges=merges) if ignores_merges else model.model

    order = ranked(vocab, merges, ignores_merges, lambda token: merging().tokenize(token))
    if order is None or not added.isdisjoint(order) or not added.isdisjoint(BYTE_OF):
        return None  # an added token that merges make too: text would forge it, and the library refuses that
    single_bytes = {bytes((byte,)): vocab.get(character, ABSENT + byte) for character, byte in BYTE_OF.items()}
    return single_bytes | {token.translate(_LATIN).encode("latin-1"): vocab[token] for token in order}


def _names(added: Sequence[Mapping[str, Any]], plain: bool) -> dict[str, int] | None:
    """The added tokens that are found in any text; None where how they are found is not as simple as that, or there
    are so many that it would take long to tell.

    The library finds tokens in the text as it is first, then those marked so in the normalized text; special ones are
    found and passed over. Where none overlaps another, this is one search.
    """
    ordinary = {token["content"]: token["id"] for token in added if not token["special"]}
    if not ordinary:
        return {}
    for token in added:
        if not token["special"] and (token["lstrip"] or token["rstrip"] or token["single_word"]):
            return None
        if not token["special"] and token["normalized"] and not plain:
            return None
    kinds: dict[tuple[bool, bool], list[str]] = {}
    for token in added:
        kinds.setdefault((token["special"], token["normalized"]), []).append(token["content"])
    groups = list(kinds.values())
    for i, group in enumerate(groups):
        for other in groups[i + 1 :]:
            if len("".join(group)) * len("".join(other)) > MOST_WORK:
                return None
            if any(_overlap(a, b) for a in group for b in other):
                return None
    return ordinary


def _overlap(a: str, b: str) -> bool:
    """Whether the two names can share a character of a text."""
    if a in b or b in a:
        return True
    return any(a.endswith(b[:n]) or b.endswith(a[:n]) for n in range(1, min(len(a), len(b))))
