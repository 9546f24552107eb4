"""Files of tokens, appended to from where they are known to be whole."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Self

import numpy as np

from .tokens import shard_name, size_of


@dataclass
class Side:
    """How much of each file of a side counts."""

    tokens: int = 0
    documents: int = 0
    bytes: int = 0
    names: int = 0


class Lost(Exception):
    """Less is there than the record of a writing says."""


class Writer:
    """Appends documents to the files of a build, from where `side` says that they end."""

    def __init__(self, files: Path, side: Side, dtype: np.dtype, shard_tokens: int) -> None:
        self.files, self.side, self.dtype, self.shard_tokens = files, side, dtype, shard_tokens
        self.stack = ExitStack()
        self.shard: FileIO | None = None

    def __enter__(self) -> Self:
        self.files.mkdir(parents=True, exist_ok=True)
        side, number = self.side, self.side.documents
        full, last = divmod(side.tokens, self.shard_tokens)
        for shard in range(full):
            if size_of(self._path(shard)) != self.shard_tokens * self.dtype.itemsize:
                raise Lost
        with ExitStack() as stack:
            columns = [stack.enter_context(_appending(self.files / name, 8 * (number + 1) if number else 0))
                       for name in ("starts.bin", "bytes.bin", "names.bin")]  # fmt: skip
            self.starts, self.offsets, self.names = columns
            self.sources = stack.enter_context(_appending(self.files / "sources.txt", side.names))
            if not number:
                for column in columns:
                    put(column, np.zeros(1, "<i8"))
            if last:
                self.shard = _appending(self._path(full), last * self.dtype.itemsize)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()
        if self.shard is not None:
            self.shard.close()

    def add(self, ids: np.ndarray, counts: Sequence[int], sizes: Sequence[int], sources: Sequence[str]) -> None:
        """ids: of len(counts) documents; sizes: of their texts in bytes."""
        names = [source.encode("utf-8", "replace") for source in sources]
        side = self.side
        put(self.starts, side.tokens + np.cumsum(counts, dtype="<i8"))
        put(self.offsets, side.bytes + np.cumsum(sizes, dtype="<i8"))
        put(self.names, side.names + np.cumsum([len(name) for name in names], dtype="<i8"))
        put(self.sources, np.frombuffer(b"".join(names), np.uint8))
        ids = ids.astype(self.dtype)
        while len(ids):
            number, filled = divmod(side.tokens, self.shard_tokens)
            if self.shard is None:
                self.shard = _appending(self._path(number), 0)
            part = ids[: self.shard_tokens - filled]
            put(self.shard, part)
            side.tokens += len(part)
            ids = ids[len(part) :]
            if side.tokens % self.shard_tokens == 0:
                os.fsync(self.shard.fileno())
                self.shard.close()
                self.shard = None
        side.documents += len(counts)
        side.bytes += sum(sizes)
        side.names += sum(map(len, names))

    def flush(self) -> None:
        """Returns when all that was added is on the disk."""
        files = [self.starts, self.offsets, self.names, self.sources, *([self.shard] if self.shard else [])]
        for file in files:
            os.fsync(file.fileno())
        folder = os.open(self.files, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _path(self, number: int) -> Path:
        return self.files / shard_name(number)


def _appending(path: Path, length: int) -> FileIO:
    """The file, open to be written on after its first `length` bytes; unbuffered, so that closing it cannot fail."""
    file = FileIO(path, "a")
    if os.fstat(file.fileno()).st_size < length:
        file.close()
        raise Lost
    file.truncate(length)
    return file


def put(file: FileIO, values: np.ndarray) -> None:
    data = memoryview(values.tobytes())
    while len(data):
        data = data[file.write(data) :]  # a write may take less than all
