"""From documents to tokens on disk, in bounded memory; what is half written is neither taken for whole nor lost."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any, NamedTuple, Self

import numpy as np

from ..errors import InputError, SublayerError, UsageError
from ..files import write_json
from ..text.tokenizer import Tokenizer
from .readers import LONGEST, BadBytes, Document, Name, Seen, documents, listed, measure
from .tokens import (
    BUILD,
    FORMAT,
    INDEX,
    JOURNAL,
    Tokens,
    TokensIndex,
    beginning,
    fingerprint,
    id_type,
    read_index,
)
from .writer import Lost, Side, Writer

SHARD = 2**27
"""Tokens of a file, unless told otherwise."""

RECORD = 2**24  # tokens between two records of how far a writing has come
GROUP = 2**22  # characters encoded at once
SIDES = ("train", "held")


class Progress(NamedTuple):
    """How far a writing has come: what was read and written, and the share of it all, where that can be known."""

    documents: int
    tokens: int
    bytes: int
    share: float | None


def write(
    documents: Iterable[Document],
    tokenizer: Tokenizer,
    folder: Path | str,
    *,
    shard_tokens: int = SHARD,
    progress: Callable[[Progress], None] | None = None,
) -> Tokens:
    """Writes all documents into folder, in place of what it held; see `prepare` to hold some out and to go on later.

    ids take 2 bytes where the vocabulary is at most 65,536, else 4. Raises InputError if there are no documents, and
    SublayerError if the disk is full or the folder cannot be written.
    """
    folder = Path(folder)
    with _locked(folder):
        build = _Build(
            folder, ("",), _State.new(token_hex(8), 1), tokenizer, fingerprint(tokenizer), shard_tokens, progress
        )
        try:
            build.encode(iter(documents), lambda read: None)
            if not build.state.tokens:
                raise InputError(f"{folder}: there are no documents to write")
            return build.commit()[0]
        finally:
            _clean(folder)


def prepare(
    source: Name | Iterable[Name] | Sequence[Document],
    tokenizer: Tokenizer,
    folder: Path | str,
    *,
    held: float = 0.05,
    field: str | None = "text",
    bad_bytes: BadBytes = "error",
    without: Name | Iterable[Name] = (),
    shard_tokens: int = SHARD,
    progress: Callable[[Progress], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> tuple[Tokens, Tokens]:
    """(to train on, held out): folder/train and folder/held, of documents or of what `documents` reads at paths.

    A document's own text decides on which side it falls, `held` being the share held out: copies fall on the same side,
    and more documents move none of the others. Where a side is then four times too large or too small (a single
    document, or few), all text is cut instead: the last `held` part of its characters, from the beginning of a line, is
    held out.

    What is there already is used again if tokenizer, sources and options are the same; what was left half written is
    gone on with. `say` is told either in a line. Two processes that prepare one folder wait for each other.

    Raises InputError and UsageError as `documents` does, and SublayerError if the disk is full.
    """
    if not 0 < held < 1:
        raise UsageError(f"held={held}: the share to hold out is more than 0 and less than 1")
    folder, say = Path(folder), say or (lambda line: None)
    made_by = fingerprint(tokenizer)
    read = _Source(source, field, bad_bytes, [*listed(without), str(folder)])
    request = [FORMAT, made_by, read.stamp, field, bad_bytes, LONGEST, held, shard_tokens]
    name = blake2b(json.dumps(request).encode(), digest_size=8).hexdigest()
    with _locked(folder, say):
        found = _found(folder, name)
        if found is not None:
            _tidy(folder, name)
            say(f"{folder}: used again, {_counts(*found)}")
            return found
        state = _State.load(folder / JOURNAL, name, len(SIDES))
        if state.read:
            say(f"{folder}: goes on after {state.read:,} documents")
        while True:
            build = _Build(folder, SIDES, state, tokenizer, made_by, shard_tokens, progress)
            try:
                build.encode(read.documents(), read.share, held)
            except Lost:
                state = _State.new(name, len(SIDES))
                continue
            if state.cut is not None or state.balanced(held):
                break
            state = _State.new(name, len(SIDES), cut=int((1 - held) * state.characters))
            with _writing(folder):
                state.save(folder / JOURNAL)
        if not all(side.documents for side in state.sides):
            raise InputError(
                f"{folder}: too little text to hold out a share of {held}: {state.characters:,} characters"
            )
        if state.cut is not None:
            say(f"{folder}: too few documents to hold some out whole, so the last {held:.3g} of the text is held out")
        train, held_out = build.commit(read.stamp, "documents" if state.cut is None else "cut")
        _tidy(folder, name)
        say(f"{folder}: {_counts(train, held_out)}")
        return train, held_out


class _Source:
    """What `prepare` reads, as often as it has to."""

    def __init__(
        self,
        source: Name | Iterable[Name] | Sequence[Document],
        field: str | None,
        bad_bytes: BadBytes,
        without: Sequence[Name],
    ) -> None:
        items: list[Any] = [source] if isinstance(source, str | os.PathLike) else list(source)
        self._texts = [item for item in items if isinstance(item, Document)]
        if self._texts and len(self._texts) < len(items):
            raise UsageError("prepare: documents and paths in one list; read the paths with `documents`")
        self._paths: list[Name] = items
        self._options: dict[str, Any] = {"field": field, "bad_bytes": bad_bytes, "without": without}
        self._seen = Seen()
        if self._texts:
            digest = blake2b(digest_size=16)
            for document in self._texts:
                digest.update(repr(document).encode())
            self.stamp = digest.hexdigest()
        else:
            size = measure(items, without)
            self._bytes, self.stamp = size.bytes, size.stamp

    def documents(self) -> Iterator[Document]:
        self._seen = Seen()
        return iter(self._texts) if self._texts else documents(self._paths, seen=self._seen, **self._options)

    def share(self, read: int) -> float:
        done, total = (read, len(self._texts)) if self._texts else (self._seen.bytes, self._bytes)
        return min(done / max(total, 1), 1.0)


@dataclass
class _State:
    """How far a writing has come: partial.json."""

    build: str
    sides: list[Side]
    cut: int | None = None
    """The character of all text at which what is held out begins; None: each document has its side."""
    read: int = 0
    characters: int = 0

    @classmethod
    def new(cls, build: str, sides: int, cut: int | None = None) -> Self:
        return cls(build, [Side() for _ in range(sides)], cut)

    @classmethod
    def load(cls, path: Path, build: str, sides: int) -> Self:
        """What path says of this build, or a new state."""
        try:
            data = json.loads(beginning(path))
            state = cls(**{**data, "sides": [Side(**side) for side in data["sides"]]})
        except (OSError, ValueError, TypeError, KeyError):
            return cls.new(build, sides)
        numbers = [state.read, state.characters, state.cut or 0]
        numbers += [number for side in state.sides for number in vars(side).values()]
        known = state.build == build and len(state.sides) == sides
        return state if known and all(type(n) is int and n >= 0 for n in numbers) else cls.new(build, sides)

    def save(self, path: Path) -> None:
        write_json(path, asdict(self))

    @property
    def tokens(self) -> int:
        return sum(side.tokens for side in self.sides)

    @property
    def bytes(self) -> int:
        return sum(side.bytes for side in self.sides)

    def balanced(self, held: float) -> bool:
        """Whether each side has a quarter, at the least, of what it should have, and four times that at the most."""
        shares = zip(self.sides, (1 - held, held), strict=True)
        return all(share / 4 * self.bytes <= side.bytes <= share * 4 * self.bytes for side, share in shares)


class _Build:
    """One writing of documents, to one or two sides."""

    def __init__(
        self,
        folder: Path,
        sides: Sequence[str],
        state: _State,
        tokenizer: Tokenizer,
        made_by: str,
        shard_tokens: int,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.folder, self.sides = folder, [folder / side for side in sides]
        self.state = state
        self.tokenizer, self.made_by = tokenizer, made_by
        self.shard_tokens = shard_tokens
        self.progress = progress or (lambda progress: None)

    def encode(self, documents: Iterator[Document], share: Callable[[int], float | None], held: float = 0) -> None:
        """Writes what the state says is not written yet. Raises Lost where that is not what is there."""
        state, recorded = self.state, self.state.tokens
        with ExitStack() as stack:
            with _writing(self.folder):
                for side in self.sides:
                    _clean(side, state.build, begin=True)
                dtype = id_type(self.tokenizer.size)
                self.writers = [
                    stack.enter_context(Writer(place / state.build, side, dtype, self.shard_tokens))
                    for place, side in zip(self.sides, state.sides, strict=True)
                ]
            known = 0
            for group in _groups(islice(documents, state.read)):
                known += len(group)
                self.progress(Progress(known, state.tokens, state.bytes, share(known)))
            if known < state.read:
                raise Lost
            for group in _groups(documents):
                self._add([part for document in group for part in self._sides(document, held)])
                state.read += len(group)
                if held and state.tokens - recorded >= RECORD:
                    self._record()
                    recorded = state.tokens
                self.progress(Progress(state.read, state.tokens, state.bytes, share(state.read)))
            self._record() if held else self._flush()

    def commit(self, sources: str = "", split: str = "") -> list[Tokens]:
        """What was written becomes what is there."""
        for place, side in zip(self.sides, self.state.sides, strict=True):
            index = TokensIndex(
                self.state.build, side.tokens, side.documents, side.bytes, self.tokenizer.size, self.tokenizer.eos,
                self.made_by, self.shard_tokens, sources, split,
            )  # fmt: skip
            with _writing(self.folder):
                write_json(place / INDEX, index.to_json())
        return [Tokens.open(place) for place in self.sides]

    def _sides(self, document: Document, held: float) -> Iterator[tuple[int, Document, bytes]]:
        """The side of a document, or its two parts with theirs."""
        text, source = document
        start, cut = self.state.characters, self.state.cut
        self.state.characters += len(text)
        if cut is None:
            data = text.encode()
            yield int(_share(data) < held), document, data
        elif not start < cut < start + len(text):
            yield int(start >= cut), document, text.encode()
        else:
            at = cut - start
            at = text.rfind("\n", at - at // 8, at) + 1 or at
            for side, part, name in ((0, text[:at], f"{source}[:{at}]"), (1, text[at:], f"{source}[{at}:]")):
                yield side, Document(part, name), part.encode()

    def _add(self, parts: list[tuple[int, Document, bytes]]) -> None:
        encoded = self.tokenizer.encode_batch([document.text for _, document, _ in parts])
        for number, writer in enumerate(self.writers):
            chosen = [
                (np.asarray(ids), len(data), document.source)
                for ids, (side, document, data) in zip(encoded, parts, strict=True)
                if side == number and len(ids)  # without ids a document is nothing to learn from
            ]
            if chosen:
                ids, counts = self._joined([ids for ids, _, _ in chosen])
                with _writing(self.folder):
                    writer.add(ids, counts, [size for _, size, _ in chosen], [source for _, _, source in chosen])

    def _joined(self, documents: list[np.ndarray]) -> tuple[np.ndarray, list[int]]:
        """(documents one after the other, each behind the id that ends a text; the lengths)."""
        mark = np.array(self.tokenizer.eos[:1], np.int64)
        ids = np.concatenate([part for ids in documents for part in (mark, ids)])
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= self.tokenizer.size:
            bad = low if low < 0 else high
            raise InputError(f"the tokenizer made the id {bad}, and its ids are 0 to {self.tokenizer.size - 1}")
        return ids, [len(mark) + len(ids) for ids in documents]

    def _record(self) -> None:
        self._flush()
        with _writing(self.folder):
            self.state.save(self.folder / JOURNAL)

    def _flush(self) -> None:
        with _writing(self.folder):
            for writer in self.writers:
                writer.flush()


def _share(data: bytes) -> float:
    """Where in [0, 1) a document stands, by its text alone."""
    return int.from_bytes(blake2b(data, digest_size=6).digest(), "big") / 2**48


def _groups(documents: Iterable[Document]) -> Iterator[list[Document]]:
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= GROUP or len(group) >= 4096:
            yield group
            group, size = [], 0
    if group:
        yield group


def _clean(place: Path, build: str = "", begin: bool = False) -> None:
    """Removes from place what killed writings have left, and what its index no longer names, but not the build.

    begin: the files of the build are about to change, so an index that names them goes first.
    """
    try:
        index = read_index(place / INDEX).build
    except SublayerError:
        index = ""
    if index == build and begin:
        (place / INDEX).unlink()
    kept = {index, build}
    for path in place.glob("*"):
        if BUILD.fullmatch(path.name) and path.name not in kept and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
    for name in (INDEX, JOURNAL):
        for path in place.glob(f".{name}.*.partial"):
            path.unlink(missing_ok=True)


def _tidy(folder: Path, build: str) -> None:
    """Leaves of both sides what is whole; the record has served."""
    (folder / JOURNAL).unlink(missing_ok=True)
    for place in (folder, *(folder / side for side in SIDES)):
        _clean(place, build)


def _found(folder: Path, build: str) -> tuple[Tokens, Tokens] | None:
    try:
        train, held = (Tokens.open(folder / side) for side in SIDES)
    except SublayerError:
        return None
    return (train, held) if train.index.build == held.index.build == build else None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SublayerError(f"{folder}: {error.strerror or error}; what was written before is kept") from None


@contextmanager
def _locked(folder: Path, say: Callable[[str], None] = lambda line: None) -> Iterator[None]:
    """Alone in folder among processes; the system lets go of it when a process dies, however it does."""
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{folder}: waits for another process that writes there")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _counts(train: Tokens, held: Tokens) -> str:
    return (
        f"{len(train):,} tokens of {train.documents:,} documents to train on,"
        f" {len(held):,} of {held.documents:,} held out"
    )
