"""The text of a row while it grows: whole characters, cut before the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..text.tokenizer import Tokenizer


class GrowingText:
    """Ids in, one at a time; text out that is certain. What may turn out to begin a stop string is held back.

    Of several stop strings the one that is complete first counts, so that the cut does not depend on how the text
    is split into tokens; of those complete at the same character, the longest. Ids that the tokenizer does not know
    (models often have more rows than their tokenizer has ids) read as nothing.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), before: int | None = None) -> None:
        """before: the id that the text stands behind; of some tokenizers, a space between the two is the text's only
        there."""
        self.stopped = False
        self._known = tokenizer.size
        self._decoder = tokenizer.stream()
        if before is not None and before < self._known and not self._decoder.push(before):
            self._decoder = tokenizer.stream()  # special, or the bytes of half a character: nothing goes on
        self._stops = tuple(stops)
        self._held = ""

    def push(self, token: int) -> str:
        """The text that has become certain with this id; sets `stopped` where a stop string is complete."""
        return self._release(self._decoder.push(token)) if token < self._known else ""

    def finish(self) -> str:
        """What was held back, at the end of the row."""
        text = self._release(self._decoder.finish())
        if not self.stopped:
            text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[1]]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def _undecided(self, text: str) -> int:
        """Length of the longest end of text that begins a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        ends = range(min(longest, len(text)), 0, -1)
        return next((size for size in ends if any(stop.startswith(text[-size:]) for stop in self._stops)), 0)
