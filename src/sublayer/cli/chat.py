"""`sublayer chat`: talk with a model, or write a text together with one that knows no turns."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import InputError, SublayerError, UsageError, nearest
from .generate import Dtype
from .progress import Clock
from .terminal import printable

if TYPE_CHECKING:
    from ..decoding.conversation import Conversation
    from ..nn.sublayer import ModelOp
    from ..text import Tokenizer

SETTINGS: dict[str, tuple[type[int] | type[float], str]] = {
    "temperature": (float, "divides the logits; 0: always the best token"),
    "top_k": (int, "so many of the best tokens stay; none: all"),
    "top_p": (float, "the fewest best tokens that reach this probability stay"),
    "min_p": (float, "tokens below this share of the best one's probability go"),
    "repetition_penalty": (float, "above 1: repeat less"),
    "max_tokens": (int, "after which an answer stops"),
    "seed": (int, "of the draws; none: another one each time"),
}
CONTEXT = 2048
"""Tokens, where neither the model nor its config.json says how many it was trained on."""
QUOTES = '"""'
MORE = {"length": "; an empty line goes on", "stop": "; the text has ended, the next one is new"}
"""What is told of how an answer ended, where user and model write one text."""
LARGEST = 64 << 20  # bytes of a conversation that is loaded


DEFAULTS: dict[str, Any] = {
    "temperature": 0.7,
    "top_k": None,
    "top_p": 0.95,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "max_tokens": 512,
    "seed": None,
}
"""Where neither the user nor the checkpoint says otherwise."""


def command(
    model: Annotated[Path, typer.Argument(help="A model: a folder, a .gguf file, or org/name[@revision] of the hub.")],
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens after which an answer stops; 512.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Divides the logits; 0: always the best token; 0.7, unless the model says."),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the best tokens; all.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Keep the fewest best tokens that reach this probability; 0.95.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the best one's probability; 0.")
    ] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1: repeat less; 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the draws; each answer counts it up.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; repeat for several.")] = None,
    context: Annotated[
        int | None, typer.Option(min=2, help="Tokens that model and user have together; default: the model's own.")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Continue text even if the model has a chat template.")
    ] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and state.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Talk with a model: its words go to stdout as they come, all else to stderr. /help lists what can be typed.

    A model without a chat template continues the text that is typed; a line of three quotes begins and ends several
    lines. Ctrl-C stops an answer, Ctrl-D ends.
    """
    import torch

    from ..decoding.conversation import RunningText, Turns
    from ..decoding.recommended import recommended
    from ..text import load_tokenizer
    from ..text.chat import ChatTemplate
    from ..weights import load
    from ..weights.context import trained_length
    from ..weights.hub import local
    from ..weights.load import read_spec

    given: dict[str, Any] = {
        "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "max_tokens": max_tokens, "seed": seed,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    _check(DEFAULTS | given, stop or [])  # a mistake is told before anything is loaded
    model = local(model)
    spec, _ = read_spec(model)
    advised, where = recommended(model)
    settings = DEFAULTS | advised | given
    if spec.encoder is not None:
        other = (
            "answers a source that an encoder reads: use sublayer generate --source"
            if spec.decoder
            else "writes no text"
        )
        raise UsageError(f"{model} {other}")
    trained = trained_length(model, spec)
    limit = _context(trained, spec.context, context)
    tokenizer, template = load_tokenizer(model), None if plain else ChatTemplate.read(model)
    if template is None and system:
        raise UsageError(f"--system: {'--plain continues text' if plain else f'{model} has no chat template'}")
    said = RunningText(tokenizer) if template is None else Turns(tokenizer, template, system)
    loaded = load(model, dtype=getattr(torch, dtype), device=device)
    chat = Chat(loaded, tokenizer, said, limit, settings, stop or [])
    chat.tell(f"{model}: {'it continues what you type' if template is None else 'it answers'}; /help lists commands")
    taken = [f"{_spelled(name)} {value}" for name, value in advised.items() if name not in given]
    if trained is not None and limit > trained:
        chat.tell(f"(the model was trained on {trained:,} tokens: beyond them it may lose the thread)")
    if taken:
        chat.tell(f"({', '.join(taken)}: as {where} has it)")
    if not chat.run():
        raise typer.Exit(1)


class Chat:
    """The loop: a line in, an answer out."""

    def __init__(
        self,
        model: ModelOp,
        tokenizer: Tokenizer,
        said: Conversation,
        limit: int,
        settings: dict[str, Any],
        stop: list[str],
    ) -> None:
        from ..decoding import KeptSlot

        self._model, self._tokenizer, self._said = model, tokenizer, said
        self._limit, self._settings, self._stop = limit, settings, stop
        self._slot = KeptSlot(model, limit)  # what was read stays read
        self._answers = 0
        self._before: dict[str, Any] = said.to_json()  # what is said again where there can be no answer
        self._asked: dict[str, Any] | None = None  # and with what the user said then
        self._typing = sys.stdin.isatty()
        self._commands: dict[str, tuple[str, str, Callable[[str], None]]] = {
            "help": ("", "this list", self._help),
            "again": ("", "another answer in place of the last one", self._again),
            "reset": ("", "forget all that was said", self._reset),
            **({"system": ("TEXT", "what the model is told before the first turn", self._system)}
               if self._turns else {}),
            "save": ("FILE", "write what was said", self._save),
            "load": ("FILE", "go on from what was saved", self._load),
            **{_spelled(name): ("VALUE", what, self._setting(name)) for name, (_, what) in SETTINGS.items()},
            "quit": ("", "or Ctrl-D: end", self._quit),
        }  # fmt: skip
        self._done = self._failed = False

    def run(self) -> bool:
        """Until the input ends. Returns whether all went well; at a terminal, where mistakes can be mended, it did."""
        if self._typing:
            _edit_lines()
        if isinstance(sys.stdin, TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")  # what is not UTF-8 is refused as a line, and read over
        while not self._done:
            try:
                line = self._read()
                if line is None:
                    break
                self._take(line)
            except KeyboardInterrupt:
                self.tell("\nCtrl-D or /quit ends")
            except (SublayerError, OSError) as error:
                if isinstance(error, OSError) and error.filename is None:
                    raise  # a closed pipe, or a fault of ours
                self._failed = True
                told = str(error) if isinstance(error, SublayerError) else f"{error.filename}: {error.strerror}"
                typer.secho(told, fg="red", err=True)
        if self._typing and not self._done:
            typer.echo(err=True)
        return self._typing or not self._failed

    def tell(self, text: str) -> None:
        """A line beside the conversation."""
        typer.secho(text, dim=True, err=True)

    def _read(self) -> str | None:
        """What is typed next: a line, or the lines between two of three quotes; None at the end."""
        line = self._line("> ")
        if line is None or line.strip() != QUOTES:
            return line
        lines: list[str] = []
        while (line := self._line(". ")) is not None and line.strip() != QUOTES:
            lines.append(line)
        return "\n".join(lines)

    def _line(self, mark: str) -> str | None:
        if self._typing and sys.stdout.isatty():
            try:
                return input(mark)
            except EOFError:
                return None
        if self._typing:  # and the answers go elsewhere: the mark is no part of them
            typer.echo(mark, nl=False, err=True)
        line = sys.stdin.readline()
        return line.removesuffix("\n") if line else None

    def _take(self, line: str) -> None:
        if line.startswith("/") and not line.startswith("//") and "\n" not in line:
            name, _, rest = line[1:].partition(" ")
            if name not in self._commands:
                raise UsageError(f"no command /{name}{nearest(name, self._commands)}; // begins a line with a slash")
            self._commands[name][2](rest.strip())
        elif line or not self._turns:
            self._before = self._said.to_json()
            if line:
                self._said.say(line.removeprefix("/") if line.startswith("//") else line)
            self._asked = self._said.to_json()
            self._answer()

    def _answer(self) -> None:
        """Streams the model's words. Where there can be none, nothing was said either."""
        from ..decoding import stream

        options = {name: value for name, value in self._settings.items() if name != "seed"}
        seed = None if self._settings["seed"] is None else self._settings["seed"] + self._answers
        try:
            # An answer has room for half of the context, if it wants it.
            ids, dropped = self._said.prompt(self._limit - min(options["max_tokens"], self._limit // 2))
            options["max_tokens"] = min(options["max_tokens"], self._limit - len(ids))
            events = stream(
                self._model, [ids], tokenizer=self._tokenizer, seed=seed, stop=tuple(self._stop),
                stop_ids=self._said.stop_ids, kept=self._slot, **options,
            )  # fmt: skip
        except (SublayerError, KeyboardInterrupt):
            self._said.read(self._before)
            raise
        if dropped:
            self.tell(
                f"(the context of {self._limit:,} tokens is full: the oldest {dropped} {self._said.unit} are left out)"
            )
        self._answers += 1
        clock, stopped = Clock(), False
        try:
            with closing(events):
                for event in events:
                    clock.count(len(event.ids))
                    typer.echo(printable(event.text), nl=False)
        except KeyboardInterrupt:
            stopped = True
        finally:
            (row,) = events.generated()
            self._said.heard(row.text or "", ended=row.finish == "stop")
            typer.echo()
        spoken = f"{'stopped after ' if stopped else ''}{clock.report()}"
        used = len(ids) + len(row.ids)
        ended = MORE.get(row.finish or "", "") if not self._turns else _cut(row.finish, full=used >= self._limit)
        self.tell(f"({spoken}; context {used:,} of {self._limit:,}{ended})")

    @property
    def _turns(self) -> bool:
        return self._said.unit == "messages"

    def _help(self, rest: str) -> None:
        for name, (argument, what, _) in self._commands.items():
            setting = name.replace("-", "_")
            now = f" (now {self._shown(setting)})" if setting in SETTINGS else ""
            self.tell(f"{f'/{name} {argument}':<26}{what}{now}")
        self.tell(f"{QUOTES:<26}on a line alone: begins and ends several lines")
        self.tell(f"{'Ctrl-C':<26}stops an answer")

    def _again(self, rest: str) -> None:
        if self._asked is None:
            raise UsageError("there is no answer yet to give again")
        self._before = self._said.to_json()
        self._said.read(self._asked)
        self._answer()

    def _reset(self, rest: str) -> None:
        self._said.clear()
        self._asked = None
        self.tell("(all is forgotten)")

    def _system(self, rest: str) -> None:
        self._said.read({**self._said.to_json(), "system": rest or None})
        if self._asked is not None:
            self._asked["system"] = rest or None
        self.tell(f"(system: {rest})" if rest else "(nothing is told before the first turn)")

    def _save(self, rest: str) -> None:
        from ..files import replacing

        path = _path(rest, "/save")
        if path.exists() and not _is_conversation(path):
            raise UsageError(f"{path}: holds something else than a conversation, and is not overwritten")
        text = json.dumps(self._said.to_json(), ensure_ascii=False, indent=1) + "\n"
        try:
            with replacing(path) as beside:
                beside.write_text(text, encoding="utf-8")
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}") from None
        self.tell(f"({path} written)")

    def _load(self, rest: str) -> None:
        path = _path(rest, "/load")
        data = _read_json(path)
        try:
            self._said.read(data if isinstance(data, dict) else {})
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        self._asked = None
        self.tell(f"({path} read)")

    def _setting(self, name: str) -> Callable[[str], None]:
        def change(rest: str) -> None:
            if rest:
                try:
                    value = None if rest == "none" else SETTINGS[name][0](rest)
                except ValueError:
                    raise UsageError(f"/{_spelled(name)} takes a number, got {rest!r}") from None
                changed = self._settings | {name: value}
                _check(changed, self._stop)
                self._settings = changed
            self.tell(f"({_spelled(name)} is {self._shown(name)})")

        return change

    def _shown(self, name: str) -> str:
        value = self._settings[name]
        return "none" if value is None else str(value)

    def _quit(self, rest: str) -> None:
        self._done = True


def _check(settings: dict[str, Any], stop: list[str]) -> None:
    """Raises SpecError for a value that generation does not take."""
    from ..decoding.request import read_options

    seed = settings["seed"]
    if seed is not None and not 0 <= seed < 2**62:
        raise UsageError(f"seed is a whole number from 0 to below 2^62, got {seed}")
    if None in (value for name, value in settings.items() if name not in ("seed", "top_k")):
        raise UsageError("only top-k and seed can be none")
    read_options({name: value for name, value in settings.items() if name != "seed"} | {"stop": tuple(stop)})


def _context(trained: int | None, learned: int | None, asked: int | None) -> int:
    """Tokens that a conversation may have."""
    if asked is not None and learned is not None and asked > learned:
        raise UsageError(f"--context {asked}: the model has learned {learned} positions")
    return asked or trained or CONTEXT


def _cut(finish: str | None, *, full: bool) -> str:
    if finish != "length":
        return ""
    return "; cut short: the context is full" if full else "; cut short: /max-tokens allows more"


def _path(rest: str, name: str) -> Path:
    if not rest:
        raise UsageError(f"{name} takes the name of a file")
    return Path(rest).expanduser()


def _read_json(path: Path) -> Any:
    if path.stat().st_size > LARGEST:
        raise InputError(f"{path}: larger than any conversation")
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not JSON: {error}") from None


def _is_conversation(path: Path) -> bool:
    with suppress(InputError, OSError):
        data = _read_json(path)
        return isinstance(data, dict) and not {"messages", "text"}.isdisjoint(data)
    return False


def _spelled(name: str) -> str:
    return name.replace("_", "-")


def _edit_lines() -> None:
    """Arrow keys and earlier lines, where the platform has them."""
    with suppress(ImportError):
        import_module("readline")
