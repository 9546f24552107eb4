"""`sublayer embed`: a vector for each line, or the lines that are nearest to a text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from .progress import telling
from .sentences import read_sentences


def command(
    model: Annotated[
        Path, typer.Argument(help="An encoder: a folder, a .gguf file, or org/name[@revision] of the hub.")
    ],
    input: Annotated[Path | None, typer.Option(help="A file with a text a line; default: stdin.")] = None,
    near: Annotated[str | None, typer.Option(help="A text: print the lines nearest to it, with their cosines.")] = None,
    top: Annotated[int, typer.Option(min=1, help="With --near: how many lines.")] = 10,
    out: Annotated[Path | None, typer.Option(help="A .npy file for the vectors; default: a JSON list a line.")] = None,
    batch: Annotated[int, typer.Option(help="Texts that are read together.")] = 32,
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Vectors of texts, to compare by cosine, as the model's files (sentence-transformers, GGUF) or its head say."""
    lines = read_sentences(input, "embed")

    import numpy as np

    from ..decoding import embed, read_pooling
    from ..files import replacing
    from ..text import load_tokenizer
    from ..weights import load
    from ..weights.hub import local
    from ..weights.load import read_spec

    model = local(model)
    read_spec(model)  # a folder that holds no model is told as such
    pooling, tokenizer, loaded = read_pooling(model), load_tokenizer(model), load(model, device=device)
    asked = [*lines, near] if near is not None else lines
    with telling("embedding") as progress:
        vectors = embed(loaded, tokenizer, asked, pooling, batch=batch, progress=progress).numpy()
    if out is not None:
        with replacing(out) as path, path.open("wb") as file:
            np.save(file, vectors[: len(lines)])
    if near is not None:
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        cosines = unit[:-1] @ unit[-1]
        for i in np.argsort(-cosines, kind="stable")[:top]:
            typer.echo(f"{cosines[i]:.3f}\t{lines[i]}")
    elif out is None:
        for vector in vectors:
            typer.echo(json.dumps([round(float(value), 6) for value in vector]))
