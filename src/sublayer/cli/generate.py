"""`sublayer generate`: continue text with a model, as it comes."""

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from .speed import Clock

if TYPE_CHECKING:
    from ..decoding import Generated, Stream

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def command(
    model: Annotated[Path, typer.Argument(help="A model folder, Sublayer's or Hugging Face's.")],
    prompt: Annotated[list[str] | None, typer.Option(help="Text to continue; repeat for several.")] = None,
    prompt_file: Annotated[
        list[Path] | None,
        typer.Option(help='A file that is one prompt, or .jsonl with {"prompt": text or ids} a line.'),
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
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a prompt.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and state.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Continue prompts with a model: text goes to stdout (one prompt's as it comes), speed and seed to stderr."""
    from ..errors import UsageError

    prompts = [*(prompt or []), *_read_files(prompt_file or []), *(_read_ids(given) for given in ids or [])]
    if not prompts:
        raise UsageError("nothing to continue: give --prompt, --prompt-file or --ids")
    if logprobs is not None and not as_json:
        raise UsageError("--logprobs is shown with --json only")

    import torch

    from ..decoding import stream
    from ..decoding.request import read_options
    from ..text import load_tokenizer
    from ..weights import load
    from ..weights.load import read_spec

    asked: dict[str, Any] = {
        "max_tokens": max_tokens, "temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p,
        "repetition_penalty": repetition_penalty, "beams": beams, "length_penalty": length_penalty,
        "stop": stop or (), "slots": slots, "logprobs": logprobs,
    }  # fmt: skip
    read_options(asked)  # a mistake is told before anything is loaded
    textual = bool(source or stop) or any(isinstance(prompt, str) for prompt in prompts)
    spec, _ = read_spec(model)  # a folder that holds no model is told as such
    if spec.encoder is not None and spec.decoder is not None and not source:
        raise UsageError(f"{model}: an encoder-decoder: give a --source a prompt, or use sublayer translate")
    tokenizer = load_tokenizer(model) if textual or (model / "tokenizer.json").is_file() else None
    loaded = load(model, dtype=getattr(torch, dtype), device=device)
    events = stream(loaded, prompts, tokenizer=tokenizer, sources=source, seed=seed, **asked)
    _show(events, live=len(prompts) == 1 and not as_json and tokenizer is not None, as_json=as_json)


def _show(events: "Stream", *, live: bool, as_json: bool) -> None:
    """Prints what comes; interrupted, what has come."""
    clock = Clock()
    try:
        with closing(events):
            for event in events:
                clock.count(len(event.ids))
                if live:
                    typer.echo(event.text, nl=False)
    finally:
        rows = events.generated()
        if live:
            typer.echo()
        elif any(row.ids for row in rows):
            for index, row in enumerate(rows):
                typer.echo(_json(index, row) if as_json else _titled(index, row, several=len(rows) > 1))
        if clock.tokens:
            drawn = f", seed {rows[0].seed}" if rows[0].seed is not None else ""
            typer.echo(f"{clock.report()}{drawn}", err=True)


def _json(index: int, row: "Generated") -> str:
    shown: dict[str, Any] = {"row": index, "prompt_ids": row.prompt, "ids": row.ids, "text": row.text}
    shown |= {"finish": row.finish, "seed": row.seed}
    if row.logprobs is not None:
        alternatives = [[{"id": id, "logprob": value} for id, value in top.items()] for top in row.top_logprobs or ()]
        shown |= {"logprobs": row.logprobs, "top_logprobs": alternatives}
    if row.beams:
        shown["beams"] = [
            {"ids": beam.ids, "logprob": beam.logprob, "score": beam.score, "finish": beam.finish} for beam in row.beams
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


def _read_files(paths: list[Path]) -> list[str | list[int]]:
    from ..errors import InputError

    prompts: list[str | list[int]] = []
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: byte {error.start} is not UTF-8") from None
        if path.suffix == ".jsonl":
            lines = enumerate(text.split("\n"), 1)
            prompts += [_read_line(line, f"{path}, line {number}") for number, line in lines if line.strip()]
        else:
            prompts.append(text)
    return prompts


def _read_line(line: str, where: str) -> str | list[int]:
    from ..errors import InputError

    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    prompt = row.get("prompt") if isinstance(row, dict) else None
    if not isinstance(row, dict) or row.keys() != {"prompt"} or not isinstance(prompt, str | list):
        raise InputError(f'{where}: expected {{"prompt": text or ids}} and no other key, found {line.strip()[:60]}')
    return prompt
