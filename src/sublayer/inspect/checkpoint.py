"""What lies in a checkpoint beside its architecture, from headers and small files alone: no tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from ..errors import SublayerError
from ..gguf_header import read_header
from ..nn.sublayer import Model
from ..text import Bytes, load_tokenizer
from ..text.byte_pairs import BytePairs
from ..text.chat import ChatTemplate
from ..text.counted import Characters, Words
from ..text.pretrained import Pretrained
from ..text.sentence_piece import SentencePiece
from ..text.tokenizer import Tokenizer
from ..weights.context import trained_length
from ..weights.licence import read_licence
from ..weights.load import Checkpoint, gguf_file
from .count import readable_bytes

KINDS: dict[type, str] = {
    BytePairs: "byte-level BPE", Bytes: "bytes", Characters: "characters", Words: "words",
    SentencePiece: "SentencePiece",
}  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """The weights, as they lie in files."""

    files: tuple[str, ...]
    bytes: int
    tensors: dict[str, int]
    """How many are stored in each way ("F32", "BF16", "Q4_K")."""
    elements: dict[str, int]
    """How many numbers they hold."""


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer."""

    kind: str
    size: int
    ends: dict[int, str]
    """The ids that end a text, with their names where they have one."""


@dataclass(frozen=True)
class About:
    """A checkpoint. What is wrong with one of its parts stands in `problems`, under the part's name."""

    stored: Stored | None
    licence: str | None
    licence_from: str | None
    tokenizer: Vocabulary | None
    context: int | None
    """Tokens that it was trained on at once."""
    chat_template: bool
    problems: dict[str, str]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[tuple[str, str]]:
        """(name, what there is of it), for people."""
        stored = _files(self.stored) if self.stored else "not fetched: they stay on the hub until the model is loaded"
        yield "files", self.problems.get("files") or stored
        yield "licence", f"{self.licence} ({self.licence_from})" if self.licence else "not stated"
        tokenizer = self.tokenizer
        ends = ", ".join(f"{id} {name}".rstrip() for id, name in tokenizer.ends.items()) if tokenizer else ""
        ending = f", ends at {ends}" if ends else ", without an end"
        told = f"{tokenizer.kind}, {tokenizer.size:,} ids{ending}" if tokenizer else "none"
        yield "tokenizer", self.problems.get("tokenizer") or told
        yield "context", f"{self.context:,} tokens" if self.context else "not stated"
        yield "chat template", self.problems.get("chat template") or ("yes" if self.chat_template else "none")


def about(path: Path, spec: Model, stem: str | None = "model") -> About:
    """Of a folder or a GGUF file whose spec is known; stem: of the names of its safetensors files; None: they are not
    here, for only descriptions were fetched from the hub."""
    problems: dict[str, str] = {}

    def ask(part: str, question: Any, *arguments: Any) -> Any:
        try:
            return question(*arguments)
        except SublayerError as error:
            problems[part] = str(error)
            return None

    found = None if stem is None else ask("files", _stored, path, stem)
    licence, licence_from = ask("licence", read_licence, path) or (None, None)
    return About(
        found,
        licence,
        licence_from,
        ask("tokenizer", _vocabulary, path),
        ask("context", trained_length, path, spec),
        ask("chat template", ChatTemplate.read, path) is not None,
        problems,
    )


def _stored(path: Path, stem: str) -> Stored:
    gguf = gguf_file(path)
    if gguf is not None:
        header = read_header(gguf)
        return _summed(header.paths, ((place.kind, prod(place.shape)) for place in header.tensors.values()))
    with Checkpoint.open(path, stem) as files:
        names = list(files.names)
        where = sorted({files.file(name) for name in names})
        return _summed(where, [(files.dtype(name), prod(files.shape(name))) for name in names])


def _summed(files: Sequence[Path], tensors: Iterable[tuple[str, int]]) -> Stored:
    counts: dict[str, int] = {}
    elements: dict[str, int] = {}
    for kind, size in tensors:
        counts[kind] = counts.get(kind, 0) + 1
        elements[kind] = elements.get(kind, 0) + size
    order = sorted(counts, key=lambda kind: -elements[kind])
    return Stored(
        tuple(file.name for file in files),
        sum(file.stat().st_size for file in files),
        {kind: counts[kind] for kind in order},
        {kind: elements[kind] for kind in order},
    )


def _files(stored: Stored) -> str:
    whole = sum(stored.elements.values()) or 1
    shares = {kind: f"{elements / whole:.1%}" for kind, elements in stored.elements.items()}
    kinds = ", ".join(f"{kind} {shares[kind]} in {count:,}" for kind, count in stored.tensors.items())
    several = f"{stored.files[0]} and {len(stored.files) - 1} more" if len(stored.files) > 1 else "".join(stored.files)
    return f"{several}, {readable_bytes(stored.bytes)}; tensors: {kinds}"


def _vocabulary(path: Path) -> Vocabulary:
    tokenizer: Tokenizer = load_tokenizer(path)
    kind = KINDS.get(type(tokenizer))
    if kind is None and isinstance(tokenizer, Pretrained):
        kind = type(tokenizer.library.model).__name__  # BPE, WordPiece, Unigram
    names = tokenizer.name_of if isinstance(tokenizer, Pretrained | SentencePiece) else lambda id: ""
    return Vocabulary(kind or type(tokenizer).__name__, tokenizer.size, {id: names(id) or "" for id in tokenizer.eos})
