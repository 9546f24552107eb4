"""How fast it goes, and how long it will take, told on stderr."""

import sys
import time

import typer


class Clock:
    """Tokens and seconds: until the first token, and after it."""

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
        return f"{_several(self.tokens, 'token')}; the first after {then - self._begin:.2f} s{rate}"


class Progress:
    """Of many prompts: one line that changes in a terminal, a line now and then elsewhere."""

    SILENT, TERMINAL, ELSEWHERE = 2.0, 0.5, 30.0  # seconds: before the first word, and between two

    def __init__(self, prompts: int, unit: str = "prompt") -> None:
        self._prompts, self._unit = prompts, unit
        self._done = self._tokens = 0
        self._begin = time.monotonic()
        self._next = self._begin + self.SILENT
        self._terminal = sys.stderr.isatty()
        self._drawn = 0

    def count(self, tokens: int = 0, done: int = 0) -> None:
        """So many more tokens and finished prompts; speaks where it is time to."""
        self._tokens += tokens
        self._done += done
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (self.TERMINAL if self._terminal else self.ELSEWHERE)
        line = self.line(now - self._begin)
        if self._terminal:
            typer.echo(f"\r{line:<{self._drawn}}", nl=False, err=True)
            self._drawn = len(line)
        else:
            typer.echo(line, err=True)

    def skip(self) -> None:
        """One prompt less, which was done before."""
        self._prompts -= 1

    def line(self, seconds: float) -> str:
        left = (
            "" if not self._done else f", about {_duration(seconds / self._done * (self._prompts - self._done))} left"
        )
        rate = self._tokens / max(seconds, 1e-9)
        return f"{self._done:,} of {_several(self._prompts, self._unit)}, {rate:.1f} tokens/s{left}"

    def clear(self) -> None:
        """Takes the line away, so that another can stand there."""
        if self._drawn:
            typer.echo(f"\r{'':<{self._drawn}}\r", nl=False, err=True)
            self._drawn = 0


def _several(count: int, unit: str) -> str:
    return f"{count:,} {unit}{'' if count == 1 else 's'}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
