"""`sublayer translate`: each line through an encoder-decoder, by beam search."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .progress import telling
from .sentences import read_sentences
from .terminal import printable


def command(
    model: Annotated[Path, typer.Argument(help="A model folder, trained by the objective text_to_text.")],
    input: Annotated[Path | None, typer.Option(help="A file with a sentence a line; default: stdin.")] = None,
    beams: Annotated[int, typer.Option(help="Width of the beam search; 1: the best token each time.")] = 4,
    length_penalty: Annotated[float, typer.Option(help="Above 0: longer translations; 0.6 was used in 2017.")] = 0.6,
    start: Annotated[
        str | None, typer.Option(help='Special token that the decoder begins with ("<pad>" for T5); default: the end.')
    ] = None,
    prefix: Annotated[str, typer.Option(help="What each sentence begins with, as in training.")] = "",
    slots: Annotated[int, typer.Option(help="Sentences that are translated together.")] = 32,
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Translate a sentence a line: translations go to stdout in their order, progress to stderr."""
    lines = read_sentences(input, "translate")

    from ..decoding import translate
    from ..text import load_tokenizer
    from ..weights import load
    from ..weights.hub import local
    from ..weights.load import read_spec

    model = local(model)
    read_spec(model)  # a folder that holds no model is told as such
    tokenizer, loaded = load_tokenizer(model), load(model, device=device)
    with telling("translating") as progress:
        found = translate(
            loaded, tokenizer, lines, beams=beams, length_penalty=length_penalty,
            start=start, prefix=prefix, slots=slots, progress=progress,
        )  # fmt: skip
    for line in found:
        typer.echo(printable(" ".join(line.splitlines())))
