"""Streaming for decoders that are known only from outside: what one more id adds to the text."""

from collections.abc import Callable, Sequence


class DifferenceStream:
    """A StreamDecoder made of a function that decodes ids.

    It decodes the ids not yet shown together with those shown last, for what a token reads as depends on the one before
    it: a leading space is kept or dropped, a character's bytes are spread over tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._shown = 0  # how many of _ids the text returned so far covers

    def push(self, token: int) -> str:
        self._ids.append(token)
        text = self._unseen()
        if not text or text.endswith("\ufffd"):
            return ""
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        text = self._unseen()
        self._ids, self._shown = [], 0
        return text

    def _unseen(self) -> str:
        return self._decode(self._ids)[len(self._decode(self._ids[: self._shown])) :]
