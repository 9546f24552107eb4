"""`sublayer eval`: how well a model tells text, in bits per byte."""

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer

from .generate import Dtype

LONGEST = 2048  # tokens of a window, unless told otherwise: few models gain much from more, and time grows


def command(
    model: Annotated[Path, typer.Argument(help="A model: a folder, a .gguf file, or org/name[@revision] of the hub.")],
    text: Annotated[
        list[str],
        typer.Option(help="A file, a folder or a glob: text, JSON lines, Parquet, by its name's end; repeat for more."),
    ],
    field: Annotated[str, typer.Option(help="Where JSON lines and Parquet rows have their text.")] = "text",
    length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a window; default: what the model reads, {LONGEST} at most.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between windows; default: half a window.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Score text with a model: bits per byte, bits per token, perplexity.

    Documents are scored one by one, each token once, with at least length - stride tokens of its document before it, or
    all that there are. Results go to stdout, progress to stderr.
    """
    from ..errors import SublayerError, UsageError
    from ..weights.hub import local
    from ..weights.load import load, read_spec

    model = local(model)
    spec, _ = read_spec(model)

    import torch

    from ..data.readers import documents
    from ..eval.text import Texts, begin_token, refuse, score
    from ..text import load_tokenizer
    from ..weights.context import trained_length
    from .progress import telling

    try:
        refuse(spec)
    except UsageError as error:
        raise UsageError(f"{model}: {error}") from None
    length = length or min(trained_length(model, spec) or 0, LONGEST)
    if not length:
        raise UsageError(f"{model}: nothing says how long a text it was trained on: give --length")
    stride = stride or max(1, length // 2)
    if stride > length:
        raise UsageError(f"--stride {stride}: windows of {length} tokens would leave some out")
    tokenizer = load_tokenizer(model)
    begin = begin_token(model, tokenizer)
    texts = Texts.encode((document.text for document in documents(text, field=field)), tokenizer, begin)
    built = load(model, dtype=getattr(torch, dtype), device=device)
    began = time.perf_counter()
    with telling("tokens scored") as progress:
        found = score(built, texts, length=length, stride=stride, progress=progress)
    seconds = time.perf_counter() - began
    if not math.isfinite(found.nats):
        raise SublayerError(f"{model}: its probabilities are not finite in {dtype}; another --dtype may do")
    shown = {
        "bits_per_byte": found.bits_per_byte, "bits_per_token": found.bits, "perplexity": found.perplexity,
        "nats": found.nats, "documents": texts.documents, "bytes": found.bytes, "tokens": found.tokens,
        "begin": begin, "length": length, "stride": stride, "dtype": dtype, "seconds": seconds,
    }  # fmt: skip
    if as_json:
        typer.echo(json.dumps({"model": str(model)} | shown))
        return
    behind = "behind no token: their first ones are not asked" if begin is None else f"each behind token {begin}"
    typer.echo(
        f"documents       {texts.documents:,}, {behind}\n"
        f"bytes           {found.bytes:,}\n"
        f"tokens          {found.tokens:,}, {found.bytes / found.tokens:.2f} bytes each\n"
        f"windows         {length:,} tokens every {stride:,}\n"
        f"bits per byte   {found.bits_per_byte:.4f}\n"
        f"bits per token  {found.bits:.4f}\n"
        f"perplexity      {found.perplexity:.4f}"
    )
    typer.echo(f"{seconds:.1f} s, {found.tokens / seconds:.1f} tokens/s", err=True)
