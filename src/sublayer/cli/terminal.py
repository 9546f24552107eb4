"""What a model writes, and what is told beside it, on a terminal."""

import sys
import unicodedata

import typer


def printable(text: str) -> str:
    """What goes to stdout: the text, and in a terminal, for which it may not be commands, its harmless form."""
    return harmless(text) if sys.stdout.isatty() else text


def harmless(text: str) -> str:
    """Text that moves no cursor and hides nothing: what a model writes is not for the terminal to obey."""
    kept = "\n\t\u200c\u200d"  # the last two join letters, in scripts and emoji
    hidden = ("Cc", "Cf", "Cs")
    return "".join(c if c in kept or unicodedata.category(c) not in hidden else ascii(c)[1:-1] for c in text)


def complain(text: str) -> None:
    """What is wrong, on stderr."""
    typer.secho(f"sublayer: {text}", fg="red", err=True)


def note(text: str) -> None:
    """What is worth knowing, on stderr."""
    typer.secho(f"sublayer: {text}", fg="yellow", err=True)
