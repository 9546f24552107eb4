"""`sublayer generate`: continue text with a model, as it comes."""

import json
import secrets
from collections.abc import Mapping
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from .lines import Answers, Request, numbered, read_request, read_text
from .progress import Clock, Progress
from .terminal import printable

if TYPE_CHECKING:
    from ..decoding import Generated, Options, Stream
    from ..decoding.request import Row
    from ..nn.sublayer import ModelOp
    from ..text import Tokenizer

WINDOW = 256
"""Prompts that are held at once, so that memory does not grow with their number."""
Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def command(
    model: Annotated[Path, typer.Argument(help="A model: a folder, a .gguf file, or org/name[@revision] of the hub.")],
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text to continue; repeat for several; - is what stdin says.")
    ] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(
            help='A file that is one prompt, or .jsonl with {"prompt": text or ids} a line; - is stdin, in JSON.'
        ),
    ] = None,
    ids: Annotated[list[str] | None, typer.Option(metavar="1,2,3", help="A prompt as token ids.")] = None,
    source: Annotated[
        list[str] | None, typer.Option(help="What the encoder reads, one a prompt, if the model has one.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens after which to stop.")] = 128,
    temperature: Annotated[float, typer.Option(help="Divides the logits; 0: always the best token.")] = 1.0,
    top_k: Annotated[int | None, typer.Option(help="Keep so many of the best tokens.")] = None,
    top_p: Annotated[float, typer.Option(help="Keep the fewest best tokens that reach this probability.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: repeat less.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws; without one it is drawn, and reported.")] = None,
    beams: Annotated[int, typer.Option(help="Above 1: beam search of this width.")] = 1,
    length_penalty: Annotated[float, typer.Option(help="Of beam search; 0.6 was used in 2017.")] = 0.0,
    stop: Annotated[list[str] | None, typer.Option(help="Text to stop before; repeat for several.")] = None,
    slots: Annotated[int | None, typer.Option(help="Prompts that run together; default: up to 8.")] = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: log-probabilities, and so many alternatives a token.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="A file for the answers, a JSON object a line; what it has is not done again.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and state.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Continue prompts with a model: text goes to stdout (one prompt's as it comes), speed and seed to stderr.

    A line of a .jsonl file is {"prompt": text or ids}; it may have max_tokens, temperature, top_k, top_p, min_p,
    repetition_penalty, stop, seed and source of its own, and any other keys, which go into its answer. A line that
    cannot be answered is told and left out; the exit code is then 1.
    """
    from ..errors import UsageError

    if logprobs is not None and not (as_json or output):
        raise UsageError("--logprobs is shown with --json only")
    requests, refused = _requests(prompt or [], prompt_file or [], ids or [], source)
    if not requests and not refused:
        raise UsageError("nothing to continue: give --prompt (- reads stdin), --prompt-file or --ids")

    import torch

    from ..decoding.request import read_options
    from ..text import load_tokenizer
    from ..weights import load
    from ..weights.context import trained_length
    from ..weights.hub import local
    from ..weights.load import read_spec

    asked: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "beams": beams, "length_penalty": length_penalty,
        "stop": stop or (), "slots": slots, "logprobs": logprobs,
    }  # fmt: skip
    options = read_options(asked)  # a mistake is told before anything is loaded
    model = local(model)
    spec, _ = read_spec(model)  # a folder that holds no model is told as such
    if spec.encoder is not None and spec.decoder is not None and all(one.source is None for one in requests):
        raise UsageError(f"{model}: an encoder-decoder: give a --source a prompt, or use sublayer translate")
    tokenizer = load_tokenizer(model) if stop or _textual(requests) or _has_tokenizer(model) else None
    with Answers.open(output) if output is not None else nullcontext() as answers:
        loaded = load(model, dtype=getattr(torch, dtype), device=device)
        job = Job(loaded, tokenizer, options, seed, trained_length(model, spec))
        if len(requests) == 1 and not refused and output is None and not as_json and tokenizer is not None:
            job.live(requests[0])
        else:
            refused += job.many(requests, answers, as_json=as_json)
    if refused:
        typer.secho(f"sublayer: lines that were left out: {refused}", fg="red", err=True)
        raise typer.Exit(1)


class Job:
    """What is the same for all prompts."""

    def __init__(
        self, model: "ModelOp", tokenizer: "Tokenizer | None", options: "Options", seed: int | None, trained: int | None
    ) -> None:
        ends = tokenizer.eos if tokenizer is not None else ()
        self._model, self._tokenizer, self._options = model, tokenizer, options.replace(stop_ids=ends)
        self._seed = secrets.randbits(32) if seed is None else seed
        self._trained = trained
        self._clock = Clock()

    def live(self, request: Request) -> None:
        """Prints the text as it comes."""
        row = self._row(request)
        events = self._stream([row])
        try:
            with closing(events):
                for event in events:
                    self._clock.count(len(event.ids))
                    typer.echo(printable(event.text), nl=False)
        finally:
            typer.echo()
            self._report(row.seed)

    def many(self, requests: list[Request], answers: Answers | None, *, as_json: bool) -> int:
        """Writes each answer as it is finished, to the file if there is one. Returns how many lines were refused."""
        strict = {one.row: self._row(one) for one in requests if one.where is None}  # all, before any work
        progress = Progress(len(requests))
        refused = before = 0
        seed: int | None = None
        try:
            for window in (requests[i : i + WINDOW] for i in range(0, len(requests), WINDOW)):
                rows: list[Row] = []
                for request in window:
                    row = strict.get(request.row) or self._row_or_none(request, progress)
                    if row is None:
                        refused += 1
                        progress.count(done=1)
                    elif answers is not None and answers.has(row.index, row.prompt):
                        before += 1
                        progress.skip()
                    else:
                        rows.append(row)
                        seed = row.seed if seed is None else seed
                if rows:
                    by_row = {one.row: one for one in window}
                    show = _Shown(by_row, answers, progress, as_json=as_json, several=len(requests) > 1)
                    self._answer(self._stream(rows), show, progress)
        finally:
            progress.clear()
            if answers is not None:
                told = f" ({before:,} of them before)" if before else ""
                left = max(len(requests) - refused - len(answers.done), 0)
                more = f"; {left:,} are left: the same command goes on" if left else ""
                typer.echo(f"{answers.path}: {len(answers.done):,} answers{told}{more}", err=True)
            self._report(seed)
        return refused

    def _answer(self, events: "Stream", show: "_Shown", progress: Progress) -> None:
        going: set[int] = set()
        try:
            with closing(events):
                for event in events:
                    self._clock.count(len(event.ids))
                    progress.count(len(event.ids), done=event.finish is not None)
                    going.add(event.row)
                    if event.finish is not None:
                        going.remove(event.row)
                        show.whole(event.row, events.generated(event.row))
        finally:
            for row in sorted(going):  # interrupted: what has come
                show.part(row, events.generated(row))

    def _row_or_none(self, request: Request, progress: Progress) -> "Row | None":
        from ..errors import SublayerError

        try:
            return self._row(request)
        except SublayerError as error:
            text = str(error)
            if not text.startswith(f"{request.where}: "):
                raise  # of the model, not of this line
            progress.clear()
            _complain(text)
            return None

    def _row(self, request: Request) -> "Row":
        """Raises what read_rows does, with the line's place, or the row's number, before what is wrong with it."""
        from ..decoding.request import read_rows
        from ..errors import SublayerError, UsageError

        where = request.where or f"row {request.row}"
        if request.where is not None and (self._model.encoder is None) != (request.source is None):
            raise UsageError(f"{where}: {'a source, but no encoder that reads it' if request.source else 'no source'}")
        sources = None if request.source is None else [request.source]
        seed = self._seed + request.row if request.seed is None else request.seed
        try:
            (row,) = read_rows(
                self._model, cast(Any, [request.prompt]), cast(Any, sources), [seed], self._tokenizer, self._options,
                [request.options],
            )  # fmt: skip
        except SublayerError as error:
            text = str(error)
            raise type(error)(f"{where}{text.removeprefix('row 0')}" if text.startswith("row 0") else text) from None
        length = len(row.prompt) + row.room
        if self._trained is not None and length > self._trained:
            _note(f"{where}: up to {length:,} tokens, of a model trained on {self._trained:,}: it may lose the thread")
            self._trained = None  # once is enough
        return replace(row, index=request.row)

    def _stream(self, rows: "list[Row]") -> "Stream":
        from ..decoding import Stream

        return Stream(self._model, rows, self._options, self._tokenizer)

    def _report(self, seed: int | None) -> None:
        if self._clock.tokens:
            drawn = f", seed {seed}" if seed is not None else ""
            typer.echo(f"{self._clock.report()}{drawn}", err=True)


class _Shown:
    """Where answers go: stdout, as text or JSON, or the file."""

    def __init__(
        self,
        requests: Mapping[int, Request],
        answers: Answers | None,
        progress: Progress,
        *,
        as_json: bool,
        several: bool,
    ) -> None:
        self._requests, self._answers, self._progress = requests, answers, progress
        self._as_json, self._several = as_json, several

    def whole(self, row: int, found: "Generated") -> None:
        if self._answers is not None:
            self._answers.write(row, found.prompt, _json(self._requests[row], found))
        else:
            self.part(row, found)

    def part(self, row: int, found: "Generated") -> None:
        """Of an answer that was interrupted: a file has whole ones only."""
        if self._answers is None and found.ids:
            self._progress.clear()
            json_or_text = _json(self._requests[row], found) if self._as_json else None
            typer.echo(json_or_text or printable(_titled(row, found, several=self._several)))


def _json(request: Request, found: "Generated") -> str:
    shown: dict[str, Any] = {"row": request.row, **request.more, "prompt_ids": found.prompt, "ids": found.ids}
    shown |= {"text": found.text, "finish": found.finish, "seed": found.seed}
    if found.logprobs is not None:
        alternatives = [[{"id": id, "logprob": value} for id, value in top.items()] for top in found.top_logprobs or ()]
        shown |= {"logprobs": found.logprobs, "top_logprobs": alternatives}
    if found.beams:
        shown["beams"] = [
            {"ids": beam.ids, "logprob": beam.logprob, "score": beam.score, "finish": beam.finish}
            for beam in found.beams
        ]
    return json.dumps(shown, ensure_ascii=False)


def _titled(index: int, row: "Generated", *, several: bool) -> str:
    text = row.text if row.text is not None else " ".join(map(str, row.ids))
    return f"--- {index} ---\n{text}" if several else text


def _read_ids(given: str) -> list[int]:
    from ..errors import UsageError

    try:
        return [int(part) for part in given.split(",")]
    except ValueError:
        raise UsageError(f"--ids {given!r}: expected numbers with commas between them, as in 1,2,3") from None


def _requests(
    prompts: list[str], files: list[Path], ids: list[str], sources: list[str] | None
) -> tuple[list[Request], int]:
    """(what can be answered, how many lines cannot)"""
    from ..errors import InputError, UsageError

    found: list[Request] = []
    refused = 0

    def add(prompt: str | list[int]) -> None:
        found.append(Request(len(found) + refused, prompt))

    for prompt in prompts:
        add(read_text(Path("-")) if prompt == "-" else prompt)
    for path in files:
        if str(path) != "-" and path.suffix != ".jsonl":
            add(read_text(path))
            continue
        for line, where in numbered(read_text(path), path):
            try:
                found.append(read_request(line, len(found) + refused, where))
            except InputError as error:
                _complain(str(error))
                refused += 1
    for given in ids:
        add(_read_ids(given))
    if sources is not None:
        if len(sources) != len(found):
            raise UsageError(f"{len(sources)} sources for {len(found)} prompts: give one source a prompt")
        found = [replace(one, source=source) for one, source in zip(found, sources, strict=True)]
    return found, refused


def _textual(requests: list[Request]) -> bool:
    return any(isinstance(one.prompt, str) or isinstance(one.source, str) or one.options.get("stop")
               for one in requests)  # fmt: skip


def _has_tokenizer(model: Path) -> bool:
    return (model / "tokenizer.json").is_file() or model.suffix == ".gguf"


def _complain(text: str) -> None:
    typer.secho(f"sublayer: {text}", fg="red", err=True)


def _note(text: str) -> None:
    typer.secho(f"sublayer: {text}", fg="yellow", err=True)
