"""The errors that Sublayer raises for a user's mistake: one line that says what, where and how to mend it."""

from collections.abc import Iterable
from difflib import get_close_matches


class SublayerError(Exception):
    """A job that failed for a reason the user can act on; the command line prints its one line and exits with 1."""

    exit_code = 1

    def __init__(self, message: str) -> None:
        super().__init__(_one_line(message))


class UsageError(SublayerError):
    """A request that cannot be meant: unknown key, name or option; the command line exits with 2."""

    exit_code = 2


class SpecError(UsageError):
    """A spec that describes no model: unknown key, wrong type, sizes that do not fit."""


class MaskError(UsageError):
    """A kernel asked for by name cannot express the mask or the options of the call."""


class InputError(SublayerError):
    """Values a model cannot take: token ids outside the vocabulary, positions beyond the table, wrong shapes."""


class StateError(SublayerError):
    """A decoding state asked for what it cannot hold: more tokens than its length, an unknown slot, a lost snapshot."""


class WeightsError(SublayerError):
    """A checkpoint that is not what its spec says: cut short, missing, extra or mis-shaped tensors."""


def _one_line(message: str) -> str:
    """What a hostile file put into a message can neither break the line, nor reach the terminal, nor flood it."""
    text = " ".join(message.split())
    text = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return text if len(text) <= 1000 else f"{text[:700]} … {text[-200:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """ " (did you mean 'x'?)", or a list of what is known; for the end of an error line."""
    known = sorted(known)
    folded = {one.casefold(): one for one in known}
    close = get_close_matches(name.casefold(), folded, n=1)
    if close:
        return f" (did you mean {folded[close[0]]!r}?)"
    shown = ", ".join(known)
    if len(shown) > 250:  # one line stays readable
        shown = shown[:250].rpartition(", ")[0] + ", …"
    return f" (known: {shown})" if known else ""
