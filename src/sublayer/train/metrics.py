"""What a run measures: a line of JSON for each step and each evaluation, and curves for TensorBoard."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from io import FileIO
from pathlib import Path
from typing import Any

from ..errors import SublayerError, UsageError
from ..files import replacing

MAX_LINE = 1 << 20  # bytes; a sample of text is the longest thing in a line


@dataclass(frozen=True)
class Metrics:
    """One optimiser step, or all since the line before where not every step is written."""

    step: int
    """Optimiser steps done, this one included: the first has 1."""
    loss: float
    """Training loss in nats a token."""
    norm: float
    """Norm of the gradient over all parameters, before clipping."""
    rate: float
    """Learning rate of the matrices."""
    tokens: int
    """Tokens predicted."""
    seconds: float
    """Wall time of the step, evaluations and saving not included."""


@dataclass(frozen=True)
class Evaluated:
    """A judgement on held-out text."""

    step: int
    """Optimiser steps done."""
    held_loss: float
    """Nats a token."""
    perplexity: float
    """exp(held_loss)."""
    bits_per_byte: float
    """Bits of code a byte of text; NaN where the bytes are not known."""
    accuracy: float = math.nan
    """Share of right answers; NaN where they are not counted."""


@dataclass(frozen=True)
class Sample:
    """A text that the model wrote."""

    step: int
    """Optimiser steps done."""
    sample: str
    """The text."""


Record = Metrics | Evaluated | Sample
# A record's class is known by its keys; beside it, the type of each.
KINDS: dict[tuple[str, ...], tuple[type[Record], tuple[str, ...]]] = {
    tuple(field.name for field in fields(kind)): (kind, tuple(str(field.type) for field in fields(kind)))
    for kind in (Metrics, Evaluated, Sample)
}


class MetricsFile:
    """metrics.jsonl: each record is a line, handed to the system at once, so that a killed run keeps all of them.

    Values that are not finite are written as null, for JSON has no word for them. Raises SublayerError where the file
    cannot be written.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.file: FileIO | None = None

    def write(self, record: Record) -> None:
        """Adds a line."""
        values = {name: _or_null(value) for name, value in vars(record).items()}
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        try:
            if self.file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self.file = FileIO(self.path, "a")  # unbuffered
            before = self.file.tell()
            try:
                if self.file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                self.file.truncate(before)  # half a line would join the next one
                raise
        except OSError as error:
            raise SublayerError(f"{self.path}: cannot be written: {error.strerror}") from None

    def cut(self, step: int) -> None:
        """Drops what was written after `step`, and a line cut short: the file is then as a run at `step` left it."""
        self.close()
        if not self.path.exists():
            return
        whole = self.path.stat().st_size
        kept = [line for line, record in _lines(self.path) if record.step <= step]
        if sum(map(len, kept)) == whole:
            return
        try:
            with replacing(self.path) as beside:
                beside.write_bytes(b"".join(kept))
        except OSError as error:
            raise SublayerError(f"{self.path}: cannot be written: {error.strerror}") from None

    def close(self) -> None:
        """Closes the file; another `write` opens it again."""
        if self.file is not None:
            self.file.close()
            self.file = None


def read_metrics(path: Path | str) -> list[Record]:
    """The records of metrics.jsonl; null is NaN again, and a last line that was cut short is left out.

    Raises SublayerError naming the line that is no record.
    """
    return [record for _, record in _lines(Path(path))]


def _lines(path: Path) -> Iterator[tuple[bytes, Record]]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_LINE + 1):
                number += 1
                if len(line) > MAX_LINE:
                    raise SublayerError(f"{path}:{number}: a line of more than {MAX_LINE} bytes")
                if not line.endswith(b"\n"):
                    return
                yield line, _record(line, f"{path}:{number}")
    except OSError as error:
        raise SublayerError(f"{path}: cannot be read: {error.strerror}") from None


def _record(line: bytes, where: str) -> Record:
    try:
        values: Any = json.loads(line)
        kind, types = KINDS[tuple(values)]
        return kind(*map(_typed, types, values.values()))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        known = " or ".join(", ".join(names) for names in KINDS)
        raise SublayerError(f"{where}: not a line of metrics, which has {known}") from None


def _typed(kind: str, value: Any) -> Any:
    if kind == "float" and value is None:
        return math.nan
    if kind == "float" and type(value) in (int, float):
        return float(value)
    if kind == type(value).__name__:
        return value
    raise TypeError


def _or_null(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoard:
    """The same records as curves in a folder that `tensorboard --logdir` shows, by step.

    Raises UsageError, in one line, where TensorBoard is not installed. What a former part of the run wrote after
    `step`, the steps already done, is passed over by the viewer.
    """

    def __init__(self, folder: Path | str, step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UsageError(
                "TensorBoard is not installed: pip install 'sublayer[tensorboard]', or leave tensorboard out"
            ) from None
        self.writer = SummaryWriter(str(folder), purge_step=step + 1)

    def write(self, record: Record) -> None:
        """Adds a point to each curve, or a text."""
        if isinstance(record, Sample):
            # Indented, Markdown shows it letter by letter. What no file can hold (half a surrogate pair) is a "?".
            shown = "\n".join(f"    {line}" for line in record.sample.split("\n"))
            self.writer.add_text("sample", shown.encode(errors="replace").decode(), record.step)
        elif isinstance(record, Evaluated):
            for name in ("held_loss", "perplexity", "bits_per_byte"):
                self.writer.add_scalar(f"held out/{name}", getattr(record, name), record.step)
        else:
            values = {"loss": record.loss, "gradient norm": record.norm, "learning rate": record.rate}
            if record.seconds > 0:
                values["tokens a second"] = record.tokens / record.seconds
            for name, value in values.items():
                self.writer.add_scalar(f"training/{name}", value, record.step)

    def close(self) -> None:
        """Writes out what is waiting."""
        self.writer.close()
