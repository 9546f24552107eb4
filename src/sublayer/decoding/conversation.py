"""What is said to a model, turn by turn, as the prompt of its next answer: a running text, or turns in a template."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ..errors import InputError
from ..text.chat import ChatTemplate
from ..text.tokenizer import Tokenizer, begun


class Prompt(NamedTuple):
    """What the model reads next."""

    ids: list[int]
    dropped: int
    """What of the oldest was left out, anew since the last prompt: tokens of a text, or messages."""


class Conversation(Protocol):
    """The two kinds below."""

    unit: str
    """What Prompt.dropped counts."""
    stop_ids: tuple[int, ...]
    """Tokens at which an answer ends."""

    def say(self, text: str) -> None:
        """Adds what the user says."""
        ...

    def heard(self, text: str, *, ended: bool) -> None:
        """Adds the answer; ended: by a token of stop_ids."""
        ...

    def prompt(self, room: int) -> Prompt:
        """The ids of it all, at most `room`: the oldest is left out first, a quarter of the room at once, so that the
        next prompts begin as this one and need not be read from their beginning.

        Raises InputError where nothing was said, and where the last message alone is too much.
        """
        ...

    def clear(self) -> None:
        """Forgets all that was said."""
        ...

    def to_json(self) -> dict[str, Any]:
        """All that was said, for a file."""
        ...

    def read(self, data: Mapping[str, Any]) -> None:
        """Takes over what `to_json` gave. Raises InputError for anything else, and changes nothing then."""
        ...


class RunningText:
    """One text that user and model write in turn, for a model without a chat template."""

    unit = "tokens"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = ""
        self.ended = False
        """Whether the model has ended the text: what is said next begins a new one."""
        self.stop_ids = tokenizer.eos
        self._tokenizer = tokenizer
        self._dropped = 0

    def say(self, text: str) -> None:
        if self.ended:
            self.clear()
        self.text += text

    def heard(self, text: str, *, ended: bool) -> None:
        self.text += text
        self.ended = ended

    def prompt(self, room: int) -> Prompt:
        ids = begun(self._tokenizer, self.text)
        if not ids:
            raise InputError("there is nothing to continue: type something")
        before = self._dropped
        if len(ids) - before > room:
            self._dropped = len(ids) - _less(room)
        if not self._dropped:
            return Prompt(ids, 0)
        begin = [token for token in ids[:1] if not self._tokenizer.token_bytes(token)][: room - 1]
        return Prompt(begin + ids[self._dropped + len(begin) :], max(self._dropped - before, 0))

    def clear(self) -> None:
        self.text, self.ended, self._dropped = "", False, 0

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "ended": self.ended}

    def read(self, data: Mapping[str, Any]) -> None:
        text, ended = data.get("text"), data.get("ended", False)
        if not isinstance(text, str) or not isinstance(ended, bool):
            raise InputError('this model continues a text: expected {"text": "…"}')
        self.clear()
        self.text, self.ended = text, ended


class Turns:
    """Messages of a user and an assistant, in the form of a chat template."""

    unit = "messages"

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, system: str | None = None) -> None:
        self.messages: list[dict[str, str]] = []
        self.system = system
        self.stop_ids = tuple(dict.fromkeys((*tokenizer.eos, *template.ends(tokenizer))))
        self._tokenizer, self._template = tokenizer, template
        self._first = 0  # what stands before is out of the context

    def say(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def heard(self, text: str, *, ended: bool) -> None:
        self.messages.append({"role": "assistant", "content": text})

    def prompt(self, room: int) -> Prompt:
        start, ids = self._first, self._ids(self._first)
        if len(ids) > room:
            later = [i for i in range(start + 1, len(self.messages)) if self.messages[i]["role"] == "user"] or [start]
            # To render a template takes a process: few are tried.
            fits = bisect_left(later, True, hi=len(later) - 1, key=lambda i: len(self._ids(i)) <= _less(room))
            start, ids = later[fits], self._ids(later[fits])
            if len(ids) > room:
                raise InputError(f"the last message takes {len(ids)} tokens, and there is room for {room}")
        dropped, self._first = start - self._first, start
        return Prompt(ids, dropped)

    def _ids(self, first: int) -> list[int]:
        """Of the conversation from one message on."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._template.encode([*system, *self.messages[first:]], self._tokenizer)

    def clear(self) -> None:
        self.messages, self._first = [], 0

    def to_json(self) -> dict[str, Any]:
        return {"system": self.system, "messages": list(self.messages)}

    def read(self, data: Mapping[str, Any]) -> None:
        messages, system = data.get("messages"), data.get("system")
        if not isinstance(messages, list) or not all(map(_is_message, messages)) or not isinstance(system, str | None):
            raise InputError('this model takes turns: expected {"messages": [{"role": "user", "content": "…"}, …]}')
        self.clear()
        self.messages = [{"role": message["role"], "content": message["content"]} for message in messages]
        self.system = system


def _less(room: int) -> int:
    return max(room * 3 // 4, min(room, 2))


def _is_message(message: Any) -> bool:
    return (
        isinstance(message, dict)
        and message.get("role") in ("user", "assistant")
        and isinstance(message.get("content"), str)
    )
