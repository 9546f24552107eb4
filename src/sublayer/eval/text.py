"""How well a model tells text: its code length, by windows that slide over documents.

A document is scored behind the token that begins texts. Each of its tokens is asked once, in the window where most of
the document stands before it: at least length - stride tokens, or all of it. Documents share rows and see themselves
alone; their ends are not asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Self

import numpy as np

from ..data.batches import windows
from ..errors import InputError, UsageError
from ..gguf_header import read_header
from ..nn.head import Head
from ..nn.sublayer import Model, ModelOp
from ..text.ending import read_config as read_tokenizer_config
from ..text.tokenizer import Tokenizer, frame, special_id
from ..train.batch import Batch
from ..train.evaluate import Score, evaluate
from ..train.language import NextToken, next_token, next_tokens
from ..train.loss import IGNORED
from ..weights.load import gguf_file

TOKENS = 8192
"""Read in one call of the model."""
GROUP = 2**22
"""Characters encoded at once."""


class Texts:
    """Documents' ids in memory, each behind the token that begins texts: what `windows` reads. `len`: how many ids."""

    def __init__(self, ids: np.ndarray, starts: np.ndarray, bytes: int) -> None:
        self.ids = ids
        """uint32 [T]."""
        self.starts = starts
        """int64 [documents + 1]: where each document begins; the last one is T."""
        self.bytes = bytes
        """Of the text whose tokens are asked, in UTF-8."""

    @classmethod
    def encode(cls, texts: Iterable[str], tokenizer: Tokenizer, begin: int | None) -> Self:
        """begin: the token that begins texts; None: there is none, and nobody asks for a text's first token.

        Raises InputError where there is no token to ask for, and for text that the tokenizer cannot take.
        """
        first = np.array([] if begin is None else [begin], np.uint32)
        parts, counts, size = list[np.ndarray](), list[int](), 0
        for group in _groups(texts):
            for text, ids in zip(group, tokenizer.encode_batch(group), strict=True):
                if not len(ids):
                    continue
                parts += [first, ids.astype(np.uint32)]
                counts.append(len(first) + len(ids))
                size += len(text.encode())
                if begin is None:
                    size -= len(tokenizer.token_bytes(int(ids[0])))
        if sum(counts) == len(counts):
            raise InputError("there is no token of text to ask the model for")
        return cls(np.concatenate(parts), np.cumsum([0, *counts]), size)

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    @property
    def tokens(self) -> int:
        """How many are asked."""
        return len(self) - self.documents

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.ids[start:stop]

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin after start and before stop; counted from start."""
        first, last = np.searchsorted(self.starts, (start, stop - 1), "right")
        return self.starts[first:last] - start

    def number(self, position: int) -> int:
        """Which document holds the token at position."""
        return int(np.searchsorted(self.starts, position, "right")) - 1

    def where(self, position: int) -> str:
        """A token's place in words."""
        number = self.number(position)
        return f"document {number}, token {position - int(self.starts[number]):,}"


def score(
    model: ModelOp,
    texts: Texts,
    *,
    length: int,
    stride: int | None = None,
    progress: Callable[[int, int, float], None] = lambda done, total, share: None,
) -> Score:
    """The score of texts; length: tokens a window reads; stride: tokens between windows (None: half of length).

    progress is told tokens that were asked, of all, and the share of the work done.
    Raises UsageError for a model that gives text no probability, and for windows that cannot be meant.
    """
    fit(model.spec, texts, length)
    found = evaluate(model, batches(texts, length, stride, progress), next_token)
    return replace(found, bytes=texts.bytes)


def fit(spec: Model, texts: Texts, length: int) -> None:
    """Raises UsageError for a model that cannot be asked for texts in windows of so many tokens."""
    refuse(spec)
    if spec.context is not None and length > spec.context:
        raise UsageError(f"windows of {length} tokens: the model has {spec.context} positions")
    if spec.vocab is not None and int(texts.ids.max()) >= spec.vocab:
        raise UsageError(f"the tokenizer's id {texts.ids.max()} is beyond the model's {spec.vocab} ids")


def batches(
    texts: Texts, length: int, stride: int | None, progress: Callable[[int, int, float], None]
) -> Iterator[Batch]:
    """The windows of texts, with labels where a token is asked; the arguments are those of `score`."""
    stride = max(1, length // 2) if stride is None else stride
    done, rows = 0, max(1, TOKENS // length)
    count = -(-max(len(texts) - 1 - length, 0) // stride) + 1
    for number, (found, counted) in enumerate(windows(texts, length, stride, rows), 1):
        batch = next_tokens(found, None)
        labels = batch.labels.masked_fill(counted == IGNORED, IGNORED)
        yield replace(batch, labels=labels)
        done += int((labels != IGNORED).sum())
        progress(done, texts.tokens, min(number * rows / count, 1.0))


def refuse(spec: Model) -> None:
    """Raises UsageError, with the reason, for a model that gives text no probability."""
    if spec.encoder is not None and spec.decoder is not None:
        raise UsageError("an encoder-decoder tells a text given its source: alone, a text has no probability under it")
    if spec.decoder is None:
        raise UsageError("an encoder sees a text from both sides: it fills gaps, and gives no text a probability")
    if not isinstance(spec.head, Head):
        what = "no head" if spec.head is None else f"a head of another kind ({type(spec.head).__name__})"
        raise UsageError(f"the model has {what}: it gives tokens no probability")
    NextToken().fits(spec)


def begin_token(path: Path, tokenizer: Tokenizer) -> int | None:
    """The id that stands before a text: what the tokenizer puts there, else the bos token that the checkpoint at path
    names, else the first one that ends texts; None where there is none of them."""
    if framing := frame(tokenizer)[0]:
        return framing[-1]
    if (file := gguf_file(path)) is not None:
        named = read_header(file, tensors=False).metadata.get("tokenizer.ggml.bos_token_id")
        found = named if type(named) is int and 0 <= named < tokenizer.size else None
    else:
        named = read_tokenizer_config(path).get("bos_token")
        named = named.get("content") if isinstance(named, dict) else named
        found = special_id(tokenizer, named) if isinstance(named, str) else None
    return found if found is not None else next(iter(tokenizer.eos), None)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    group, size = list[str](), 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= GROUP:
            yield group
            group, size = [], 0
    if group:
        yield group
