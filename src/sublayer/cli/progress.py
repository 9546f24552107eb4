"""How far a long job has come, told on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import typer


def telling(what: str, after: float = 2.0, every: float = 10.0) -> Callable[[int, int, float], None]:
    """A `progress` that tells stderr, from `after` seconds on, what is done, its rate and the time left:
    over one line in a terminal, elsewhere a line every so many seconds."""
    from ..train.view import clock

    begun = shown = time.monotonic()
    live = sys.stderr.isatty()

    def tell(done: int, total: int, share: float) -> None:
        nonlocal shown
        now = time.monotonic()
        gone, ended = now - begun, done == total
        if gone < after or (not ended and now - shown < (0.2 if live else every) and shown != begun):
            return
        shown = now
        left = f"done in {clock(gone)}" if ended else f"{clock(gone / share - gone)} left"
        line = f"{what}: {done:,} of {total:,}, {done / gone:.1f} a second, {left}"
        typer.echo(f"\r{line}\x1b[K" if live else line, nl=not live or ended, err=True)

    return tell
