"""`sublayer transcribe`: what is said in recordings, by a Whisper."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from .progress import telling
from .terminal import printable


def command(
    model: Annotated[Path, typer.Argument(help="A Whisper: a folder, or org/name[@revision] of the hub.")],
    files: Annotated[list[Path], typer.Argument(help="Recordings: WAV; others with the extra audio.")],
    language: Annotated[
        str | None, typer.Option(help="What is spoken: en, de, …; default: the model finds out.")
    ] = None,
    task: Annotated[Literal["transcribe", "translate"], typer.Option(help="translate: into English.")] = "transcribe",
    beams: Annotated[int, typer.Option(help="Width of the beam search; 1: the best token each time.")] = 1,
    slots: Annotated[int, typer.Option(help="Windows of 30 seconds that are read together.")] = 8,
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Write down what is said in recordings, a line each, after its name where there are several."""
    from ..data.audio import read_audio

    recordings = [read_audio(file) for file in files]  # a mistake is told before anything is loaded

    from ..decoding import read_speech, transcribe
    from ..text import load_tokenizer
    from ..weights import load
    from ..weights.hub import local
    from ..weights.load import read_spec

    model = local(model)
    read_spec(model)  # a folder that holds no model is told as such
    speech, tokenizer = read_speech(model), load_tokenizer(model)
    loaded = load(model, device=device)
    with telling("transcribing") as progress:
        found = transcribe(
            loaded, tokenizer, recordings, speech, language=language, task=task, beams=beams, slots=slots,
            progress=progress,
        )  # fmt: skip
    for file, text in zip(files, found, strict=True):
        typer.echo(printable(text) if len(files) == 1 else f"{file}\t{printable(text)}")
