"""Streaming for decoders that are known only from outside: what one more id adds to the text."""

from collections.abc import Callable, Sequence

from .tokenizer import StreamDecoder, Tokenizer


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
        ids = [*self._ids, token]
        text = self._unseen(ids)
        if not text or text.endswith("\ufffd"):
            self._ids = ids
            return ""
        self._ids = ids[self._shown :]
        self._shown = len(self._ids)
        return text

    def finish(self) -> str:
        text = self._unseen(self._ids)
        self._ids, self._shown = [], 0
        return text

    def _unseen(self, ids: list[int]) -> str:
        return self._decode(ids)[len(self._decode(self._ids[: self._shown])) :]


def streamed(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What a stream makes of ids, all of it."""
    stream: StreamDecoder = tokenizer.stream()
    return "".join([stream.push(token) for token in ids]) + stream.finish()
