"""What a run shows while it goes: a frame that is drawn anew in a terminal, a line now and then elsewhere.

Text that a model wrote, and names of files, are shown letter by letter: nothing in them reaches the terminal as a
command, and no markup is read in them.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from threading import RLock
from typing import TYPE_CHECKING, Any, Self

from .metrics import Evaluated, Metrics, Record

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

RECENT = 20  # steps that loss and speed are averaged over
REFRESH = 4  # frames a second, drawn by a thread of their own: steps never wait for them
WIDE = 72  # columns from which numbers stand in two columns
EVERY = 10.0  # seconds between lines where there is no terminal


class View:
    """What a run tells of itself; entered while it runs, and again inside if need be. Subclasses show it."""

    def __init__(self) -> None:
        self.lock = RLock()  # a frame is drawn in another thread than the one that trains
        self.depth = 0
        self.unit, self.answer = "nats", "token"
        self.steps = self.first = 0
        self.flops = self.gemm = self.bytes_per_token = self.seconds = 0.0
        self.recent: deque[Metrics] = deque(maxlen=RECENT)
        self.loss, self.held_loss = Curve(), Curve()
        self.held: Evaluated | None = None
        self.sample: tuple[int, str] | None = None
        self.work: tuple[str, float, float] | None = None  # label, share, begun
        self.begun = time.monotonic()
        self.times: list[tuple[int, float]] = []  # (step, time) of the first step told, and of the last

    def __enter__(self) -> Self:
        self.depth += 1
        if self.depth == 1:
            self._start()
        return self

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.depth == 0:
            self._stop()

    def begin(
        self,
        steps: int,
        *,
        done: int = 0,
        seconds: float = 0.0,
        flops: float = 0.0,
        gemm: float = 0.0,
        bytes_per_token: float = 0.0,
        unit: str = "nats",
        answer: str = "token",
    ) -> None:
        """Training begins, at step `done` of `steps`, or for so many seconds where that is 0.

        flops: operations a token; gemm: those that the machine does a second, of all ranks; bytes_per_token: bytes of
        text. Where one is 0, what follows from it is not shown. unit, answer: the objective's.
        """
        with self.lock:
            self.steps, self.first, self.flops, self.gemm = steps, done, flops, gemm
            self.bytes_per_token, self.work, self.seconds = bytes_per_token, None, seconds
            self.unit, self.answer = unit, answer
            self.begun, self.times = time.monotonic(), []

    def show(self, record: Record) -> None:
        """A step, an evaluation or a sample, as it is also written to metrics.jsonl."""
        with self.lock:
            if isinstance(record, Metrics):
                self.recent.append(record)
                self.loss.add(record.loss)
                self.times = [*self.times[:1], (record.step, time.monotonic())]
            elif isinstance(record, Evaluated):
                self.held = record
                self.held_loss.add(record.held_loss)
            else:
                self.sample = record.step, record.sample
        self._tell(record)

    def progress(self, label: str, done: float, total: float) -> None:
        """Work before training, `done` of `total`; it is over when they are equal."""
        share = min(done / total, 1.0) if total > 0 else 1.0
        with self.lock:
            known = self.work is not None and self.work[0] == label
            if not known and share == 1:
                return  # it was told already
            begun = self.work[2] if self.work is not None and known else time.monotonic()
            self.work = (label, share, begun) if share < 1 else None
        self._tell_work(label, share, begun)

    def note(self, line: str) -> None:
        """One line that stays."""

    # --- what follows from what was told ---

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.recent[-1].step if self.recent else self.first

    def recent_loss(self) -> float:
        """Nats a token, over the last steps; NaN before the first."""
        values = [(made.loss, made.tokens) for made in self.recent if math.isfinite(made.loss)]
        tokens = sum(count for _, count in values)
        return sum(loss * count for loss, count in values) / tokens if tokens else math.nan

    def bits_per_byte(self) -> float:
        """What recent_loss is in bits a byte of text; NaN where the bytes are not known."""
        return self.recent_loss() / math.log(2) / self.bytes_per_token if self.bytes_per_token else math.nan

    def speed(self) -> float:
        """Tokens a second over the last steps."""
        seconds = sum(made.seconds for made in self.recent)
        return sum(made.tokens for made in self.recent) / seconds if seconds > 0 else 0.0

    def utilisation(self) -> float:
        """Share of the rate of matrix products that training reaches; NaN where that is not known."""
        return self.speed() * self.flops / self.gemm if self.flops and self.gemm else math.nan

    def left(self) -> float:
        """Seconds to the end, as steps have taken so far with all that happens between them; NaN before the first.

        The first step is left out once there are others: it may have compiled.
        """
        if self.seconds:
            return max(0.0, self.seconds - (time.monotonic() - self.begun))
        if not self.times or not self.steps:
            return math.nan
        (step, now), (before, then) = self.times[-1], (self.first, self.begun)
        if len(self.times) > 1:
            before, then = self.times[0]
        return (now - then) / max(step - before, 1) * (self.steps - step)

    # --- for subclasses ---

    def _start(self) -> None: ...

    def _stop(self) -> None: ...

    def _tell(self, record: Record) -> None: ...

    def _tell_work(self, label: str, share: float, begun: float) -> None: ...


class Quiet(View):
    """Shows nothing."""


def live(console: Console | None = None) -> View:
    """The view that fits what stdout is: a frame in a terminal that can redraw one, lines elsewhere."""
    from rich.console import Console

    console = console if console is not None else Console(highlight=False)
    return Frame(console) if console.is_terminal and not console.is_dumb_terminal else Lines(console)


class _Printing(View):
    def __init__(self, console: Console) -> None:
        super().__init__()
        self.console = console

    def note(self, line: str) -> None:
        self._print(line)

    def _print(self, line: str, style: str = "") -> None:
        from rich.text import Text

        self.console.print(Text(harmless(line, self.console.encoding), style), soft_wrap=True)

    def _held(self, made: Evaluated) -> str:
        bits = f"  {made.bits_per_byte:.4f} bits/byte" if math.isfinite(made.bits_per_byte) else ""
        said = f"step {made.step}: held out {made.held_loss:.4f} {self.unit}/{self.answer}{bits}"
        if math.isfinite(made.accuracy):
            return f"{said}  accuracy {made.accuracy:.2%}"
        return f"{said}  perplexity {made.perplexity:.2f}" if self.unit == "nats" else said


class Lines(_Printing):
    """A line for the first step, the last, and at most every ten seconds between; evaluations and samples in full."""

    def __init__(self, console: Console, every: float = EVERY) -> None:
        super().__init__(console)
        self.every, self.due = every, 0.0

    def _tell(self, record: Record) -> None:
        if isinstance(record, Metrics):
            if time.monotonic() >= self.due or record.step in (self.first + 1, self.steps):
                self.due = time.monotonic() + self.every
                self._print(self._line(record))
        elif isinstance(record, Evaluated):
            self._print(self._held(record))
        else:
            self._print("\n".join(f"  | {line}" for line in record.sample.split("\n")))

    def _tell_work(self, label: str, share: float, begun: float) -> None:
        gone = time.monotonic() - begun
        if share == 1:
            self._print(f"{label}: done in {clock(gone)}")
        elif time.monotonic() >= self.due:
            self.due = time.monotonic() + self.every
            self._print(f"{label}: {share:.0%}" + (f", {clock(gone / share - gone)} left" if share > 0 else ""))

    def _line(self, made: Metrics) -> str:
        parts = [f"step {made.step}" + (f"/{self.steps}" if self.steps else ""), f"loss {self.recent_loss():.4f}"]
        if self.bytes_per_token:
            parts.append(f"{self.bits_per_byte():.3f} bits/byte")
        parts += [f"rate {made.rate:.2e}", f"norm {made.norm:.3g}", f"{self.speed():,.0f} {self.answer}s/s"]
        if self.flops and self.gemm:
            parts.append(f"{self.utilisation():.0%} of {operations(self.gemm)}")
        if self.steps or self.seconds:
            parts.append(f"{clock(self.left())} left")
        return "  ".join(parts)


class Frame(_Printing):
    """A frame at the foot of the terminal, drawn anew a few times a second; notes and evaluations scroll above it."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self.live: Any = None

    def _start(self) -> None:
        from rich.live import Live

        self.live = Live(get_renderable=self.frame, console=self.console, refresh_per_second=REFRESH)
        self.live.start()

    def _stop(self) -> None:
        self.live.stop()

    def _tell(self, record: Record) -> None:
        if isinstance(record, Evaluated):
            self._print(self._held(record), "green")

    def _tell_work(self, label: str, share: float, begun: float) -> None:
        if share == 1:
            self._print(f"{label}: done in {clock(time.monotonic() - begun)}")

    def frame(self) -> RenderableType:
        """What stands at the foot of the terminal now."""
        from rich.console import Group
        from rich.text import Text

        with self.lock:
            width, height = self.console.size
            parts: list[RenderableType] = []
            if self.work is not None:
                label, share, begun = self.work
                gone = time.monotonic() - begun
                parts.append(self._bar(label, share, gone, gone / share - gone if share > 0 else math.nan, width))
            if self.steps or self.recent:
                gone = time.monotonic() - self.begun
                share = self.step / self.steps if self.steps else min(1.0, gone / self.seconds) if self.seconds else 0.0
                label = f"step {self.step:,}" + (f" of {self.steps:,}" if self.steps else "")
                parts += [Text(), self._bar(label, share, gone, self.left(), width)]
            if self.recent:
                parts += [Text(), self._numbers(width)]
                room = height - (13 if width < WIDE else 9)  # lines that are left
                if room >= 7:
                    parts += [Text(), *self._curve(width)]
                if self.sample is not None and room >= 10:
                    parts += [Text(), *self._sample(width, min(room - 9, 6))]
            return Group(*parts)

    def _bar(self, label: str, share: float, gone: float, left: float, width: int) -> RenderableType:
        from rich.progress_bar import ProgressBar
        from rich.table import Column, Table
        from rich.text import Text

        label = harmless(" ".join(label.split()), self.console.encoding)[: width // 2]
        after = f"{share:4.0%}  " + (f"{clock(gone)} gone, " if width >= WIDE else "") + f"{clock(left)} left"
        room = max(4, width - len(label) - len(after) - 4)
        row = Table.grid(*(Column(no_wrap=True, overflow="crop") for _ in range(3)), padding=(0, 2), pad_edge=False)
        row.add_row(Text(label, "bold"), ProgressBar(1.0, share, room, complete_style="cyan"), Text(after))
        return row

    def _numbers(self, width: int) -> RenderableType:
        from rich.table import Column, Table
        from rich.text import Text

        latest, none = self.recent[-1], "-"
        left = [
            ("loss", f"{self.recent_loss():.4f} {self.unit}/{self.answer}"),
            ("bits per byte", _or(none, f"{self.bits_per_byte():.3f}", self.bits_per_byte())),
            ("learning rate", f"{latest.rate:.2e}"),
            ("gradient norm", f"{latest.norm:.3g}"),
        ]
        if self.held is None:
            held = [("held out", none), ("  bits per byte", none)]
        else:
            held = [
                ("held out", f"{self.held.held_loss:.4f} at step {self.held.step:,}"),
                ("  bits per byte", _or(none, f"{self.held.bits_per_byte:.3f}", self.held.bits_per_byte)),
            ]
        used = f"{self.utilisation():.1%} of {operations(self.gemm)}" if self.flops and self.gemm else none
        right = [*held, ("speed", f"{self.speed():,.0f} {self.answer}s/s"), ("utilisation", used)]
        table = Table.grid(
            *(Column(no_wrap=True, overflow="crop") for _ in range(4 if width >= WIDE else 2)), padding=(0, 2)
        )
        if width >= WIDE:
            for (a, x), (b, y) in zip(left, right, strict=True):
                table.add_row(Text(a, "dim"), Text(x.ljust(18)), Text(b, "dim"), Text(y))
        else:
            for a, x in (*left, *right):
                table.add_row(Text(a, "dim"), Text(x))
        return table

    def _curve(self, width: int) -> list[RenderableType]:
        from rich.text import Text

        plain = not self.console.encoding.lower().startswith("utf")
        rows = picture(self.loss.bins(max(10, min(width, 120) - 10)), 5, "ascii" if plain else "blocks")
        title = f"loss since step {self.first + 1:,}"
        return [Text(title, "dim"), *(Text.assemble((label, "dim"), (row, "cyan")) for label, row in rows)]

    def _sample(self, width: int, rows: int) -> list[RenderableType]:
        from rich.text import Text

        assert self.sample is not None
        step, sample = self.sample
        lines = Text(harmless(sample, self.console.encoding), overflow="fold").wrap(self.console, width)
        return [Text(f"written after step {step:,}", "dim"), *lines[:rows]]


def picture(values: Sequence[float], rows: int, style: str = "blocks") -> list[tuple[str, str]]:
    """(label, row) from the top down: a curve whose columns are values; the largest and the smallest are labelled.

    Where there are many values the scale leaves out the first tenth, in which a loss falls from its first height.
    """
    if not values:
        return []
    levels, tee, line = (" ▁▂▃▄▅▆▇█", "┤", "│") if style == "blocks" else (" .:|#", "+", "|")
    scaled = values[len(values) // 10 :] if len(values) >= 20 else values
    low, high = min(scaled), max(scaled)
    parts = len(levels) - 1
    # The lowest value still fills one part of the last row.
    heights = [1 + round((value - low) / (high - low) * (rows * parts - 1)) if high > low else 1 for value in values]
    made: list[tuple[str, str]] = []
    for row in range(rows - 1, -1, -1):
        label = f"{high:8.3f}" if row == rows - 1 else f"{low:8.3f}" if row == 0 else " " * 8
        cells = "".join(levels[min(max(height - row * parts, 0), parts)] for height in heights)
        made.append((f"{label} {tee if label.strip() else line}", cells))
    return made


class Curve:
    """A series of any length as means of equal runs of it, at most 512 at a time."""

    def __init__(self, room: int = 512) -> None:
        self.room, self.span = room, 1
        self.means: list[float] = []
        self.open: list[float] = []

    def add(self, value: float) -> None:
        """Takes a value in; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self.open.append(value)
        if len(self.open) == self.span:
            self.means.append(sum(self.open) / self.span)
            self.open = []
        if len(self.means) == self.room:
            self.means = [(a + b) / 2 for a, b in zip(self.means[::2], self.means[1::2], strict=True)]
            self.span *= 2

    def bins(self, width: int) -> list[float]:
        """At most `width` means over the whole series, in order."""
        values = [*self.means, *([sum(self.open) / len(self.open)] if self.open else [])]
        count = min(width, len(values))
        edges = [round(i * len(values) / count) for i in range(count + 1)] if count else [0]
        return [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def harmless(text: str, encoding: str = "utf-8") -> str:
    """text with all that is not printable written out: ESC as \\x1b, a reversal of direction as \\u202e.

    Line feeds stay and tabs become four spaces; what `encoding` cannot write is a "?".
    """
    text = text.expandtabs(4)
    text = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)
    return text.encode(encoding, "replace").decode(encoding)


def clock(seconds: float) -> str:
    """4:05, 1:02:03; -:-- where the time is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(seconds, 0.0)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def operations(rate: float) -> str:
    """104 GFLOP/s."""
    size, unit = next((pair for pair in ((1e15, "P"), (1e12, "T")) if rate >= pair[0]), (1e9, "G"))
    return f"{rate / size:.3g} {unit}FLOP/s"


def _or(none: str, text: str, value: float) -> str:
    return text if math.isfinite(value) else none
