"""Prompts and answers as lines of JSON: many in, many out, and an interrupted job goes on where it was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

from ..errors import InputError, UsageError, nearest
from .terminal import complain

OPTIONS = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "stop", "seed")
"""What a line may say for itself."""
OURS = ("row", "prompt_ids", "ids", "text", "finish", "logprobs", "top_logprobs", "beams", "seed")
"""What an answer is written under."""

BEGIN = b'{"row": '
"""Of every answer's line: half a line that begins so is ours."""


@dataclass(frozen=True)
class Request:
    """One prompt."""

    row: int
    """Its number among all prompts, from 0."""
    prompt: str | list[int]
    where: str | None = None
    """The line that it stands in; None: on the command line."""
    source: str | list[int] | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What else the line says, which goes into its answer."""


def read_requests(
    prompts: list[str], files: list[Path], ids: list[str], sources: list[str] | None
) -> tuple[list[Request], int]:
    """(what can be answered, how many lines cannot, which is told) of --prompt, --prompt-file, --ids and --source.

    Raises InputError for a file that is no text, UsageError for ids that are none and for too many or few sources.
    """
    found: list[Request] = []
    refused = 0

    def add(prompt: str | list[int]) -> None:
        found.append(Request(len(found) + refused, prompt))

    for prompt in prompts:
        add(read_text(Path("-")) if prompt == "-" else prompt)
    for path in files:
        if str(path) != "-" and path.suffix != ".jsonl":
            add(read_text(path))
            continue
        for line, where in numbered(read_text(path), path):
            try:
                found.append(read_request(line, len(found) + refused, where))
            except InputError as error:
                complain(str(error))
                refused += 1
    for given in ids:
        add(_read_ids(given))
    if sources is not None:
        if len(sources) != len(found):
            raise UsageError(f"{len(sources)} sources for {len(found)} prompts: give one source a prompt")
        found = [replace(one, source=source) for one, source in zip(found, sources, strict=True)]
    return found, refused


def read_request(line: str, row: int, where: str) -> Request:
    """{"prompt": text or ids}, with source, options and anything else. Raises InputError for what is none."""
    try:
        data = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    prompt = data.get("prompt") if isinstance(data, dict) else None
    if not isinstance(prompt, str | list):
        raise InputError(f'{where}: expected {{"prompt": text or ids, …}}, found {line.strip()[:60]}')
    taken = next((name for name in data if name in OURS and name not in OPTIONS), None)
    if taken is not None:
        raise InputError(f"{where}: key {taken!r} is one that the answer is written under; call it otherwise")
    known = {"prompt", "source", *OPTIONS}
    others = [key for key in data if key not in known]
    wrong = next((key for key in others if get_close_matches(_plain(key), OPTIONS, cutoff=0.85)), None)
    if wrong is not None:  # what is only echoed must not have been meant otherwise
        raise InputError(f"{where}: key {wrong!r} is no option{nearest(_plain(wrong), OPTIONS)}; call it otherwise")
    options = {name: data[name] for name in OPTIONS if name in data}
    seed, source = options.pop("seed", None), data.get("source")
    if seed is not None and type(seed) is not int:
        raise InputError(f"{where}: seed is a whole number, got {seed!r}")
    if not isinstance(source, str | list | None):
        raise InputError(f"{where}: source is text or ids, got {type(source).__name__}")
    return Request(row, prompt, where, source, options, seed, {name: data[name] for name in others})


def _plain(key: str) -> str:
    return key.casefold().replace("-", "_")


def read_text(path: Path) -> str:
    """A file, or stdin for "-", without a byte order mark at its start."""
    data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise InputError(f"{_named(path)}: byte {error.start} is not UTF-8") from None


def numbered(text: str, path: Path) -> Iterator[tuple[str, str]]:
    """(line, where it stands) of the lines that are not empty."""
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield line, f"{_named(path)}, line {number}"


def _named(path: Path) -> str:
    return "stdin" if str(path) == "-" else str(path)


def _read_ids(given: str) -> list[int]:
    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise UsageError(f"--ids {given!r}: expected numbers with commas between them, as in 1,2,3") from None


class Answers:
    """A file of answers, one line each, that grows line by line and is whole at every moment."""

    def __init__(self, path: Path, file: IO[bytes], done: dict[int, bytes]) -> None:
        self.path = path
        self.done = done
        """Of each row that was answered before, the digest of its prompt."""
        self._file = file
        self._whole = file.seek(0, 2)

    @classmethod
    @contextmanager
    def open(cls, path: Path) -> Iterator[Answers]:
        """Goes on behind what is there. Raises UsageError for a file of anything else, which stays as it is.

        Half a line, which a killed process left, is cut off.
        """
        if path.exists() and not path.is_file():
            raise UsageError(f"{path}: not a file")
        with open(path, "ab+", buffering=0) as file:
            file.seek(0)
            done, end = _read_answers(path, file)
            file.truncate(end)
            answers = cls(path, file, done)
            try:
                yield answers
            finally:
                file.truncate(answers._whole)
                os.fsync(file.fileno())

    def write(self, row: int, prompt: tuple[int, ...], line: str) -> None:
        """Raises OSError, naming the file, where there is no room; what was whole stays."""
        data = line.encode("utf-8") + b"\n"
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        self._whole += len(data)
        self.done[row] = digest(prompt)

    def has(self, row: int, prompt: tuple[int, ...]) -> bool:
        """Whether a row is answered. Raises UsageError where the answer is to another prompt."""
        if row in self.done and self.done[row] != digest(prompt):
            raise UsageError(f"{self.path}: row {row} answers another prompt than this one's; name another --output")
        return row in self.done


def _read_answers(path: Path, file: IO[bytes]) -> tuple[dict[int, bytes], int]:
    """(row → digest of its prompt, the byte behind the last whole line)"""
    done: dict[int, bytes] = {}
    end = 0
    with open(file.fileno(), "rb", closefd=False) as lines:
        for number, line in enumerate(lines, 1):
            half = not line.endswith(b"\n")
            try:
                data = json.loads(line)
                answer = {data["row"]: digest(tuple(data["prompt_ids"]))}
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                if half and isinstance(error, ValueError) and BEGIN.startswith(line[: len(BEGIN)]):
                    break
                raise UsageError(
                    f"{path}, line {number}: not an answer of this command; name another --output"
                ) from None
            if half:
                break
            done |= answer
            end += len(line)
    return done, end


def digest(ids: tuple[int, ...]) -> bytes:
    return blake2b(" ".join(map(str, ids)).encode(), digest_size=16).digest()
