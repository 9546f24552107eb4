"""`sublayer show`: an architecture as a tree, with exact sizes and what it needs; no weights are read."""

import json
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .generate import Dtype

if TYPE_CHECKING:
    from ..inspect.checkpoint import About
    from ..inspect.count import Cost, Memory
    from ..nn.sublayer import Model


def command(
    name: Annotated[
        str,
        typer.Argument(help="A published size (`sublayer recipes` lists them), a folder, a .gguf file, or org/name."),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the spec, e.g. decoder.blocks.*.attn.op.window=512."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows that are generated together.")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens of each, prompt included; 8192, or the context if shorter.")
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Of weights and state, in memory.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: sizes and the whole spec.")] = False,
) -> None:
    """Print an architecture as a tree, its parameters, and the memory that it needs to generate; of a checkpoint also
    its files, licence, tokenizer and context. Only headers are read, so it takes as long for any size.
    """
    import torch

    from ..errors import UsageError
    from ..inspect.count import cost, memory

    spec, family, about = _find(name)
    spec = spec.override(*overrides or [])
    kind = getattr(torch, dtype)
    sizes, longest = cost(spec, kind), spec.context
    if longest is not None and (length or 0) > longest:
        raise UsageError(f"--length {length}: {name} has {longest} positions")
    length = length or min(8192, longest or (about.context if about else None) or 8192)
    needed = memory(spec, batch, length, kind)
    if as_json:
        shown: dict[str, Any] = {
            "name": name,
            "family": family,
            "parameters": sizes.parameters,
            "active_parameters": sizes.active,
            "parameters_by_part": sizes.parts,
            "state_bytes_per_token": sizes.state_bytes_per_token,
            "state_bytes_per_slot": sizes.state_bytes_per_slot,
            "state_bytes_per_memory": sizes.state_bytes_per_memory,
            "state_dtype": dtype,
            "memory": {
                "batch": batch, "length": length, "dtype": dtype, "weights": needed.weights, "state": needed.state,
                "activations": needed.activations, "logits": needed.logits, "total": needed.total,
            },
            "checkpoint": about and about.to_json(),
            "spec": spec.to_json(),
        }  # fmt: skip
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    width = shutil.get_terminal_size().columns
    lines = [spec.tree(width), "", *_parameters(sizes), *_memory(spec, sizes, needed, batch, length, dtype)]
    if about is not None:
        lines += ["", "checkpoint", *(f"  {part:<15}{told}" for part, told in about.lines())]
    typer.echo(lines[0])
    for line in lines[1:]:
        typer.echo(_wrapped(line, width))


def _parameters(sizes: "Cost") -> Iterator[str]:
    from ..inspect.count import readable

    yield f"parameters  {sizes.parameters:,} ({readable(sizes.parameters)})"
    if sizes.active != sizes.parameters:
        yield f"active      {sizes.active:,} ({readable(sizes.active)}): what a token goes through"
    wide = max(14, *(len(part) + 2 for part in sizes.parts))
    for part, count in sizes.parts.items():
        yield f"  {part:<{wide}}{count:>18,}  {count / sizes.parameters:6.1%}"


def _memory(spec: "Model", sizes: "Cost", needed: "Memory", batch: int, length: int, dtype: str) -> Iterator[str]:
    from ..inspect.count import readable_bytes

    stateful = bool(sizes.state_bytes_per_token or sizes.state_bytes_per_slot or sizes.state_bytes_per_memory)
    if stateful:
        yield ""
        yield f"state, in {dtype}"
        yield f"  a token        {readable_bytes(sizes.state_bytes_per_token)}"
        if sizes.state_bytes_per_slot:
            yield f"  a row          {readable_bytes(sizes.state_bytes_per_slot)}, whatever its length"
        if sizes.state_bytes_per_memory:
            yield f"  a vector of memory  {readable_bytes(sizes.state_bytes_per_memory)}"
    yield ""
    yield f"memory for {batch} row{'s' if batch > 1 else ''} of {length:,} tokens, in {dtype}"
    yield f"  weights        {readable_bytes(needed.weights)}"
    if not stateful:
        yield "  state          none: it answers all at once"
    else:
        yield f"  state          {readable_bytes(needed.state)}"
        if needed.state_needed < sizes.state_bytes(batch, length, length if spec.encoder else 0):
            yield f"    its windows need  {readable_bytes(needed.state_needed)} (all of it is kept for now)"
    what = "a prompt is read 512 tokens a call" if spec.decoder else "all tokens at once"
    yield f"  activations    about {readable_bytes(needed.activations)}: {what}"
    if needed.logits:
        yield f"  logits         {readable_bytes(needed.logits)}, of which a copy in float64"
    yield f"  together       {readable_bytes(needed.total)}"


def _wrapped(line: str, width: int) -> str:
    """The line, going on below its second column where it is too long."""
    return textwrap.fill(
        line, max(width, 40), subsequent_indent=" " * 17, break_on_hyphens=False, break_long_words=False
    )


def _find(name: str) -> "tuple[Model, str | None, About | None]":
    """(spec, family, what else there is) of a published size or a checkpoint."""
    from ..errors import UsageError, nearest
    from ..recipes import FAMILIES, model, names_of_sizes
    from ..weights.hub import HubName, local
    from ..weights.load import read_spec

    sizes = names_of_sizes()
    if name in FAMILIES:
        raise UsageError(f"{name} is a family; its sizes: {', '.join(s for s in sizes if sizes[s] == name)}")
    if name in sizes:
        return model(name), sizes[name], None
    if not Path(name).exists() and HubName.read(name) is None:
        if "/" in name or Path(name).suffix[1:].isalpha():  # meant as a path
            raise UsageError(f"{name}: no such file or folder; and of the published sizes, none is called that")
        raise UsageError(f"unknown model {name!r}{nearest(name, sizes)}")
    from ..inspect.checkpoint import about

    path = local(name, weights=False)
    spec, family = read_spec(path)
    fetched = path == Path(name) or path.suffix == ".gguf"
    told = about(path, spec, getattr(family, "FILE", "model") if fetched else None)
    return spec, family and family.__name__.rsplit(".", 1)[-1], told
