"""Prompts through a model: one as it comes, or many, each answer written as soon as it is whole."""

import json
import secrets
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import typer

from .lines import Answers, Request
from .progress import Clock, Progress
from .terminal import complain, note, printable

if TYPE_CHECKING:
    from ..decoding import Generated, Options, Stream
    from ..decoding.request import Row
    from ..nn.sublayer import ModelOp
    from ..text import Tokenizer

WINDOW = 256
"""Prompts that are held at once, so that memory does not grow with their number."""


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
            complain(text)
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
            note(f"{where}: up to {length:,} tokens, of a model trained on {self._trained:,}: it may lose the thread")
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
    line = json.dumps(shown, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:  # half a character, which a line may hold escaped, stays escaped
        return json.dumps(shown)
    return line


def _titled(index: int, row: "Generated", *, several: bool) -> str:
    text = row.text if row.text is not None else " ".join(map(str, row.ids))
    return f"--- {index} ---\n{text}" if several else text
