"""How far a long job has come and how fast it goes, told on stderr."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

import typer

AFTER, TERMINAL, ELSEWHERE = 2.0, 0.2, 10.0
"""Seconds: before the first word, and between two."""


def number(count: float) -> str:
    return f"{count:,}" if isinstance(count, int) else f"{count:,.1f}"


def size(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


class Line:
    """One line that changes in a terminal; elsewhere a line now and then. `with` takes it away at the end."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._begun: dict[str, float] = {}  # stage → second
        self._ended: set[str] = set()
        self._next = AFTER
        self._terminal = sys.stderr.isatty()
        self._drawn = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin

    def stage(
        self, what: str, done: int, total: int, spell: Callable[[float], str] = number, share: float | None = None
    ) -> None:
        """Tells what is done of a stage, its rate and the time left; spell: an amount in words; share: of the work."""
        if what in self._ended:
            return
        begin = self._begun.setdefault(what, self.seconds if self._begun else 0.0)
        part = share if share is not None else done / total if total else 1.0

        def told() -> str:
            seconds = self.seconds - begin
            rate = f", {spell(done / seconds)}/s" if seconds > 0 else ""
            return f"{what}: {spell(done)} of {spell(total)}{rate}, {left(seconds, part)}"

        if part >= 1:
            self._ended.add(what)
        self.show(told, ended=part >= 1)

    def show(self, told: Callable[[], str], *, ended: bool = False) -> None:
        """Shows what is told if it is time to, or if a job that was long enough to be told of has ended."""
        now = self.seconds
        if now < (AFTER if ended else self._next):
            return
        self._next = now + (TERMINAL if self._terminal else ELSEWHERE)
        line = told()
        if self._terminal:  # a line that goes on in the next row could not be drawn over
            line = line[: _columns() - 1]
            typer.echo(f"\r{line:<{self._drawn}}", nl=ended, err=True)
            self._drawn = 0 if ended else len(line)
        else:
            typer.echo(line, err=True)

    def clear(self) -> None:
        """Takes the line away, so that another can stand there."""
        if self._drawn:
            typer.echo(f"\r{'':<{self._drawn}}\r", nl=False, err=True)
            self._drawn = 0


@contextmanager
def telling(what: str) -> Iterator[Callable[[int, int, float], None]]:
    """A `progress(done, total, share of the work)` of a job of one stage."""
    with Line() as line:
        yield lambda done, total, share: line.stage(what, done, total, share=share)


class Progress:
    """Of many prompts: how many are answered, and tokens a second."""

    def __init__(self, prompts: int) -> None:
        self._prompts = prompts
        self._done = self._tokens = 0
        self._line = Line()
        self.clear = self._line.clear

    def count(self, tokens: int = 0, done: int = 0) -> None:
        """So many more tokens and finished prompts; speaks where it is time to."""
        self._tokens += tokens
        self._done += done
        self._line.show(self._told)

    def skip(self) -> None:
        """One prompt less, which was done before."""
        self._prompts -= 1

    def _told(self) -> str:
        seconds = self._line.seconds
        end = left(seconds, self._done / self._prompts)
        return f"{self._done:,} of {self._prompts:,} prompts, {self._tokens / seconds:.1f} tokens/s, {end}"


class Clock:
    """Of one answer: tokens and seconds until the first token, and after it."""

    def __init__(self) -> None:
        self.tokens = 0
        self._begin = self._last = time.perf_counter()
        self._first: tuple[float, int] | None = None

    def count(self, tokens: int) -> None:
        self.tokens += tokens
        self._last = time.perf_counter()
        if self._first is None:
            self._first = self._last, self.tokens

    def report(self) -> str:
        if self._first is None:
            return "no token"
        then, before = self._first
        later = self.tokens - before
        rate = f", then {later / max(self._last - then, 1e-9):.1f} tokens/s" if later else ""
        several = f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}"
        return f"{several}; the first after {then - self._begin:.2f} s{rate}"


def left(seconds: float, share: float) -> str:
    """When a job will end of which a share was done in so many seconds: "1:05 left", or "done in 0:20"."""
    from ..train.view import clock

    if share >= 1:
        return f"done in {clock(seconds)}"
    return f"{clock(seconds / share - seconds if share else math.inf)} left"


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:  # of what is no terminal after all
        return 80
