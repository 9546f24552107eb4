"""`sublayer generate`: continue text with a model, as it comes."""

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .job import Job
from .lines import Answers, Request, read_requests
from .terminal import complain

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
    requests, refused = read_requests(prompt or [], prompt_file or [], ids or [], source)
    if not requests and not refused:
        raise UsageError("nothing to continue: give --prompt (- reads stdin), --prompt-file or --ids")

    import torch

    from ..decoding.request import read_options
    from ..text.load import has_tokenizer, load_tokenizer
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
    if spec.decoder is None or spec.head is None or spec.vocab is None:
        raise UsageError(f"{model}: cannot generate: that takes a decoder over tokens with a head")
    if spec.encoder is not None and spec.decoder is not None and all(one.source is None for one in requests):
        raise UsageError(f"{model}: an encoder-decoder: give a --source a prompt, or use sublayer translate")
    tokenizer = load_tokenizer(model) if stop or _textual(requests) or has_tokenizer(model) else None
    with Answers.open(output) if output is not None else nullcontext() as answers:
        loaded = load(model, dtype=getattr(torch, dtype), device=device)
        job = Job(loaded, tokenizer, options, seed, trained_length(model, spec))
        if len(requests) == 1 and not refused and output is None and not as_json and tokenizer is not None:
            job.live(requests[0])
        else:
            refused += job.many(requests, answers, as_json=as_json)
    if refused:
        complain(f"lines that were left out: {refused}")
        raise typer.Exit(1)


def _textual(requests: list[Request]) -> bool:
    return any(isinstance(one.prompt, str) or isinstance(one.source, str) or one.options.get("stop")
               for one in requests)  # fmt: skip
