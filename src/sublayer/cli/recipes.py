"""`sublayer recipes`: the families and their published sizes."""

import json
import shutil
import textwrap
from typing import Annotated

import typer


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with each family's contracts.")] = False,
    page: Annotated[
        bool, typer.Option("--page", help="Print docs/architectures.md: the families side by side.")
    ] = False,
) -> None:
    """List the families of models, their published sizes, and what each is."""
    from .. import recipes

    if page:
        from ..inspect.architectures import table

        typer.echo(table(), nl=False)
        return
    families = {name: recipes.family(name) for name in recipes.FAMILIES}
    if as_json:
        shown = {
            name: {
                "sizes": list(family.SIZES),
                "architectures": list(family.HF),
                "contracts": [contract for contract in recipes.CONTRACTS if contract not in family.EXEMPT],
                "exempt": family.EXEMPT,
            }
            for name, family in families.items()
        }
        typer.echo(json.dumps(shown, ensure_ascii=False))
        return
    width = min(shutil.get_terminal_size().columns, 120)
    for name, family in families.items():
        about = " ".join((family.__doc__ or "").strip().split("\n\n")[0].split())
        typer.echo(textwrap.fill(f"{name}: {about}", width, subsequent_indent="  ", break_on_hyphens=False))
        for label, names in (("sizes", family.SIZES), ("reads", family.HF)):
            if names:
                first, rest = f"  {label}  ", " " * 9
                filled = textwrap.fill(", ".join(names), width - 9, break_on_hyphens=False)
                typer.echo(first + filled.replace("\n", "\n" + rest))
        typer.echo("")
    typer.echo("sublayer show NAME prints one; --set PATH=VALUE changes it.")
