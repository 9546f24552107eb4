"""`sublayer eval`: how well a model tells text, in bits per byte."""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from .generate import Dtype
from .progress import Line, size, telling

LONGEST = 2048  # tokens of a window, unless told otherwise: few models gain much from more, and time grows


def command(
    model: Annotated[Path, typer.Argument(help="A model: a folder, a .gguf file, or org/name[@revision] of the hub.")],
    text: Annotated[
        list[str],
        typer.Option(help="A file, a folder or a glob: text, JSON lines, Parquet, by its name's end; repeat for more."),
    ],
    field: Annotated[str, typer.Option(help="Where JSON lines and Parquet rows have their text.")] = "text",
    bad_bytes: Annotated[
        Literal["error", "replace", "skip"],
        typer.Option(help="Of bytes that are not UTF-8: refuse, read as U+FFFD, or leave their document out."),
    ] = "error",
    length: Annotated[
        int | None, typer.Option(min=1, help=f"Tokens of a window; default: what the model reads, {LONGEST} at most.")
    ] = None,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens between windows; default: half a window.")] = None,
    against: Annotated[
        Path | None, typer.Option(help="Another model of the same tokens: how far predictions are from its own.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    dtype: Annotated[Dtype, typer.Option(help="Of the weights.")] = "float32",
    device: Annotated[str, typer.Option(help="Where to run, as torch names it.")] = "cpu",
) -> None:
    """Score text with a model: bits per byte, bits per token, perplexity.

    Documents are scored one by one, each token once, with at least length - stride tokens of its document before it, or
    all that there are. With --against (the file before it was quantised, say), both are asked, and the mean KL
    divergence and the share of equal likeliest tokens are told. Results go to stdout, progress to stderr.
    """
    from ..errors import SublayerError, UsageError
    from ..weights.hub import local
    from ..weights.load import load, read_spec

    model, against = local(model), local(against) if against is not None else None
    spec, _ = read_spec(model)

    import numpy as np
    import torch

    from ..eval import Texts, begin_token, compare, score
    from ..eval.text import refuse
    from ..text import load_tokenizer
    from ..weights.context import trained_length

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
    begin = begin_token(model, load_tokenizer(model))

    def encoded(path: Path, what: str) -> Texts:
        with Line() as line:
            return Texts.encode(_read(text, field, bad_bytes, line, what), load_tokenizer(path), begin)

    texts = encoded(model, "reading text")
    if against is not None and not np.array_equal(encoded(against, "reading it again").ids, texts.ids):
        raise UsageError(f"{against}: its tokens of this text are not those of {model}, so nothing can be compared")
    built = load(model, dtype=getattr(torch, dtype), device=device)
    reference = load(against, dtype=getattr(torch, dtype), device=device) if against is not None else None
    began = time.perf_counter()
    with telling("tokens scored") as progress:
        windows = {"length": length, "stride": stride, "progress": progress}
        compared = compare(built, reference, texts, **windows) if reference is not None else None
        found = compared.score if compared is not None else score(built, texts, **windows)
    seconds = time.perf_counter() - began
    for path, scored in ((model, found), (against, compared.reference if compared is not None else found)):
        if not math.isfinite(scored.nats):
            raise SublayerError(f"{path}: its probabilities are not finite in {dtype}; another --dtype may do")
    shown = {
        "bits_per_byte": found.bits_per_byte, "bits_per_token": found.bits, "perplexity": found.perplexity,
        "nats": found.nats, "documents": texts.documents, "bytes": found.bytes, "tokens": found.tokens,
        "begin": begin, "length": length, "stride": stride, "dtype": dtype, "seconds": seconds,
    }  # fmt: skip
    if compared is not None:
        shown["against"] = {
            "model": str(against), "bits_per_byte": compared.reference.bits_per_byte,
            "divergence": compared.divergence, "agreement": compared.agreement,
        }  # fmt: skip
    typer.echo(json.dumps({"model": str(model)} | shown) if as_json else _in_words(shown))
    if not as_json:
        typer.echo(f"{seconds:.1f} s, {found.tokens / seconds:.1f} tokens/s", err=True)


def _in_words(shown: dict[str, Any]) -> str:
    begin, against = shown["begin"], shown.get("against")
    behind = "behind no token: their first ones are not asked" if begin is None else f"each behind token {begin}"
    lines = [
        f"documents       {shown['documents']:,}, {behind}",
        f"bytes           {shown['bytes']:,}",
        f"tokens          {shown['tokens']:,}, {shown['bytes'] / shown['tokens']:.2f} bytes each",
        f"windows         {shown['length']:,} tokens every {shown['stride']:,}",
        f"bits per byte   {shown['bits_per_byte']:.4f}",
        f"bits per token  {shown['bits_per_token']:.4f}",
        f"perplexity      {shown['perplexity']:.4f}",
    ]
    if against is not None:
        lines += [
            f"against         {against['model']}, {against['bits_per_byte']:.4f} bits per byte",
            f"KL divergence   {against['divergence']:.4g} nats a token",
            f"same likeliest  {against['agreement']:.2%} of the tokens",
        ]
    return "\n".join(lines)


def _read(
    paths: list[str], field: str, bad_bytes: Literal["error", "replace", "skip"], line: Line, what: str
) -> Iterator[str]:
    from ..data.readers import Seen, documents, measure

    seen, whole = Seen(), measure(paths).bytes
    for document in documents(paths, field=field, bad_bytes=bad_bytes, seen=seen):
        line.stage(what, seen.bytes, whole, size)
        yield document.text
