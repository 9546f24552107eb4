"""Chat templates: from the turns of a conversation to the ids that a model was trained to read."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..gguf_header import models_in
from .ending import read_bytes, read_json
from .metadata import read_metadata
from .tokenizer import Tokenizer, frame

Message = Mapping[str, str]
"""{"role": "system", "user", "assistant" or another name, "content": text}."""

LARGEST = 1 << 20  # bytes of a template; published ones have up to 20 kB
PATIENCE = 20.0  # seconds; what is bounded more tightly is the processor time of the rendering, in render.py


class ChatTemplate:
    """A Jinja template that comes with a checkpoint, and the names of the tokens that it writes."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None, *, where: str = "chat template") -> None:
        """tokens: what the template finds under bos_token, eos_token and so on. where: what errors name."""
        self.source = source
        self.tokens = dict(tokens or {})
        self.where = where

    @classmethod
    def read(cls, folder: Path | str) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json, or a GGUF file; None where a folder has none.

        Raises InputError for a template that is no text, is too large, or is none of several without a default.
        """
        folder = Path(folder)
        gguf = _gguf(folder)
        if gguf is not None:
            return cls._read_gguf(gguf)
        path, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        config = read_json(path) if path.is_file() else {}
        source: Any = config.get("chat_template")
        where = str(path)
        if file.is_file():
            where = str(file)
            try:
                source = read_bytes(file, LARGEST).decode("utf-8")
            except UnicodeDecodeError as error:
                raise InputError(f"{file}: byte {error.start} is not UTF-8") from None
        if source is None:
            return None
        if isinstance(source, list):  # several, by name: for tools, for retrieval
            named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
            source = named.get("default")
        if not isinstance(source, str) or len(source) > LARGEST:
            raise InputError(
                f"{where}: chat_template is a text of at most {LARGEST} characters, or a list with a default"
            )
        return cls(source, _tokens(config), where=where)

    @classmethod
    def _read_gguf(cls, file: Path) -> ChatTemplate | None:
        metadata = read_metadata(file)
        source, names = metadata.get("tokenizer.chat_template"), metadata.get("tokenizer.ggml.tokens")
        if source is None:
            return None
        if not isinstance(source, str) or len(source) > LARGEST:
            raise InputError(f"{file}: tokenizer.chat_template is a text of at most {LARGEST} characters")
        tokens: dict[str, str] = {}
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            if isinstance(names, list) and type(id) is int and 0 <= id < len(names) and isinstance(names[id], str):
                tokens[f"{name}_token"] = names[id]
        return cls(source, tokens, where=str(file))

    def render(self, messages: Sequence[Message], *, answer: bool = True) -> str:
        """The text of a conversation; answer: up to where the assistant's next words begin.

        Raises InputError for messages that the template refuses, for a template that is wrong or takes too much time
        or memory, and for a message without role or content.
        """
        return self._render([messages], answer)[0]

    def encode(self, messages: Sequence[Message], tokenizer: Tokenizer, *, answer: bool = True) -> list[int]:
        """The ids of a conversation, with the special tokens that the template writes and no others.

        What a message says is text: the name of a special token in it is encoded as its characters. Where no message
        holds one, the ids are those of the whole text, encoded at once. A token that begins every text stands there
        once, whether or not the template wrote it.
        Raises InputError as `render`, and where a message holds the name of a special token and the template takes
        that message apart, so that text and template can no longer be told from each other.
        """
        mark = secrets.token_hex(16)  # no message can hold it
        whole, marked = self._render([messages, [_marked(message, mark) for message in messages]], answer)
        apart = _encode_marked(marked, mark, tokenizer)
        ids = tokenizer.encode(whole, specials="special")
        if apart is not None and _specials(ids, tokenizer) != _specials(apart, tokenizer):
            ids = apart
        elif apart is None and any(_forges(message["content"], tokenizer) for message in messages):
            raise InputError(
                f"{self.where}: a message holds the name of a special token, which would forge a turn here"
            )
        return _begun_once(ids, tokenizer)

    def ends(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The special token that closes an assistant's turn, where the template writes one: the answer ends there."""
        mark = secrets.token_hex(16)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": f"{mark}a{mark}"}]
        text = self._render([turns], answer=False)[0]
        after = tokenizer.encode(text.rpartition(mark)[2], specials="special") if mark in text else []
        return tuple(_specials(after, tokenizer)[:1])

    def _render(self, conversations: Sequence[Sequence[Message]], answer: bool) -> list[str]:
        for message in (message for messages in conversations for message in messages):
            _check(message)
        # tools and documents are there, and none, as templates find them in transformers.
        given = {**self.tokens, "tools": None, "documents": None, "add_generation_prompt": answer}
        contexts = [{**given, "messages": [dict(message) for message in messages]} for messages in conversations]
        said = sum(len(message["content"]) for messages in conversations for message in messages)
        job = {"template": self.source, "contexts": contexts, "longest": 4 * said + LARGEST}
        program = Path(__file__).with_name("render.py")
        # -P: this folder's own modules are not to be found under the names of others.
        command = [sys.executable, "-P", str(program)]
        try:
            done = subprocess.run(command, input=json.dumps(job).encode(), capture_output=True, timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            raise InputError(f"{self.where}: rendering takes longer than {PATIENCE:.0f} s") from None
        if done.returncode < 0:
            raise InputError(f"{self.where}: rendering takes too much time or memory (signal {-done.returncode})")
        if done.returncode:
            raise RuntimeError(f"render.py failed: {done.stderr.decode(errors='replace')}")
        result = json.loads(done.stdout)
        if "error" in result:
            raise InputError(f"{self.where}: {result['error']}")
        return result["texts"]


def _gguf(path: Path) -> Path | None:
    """The GGUF file that a path names: it, or the only one of a folder that has no files of another kind."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    others = ("tokenizer_config.json", "chat_template.jinja", "config.json", "spec.json")
    found = models_in(path) if path.is_dir() and not any((path / name).is_file() for name in others) else []
    return found[0] if len(found) == 1 else None


def _tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token and its like of a tokenizer_config.json, which are texts or {"content": text}."""
    found: dict[str, str] = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def _check(message: Message) -> None:
    role, content = message.get("role"), message.get("content")
    # A role goes into the template's own words, so it may not be any text.
    if not isinstance(role, str) or not role.isidentifier():
        raise InputError(f"a message's role is a name such as user or assistant, got {role!r:.60}")
    if not isinstance(content, str):
        raise InputError(f"the content of a message of {role} is text, got {type(content).__name__}")


def _marked(message: Message, mark: str) -> Message:
    """The message with marks around what it says; the blanks at its ends stay outside, for templates trim them."""
    content = message["content"]
    core = content.strip()
    if not core:
        return message
    start = content.index(core)
    return {**message, "content": f"{content[:start]}{mark}{core}{mark}{content[start + len(core) :]}"}


def _encode_marked(text: str, mark: str, tokenizer: Tokenizer) -> list[int] | None:
    """What stands between marks as text, the rest with its special tokens; None where marks were taken apart."""
    parts = text.split(mark)
    if len(parts) % 2 == 0 or any(mark[:16] in part.lower() or mark[16:] in part.lower() for part in parts):
        return None
    policies = ("special", "text") * len(parts)
    pairs = zip(parts, policies, strict=False)
    return [token for part, policy in pairs if part for token in tokenizer.encode(part, specials=policy)]


def _specials(ids: Sequence[int], tokenizer: Tokenizer) -> list[int]:
    return [token for token in ids if not tokenizer.token_bytes(token)]


def _forges(text: str, tokenizer: Tokenizer) -> bool:
    return bool(_specials(tokenizer.encode(text, specials="special"), tokenizer))


def _begun_once(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    """With what the tokenizer puts before a text, exactly once."""
    begin, _ = frame(tokenizer)
    while begin and ids[: len(begin)] == begin:
        ids = ids[len(begin) :]
    return [*begin, *ids]
