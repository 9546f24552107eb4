"""`sublayer show`: an architecture as a tree, with exact sizes; no weights are needed."""

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[str, typer.Argument(help="A published size (see `sublayer recipes`), or a model folder.")],
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="PATH=VALUE", help="Change the spec, e.g. decoder.blocks.*.attn.op.window=512."),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Rows of the decoding state whose size is shown.")] = 1,
    length: Annotated[
        int | None, typer.Option(min=1, help="Tokens a row of that state holds; 8192, or the context if shorter.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: sizes and the whole spec.")] = False,
) -> None:
    """Print an architecture as a tree, its parameters, and the bytes that decoding keeps for each token."""
    from ..errors import UsageError
    from ..inspect.count import cost, readable, readable_bytes, windowed_bytes

    spec, family = _find(name)
    spec = spec.override(*overrides or [])
    sizes, longest, active = cost(spec), spec.context, spec.active_parameters()
    if longest is not None and (length or 0) > longest:
        raise UsageError(f"--length {length}: {name} has {longest} positions")
    length = length or min(8192, longest or 8192)
    if as_json:
        shown = {
            "name": name,
            "family": family,
            "parameters": sizes.parameters,
            "active_parameters": active,
            "parameters_by_part": sizes.parts,
            "state_bytes_per_token": sizes.state_bytes_per_token,
            "state_bytes_per_slot": sizes.state_bytes_per_slot,
            "state_bytes_per_memory": sizes.state_bytes_per_memory,
            "state_dtype": "bfloat16",
            "spec": spec.to_json(),
        }
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    typer.echo(spec.tree())
    typer.echo(f"\nparameters  {sizes.parameters:,} ({readable(sizes.parameters)})")
    if active != sizes.parameters:
        typer.echo(f"active      {active:,} ({readable(active)}): what a token goes through")
    wide = max(14, *(len(part) + 2 for part in sizes.parts))
    for part, count in sizes.parts.items():
        typer.echo(f"  {part:<{wide}}{count:>18,}  {count / sizes.parameters:6.1%}")
    for size in (2, 4):
        typer.echo(f"weights in {size}-byte elements  {readable_bytes(size * sizes.parameters)}")
    if not (sizes.state_bytes_per_token or sizes.state_bytes_per_slot or sizes.state_bytes_per_memory):
        typer.echo("\nstate  none: it answers all at once")
        return
    typer.echo("\nstate, in 2-byte elements")
    typer.echo(f"  a token     {readable_bytes(sizes.state_bytes_per_token)}")
    if sizes.state_bytes_per_slot:
        typer.echo(f"  a row       {readable_bytes(sizes.state_bytes_per_slot)}, whatever its length")
    if sizes.state_bytes_per_memory:
        typer.echo(f"  a vector of memory  {readable_bytes(sizes.state_bytes_per_memory)}")
    rows = f"{batch} row" + ("s" if batch > 1 else "")
    whole, needed = sizes.state_bytes(batch, length), windowed_bytes(spec, batch, length)
    typer.echo(f"  {rows} of {length:,} tokens  {readable_bytes(whole)}")
    if needed < whole:
        typer.echo(f"  of which its windows need  {readable_bytes(needed)} (all of it is kept for now)")


def _find(name: str):
    """(spec, family) of a published size or a folder."""
    from ..errors import UsageError, nearest
    from ..recipes import FAMILIES, model, names_of_sizes
    from ..weights.hub import HubName
    from ..weights.load import read_spec

    sizes = names_of_sizes()
    if name in FAMILIES:
        raise UsageError(f"{name} is a family; its sizes: {', '.join(s for s in sizes if sizes[s] == name)}")
    if name in sizes:
        return model(name), sizes[name]
    if not Path(name).exists() and HubName.read(name) is None:
        raise UsageError(f"unknown model {name!r}{nearest(name, sizes)}")
    spec, family = read_spec(Path(name))
    return spec, family and family.__name__.rsplit(".", 1)[-1]
