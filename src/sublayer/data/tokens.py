"""Documents as token ids on disk, mapped into memory: a corpus may be larger than it.

A folder holds index.json and one folder of files, which the index names:

    tokens-00000.bin …   ids, uint16 or uint32: documents one after the other, each behind the id that ends a text
    starts.bin           int64: the token at which each document begins, and the total
    bytes.bin            int64: the bytes of text before each document, and the total
    names.bin            int64: where in sources.txt the name of each document begins, and the total
    sources.txt          where the documents came from

All numbers are little-endian. Documents that are written anew go to another folder beside, and then the index is
replaced in one go: a reader sees the old documents or the new ones.
"""

from __future__ import annotations

import json
import re
from hashlib import blake2b
from pathlib import Path
from typing import Self

import numpy as np

from ..errors import InputError, SublayerError
from ..spec import Spec
from ..text.tokenizer import Tokenizer

FORMAT = 1
LARGEST_INDEX = 2**20  # bytes
LONGEST_NAME = 2**12  # bytes that are shown
INDEX, JOURNAL = "index.json", "partial.json"
BUILD = re.compile("[0-9a-f]{16}")

# Text on which two tokenizers of equal vocabularies part: spaces, digits, contractions, scripts, forms, specials.
PROBE = (
    "Hello  world,\n\n\tit's 12345.67 o'CLOCK; don't   stop!\r\n",
    "def f(x_1, *args):\n        return x_1**2 != 0xFF  # naïve café\n",
    "Größe ÆØÅ Привет, мир! שלום עולם. مرحبا بالعالم. नमस्ते दुनिया. สวัสดี",
    "漢字かなカナ混じり文、한국어 텍스트。𝒳 ½ ﬁ ①",
    "e\u0301 \u00a0\u2003\u200b\u2028 👩\u200d👩\u200d👧 🇫🇷",
    "<|endoftext|></s>[CLS]<bos>",
)


class TokensIndex(Spec):
    """index.json: what the files beside it hold."""

    build: str
    """The folder that they are in."""
    tokens: int
    documents: int
    bytes: int
    """Of the documents' text in UTF-8."""
    vocab: int
    eos: tuple[int, ...]
    tokenizer: str
    """See `fingerprint`."""
    shard_tokens: int
    sources: str = ""
    """The stamp of what was read."""
    split: str = ""
    """"documents" or "cut": how text was held out."""
    format: int = FORMAT

    def check(self) -> None:
        self.require(self.format == FORMAT, f"format {self.format}, this version reads {FORMAT}")
        self.require(BUILD.fullmatch(self.build) is not None, "build is not the name of one")
        self.require(0 < self.documents <= self.tokens < 2**60, "tokens and documents do not fit together")
        self.require(self.bytes >= 0, "bytes is negative")
        self.require(0 < self.vocab <= 2**32, "vocab is not a number of ids")
        self.require(0 < self.shard_tokens < 2**60, "shard_tokens is not a length")
        self.require(all(0 <= token < self.vocab for token in self.eos), "eos is not in the vocabulary")


class Tokens:
    """Documents' ids on disk. `len` is the number of tokens; `index` says what else there is.

    Each document is `eos[0]` and its tokens, so that every token has one before it. A tokenizer without eos (such as
    one of characters) leaves no mark: documents are then told apart by `starts` only, and what follows a document's
    last token is the next one's first, which nothing foretells.
    """

    def __init__(self, folder: Path, index: TokensIndex) -> None:
        self.folder = folder
        self.index = index
        self.files = folder / index.build
        self.dtype = id_type(index.vocab)
        self.starts = self._column("starts.bin", index.tokens)
        """int64 [documents + 1]: where each document begins; the last one is the number of tokens."""
        self.offsets = self._column("bytes.bin", index.bytes)
        """int64 [documents + 1]: the bytes of text before each document."""
        names = max(size_of(self.files / "sources.txt"), 0)
        self._names = self._column("names.bin", names)
        # All at once: what is open stays readable when other documents take its place.
        self._sources = _mapped(self.files / "sources.txt", np.dtype("u1"), names)
        self._shards = [
            _mapped(self.files / shard_name(start // index.shard_tokens), self.dtype, min(index.shard_tokens, rest))
            for start, rest in ((at, index.tokens - at) for at in range(0, index.tokens, index.shard_tokens))
        ]

    @classmethod
    def open(cls, folder: Path | str) -> Self:
        """The documents in folder. Raises InputError where there are none, or not what the index says."""
        folder = Path(folder)
        path = folder / INDEX
        if not path.is_file():
            partial = any((place / JOURNAL).is_file() for place in (folder, folder.parent))
            found = "documents only half written; write them again to go on" if partial else "no documents' tokens"
            raise InputError(f"{folder}: {found}: there is no {INDEX}")
        return cls(folder, read_index(path))

    def __len__(self) -> int:
        return self.index.tokens

    @property
    def documents(self) -> int:
        """How many there are."""
        return self.index.documents

    @property
    def bytes(self) -> int:
        """Of all text, in UTF-8: the bytes of "bits per byte"."""
        return self.index.bytes

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids from start to stop, as they are on disk; a view of the file where one holds them all.

        Raises InputError for ids outside the vocabulary.
        """
        if not 0 <= start <= stop <= len(self):
            raise IndexError(f"tokens {start} to {stop} of {len(self)}")
        parts = []
        while start < stop or not parts:
            number, at = divmod(min(start, len(self) - 1), self.index.shard_tokens)
            part = self._shards[number][at : at + stop - start]
            parts.append(part)
            start += max(len(part), 1)
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        largest = int(ids.max()) if len(ids) else 0
        if largest >= self.index.vocab:
            at = stop - len(ids) + int(ids.argmax())
            raise InputError(
                f"{self.files}: token {at:,} is {largest}, and the vocabulary has {self.index.vocab:,} ids"
            )
        return ids

    def bytes_before(self, position: int) -> int:
        """The bytes of text before a token: exact where a document begins, by its tokens' mean length inside one."""
        number = min(self.number(position), self.documents - 1)
        start, stop = int(self.starts[number]), int(self.starts[number + 1])
        first, last = int(self.offsets[number]), int(self.offsets[number + 1])
        return first + (last - first) * (position - start) // (stop - start)

    def document(self, number: int) -> np.ndarray:
        """The ids of one document, with the one before it that ends a text."""
        number = range(self.documents)[number]
        return self.read(int(self.starts[number]), int(self.starts[number + 1]))

    def begins(self, start: int, stop: int) -> np.ndarray:
        """Where documents begin after start and before stop, which is beyond it; counted from start."""
        first, last = np.searchsorted(self.starts, (start, stop - 1), "right")
        begins = self.starts[first:last] - start
        if not (np.diff(begins, prepend=0, append=stop - start) > 0).all():
            raise InputError(f"{self.files / 'starts.bin'}: damaged: documents are not one after the other")
        return begins

    def number(self, position: int) -> int:
        """Which document holds the token at position."""
        return int(np.searchsorted(self.starts, position, "right")) - 1

    def source(self, number: int) -> str:
        """Where a document came from."""
        number = range(self.documents)[number]
        start, stop = int(self._names[number]), int(self._names[number + 1])
        return self._sources[start:stop][:LONGEST_NAME].tobytes().decode("utf-8", "replace")

    def where(self, position: int) -> str:
        """A token's place in words: "docs/a.txt, token 17 of 512"."""
        number = self.number(position)
        start, stop = int(self.starts[number]), int(self.starts[number + 1])
        return f"{self.source(number)}, token {position - start:,} of {stop - start:,}"

    def check(self, tokenizer: Tokenizer) -> None:
        """Raises InputError unless it was this tokenizer that made the ids."""
        if self.index.tokenizer != fingerprint(tokenizer):
            same = "another one of the same size" if tokenizer.size == self.index.vocab else f"{tokenizer.size:,} ids"
            raise InputError(
                f"{self.folder}: written with a tokenizer of {self.index.vocab:,} ids, and this one is {same};"
                " write the documents again with it"
            )

    def __repr__(self) -> str:
        return f"Tokens({str(self.folder)!r}: {len(self):,} tokens of {self.documents:,} documents)"

    def _column(self, name: str, total: int) -> np.ndarray:
        path = self.files / name
        column = _mapped(path, np.dtype("<i8"), self.index.documents + 1)
        if (column[0], column[-1]) != (0, total):
            raise InputError(f"{path}: damaged: it runs from {column[0]} to {column[-1]}, not from 0 to {total}")
        return column


def fingerprint(tokenizer: Tokenizer) -> str:
    """32 hexadecimal digits, the same for two tokenizers only if they make the same ids, on all that was tried.

    They stand for what each id is in bytes, the ids that end a text, and the encoding of lines in many scripts.
    """
    digest = blake2b(f"{tokenizer.size} {list(tokenizer.eos)}".encode(), digest_size=16)
    for token in range(tokenizer.size):
        data = tokenizer.token_bytes(token)
        digest.update(len(data).to_bytes(4, "little") + data)
    for line in PROBE:
        try:
            ids = tokenizer.encode(line)
        except InputError:  # one that lacks these characters, and has no id for what it lacks
            ids = [-1]
        digest.update(np.array([len(ids), *ids], "<i8").tobytes())
    return digest.hexdigest()


def read_index(path: Path) -> TokensIndex:
    try:
        return TokensIndex.from_json(json.loads(beginning(path)))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError, SublayerError) as error:
        raise InputError(f"{path}: not an index of documents' tokens: {error}") from None


def beginning(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(LARGEST_INDEX)


def id_type(vocab: int) -> np.dtype:
    return np.dtype("<u2" if vocab <= 2**16 else "<u4")


def shard_name(number: int) -> str:
    return f"tokens-{number:05}.bin"


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1


def _mapped(path: Path, dtype: np.dtype, count: int) -> np.ndarray:
    found, size = size_of(path), count * dtype.itemsize
    if found != size:
        what = "missing" if found < 0 else f"damaged: {found:,} bytes, and its index says {size:,}"
        raise InputError(f"{path}: {what}; write the documents again")
    return np.memmap(path, dtype, "r", shape=(count,)).view(np.ndarray) if count else np.zeros(0, dtype)
