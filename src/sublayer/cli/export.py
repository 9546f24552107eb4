"""`sublayer export`: a model for transformers or for llama.cpp."""

import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from .progress import Line, size

Dtype = Literal["float32", "float64", "bfloat16", "float16"]


def command(
    model: Annotated[Path, typer.Argument(help="A model folder, Sublayer's or Hugging Face's, or a GGUF file.")],
    to: Annotated[Literal["hf", "gguf"], typer.Option(help="A folder for transformers, or a file for llama.cpp.")],
    out: Annotated[Path, typer.Option(help="The folder, or the file, to write.")],
    quantize: Annotated[
        str | None,
        typer.Option(metavar="TYPE", help="gguf: q8_0, q6_k, q5_k_m, q4_k_m, q3_k_m, q2_k, … (docs/export.md)."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Of the values; default: as they are stored.")] = None,
    shard_size: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Cut the weights into files of at most so much, as in 5GB.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Write a model, with its tokenizer and chat template, as transformers or llama.cpp read it.

    The folder or file appears when all of it is written. What a format cannot express is refused, naming the part.
    """
    shard = None if shard_size is None else _bytes(shard_size)

    import torch

    from ..weights.exports import export

    with Line() as line:

        def progress(what: str, done: int, total: int) -> None:
            line.stage(what, done, total, size)

        def note(told: str) -> None:
            line.clear()
            typer.echo(told, err=True)

        files = export(
            model, out, to=to, quantize=quantize, dtype=getattr(torch, dtype) if dtype else None, shard_size=shard,
            force=force, progress=progress, note=note,
        )  # fmt: skip
    typer.echo(f"{out}  {size(sum(file.stat().st_size for file in files))}")
    if files != [out]:
        wide = max(len(file.name) for file in files)
        for file in files:
            typer.echo(f"  {file.name:<{wide}}  {size(file.stat().st_size):>8}")


UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}


def _bytes(text: str) -> int:
    from ..errors import UsageError

    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?", text.strip().lower())
    count = 0
    if found:
        power = 2 ** (10 * "kmgt".index(found[2]) + 10) if found[2] and found[3] else UNITS[found[2]]
        count = int(float(found[1]) * power)
    if count < 1:
        raise UsageError(f"--shard-size {text}: expected a size such as 5GB, 500MB or 2GiB")
    return count
