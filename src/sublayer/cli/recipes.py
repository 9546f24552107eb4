"""`sublayer recipes`: the families and their published sizes."""

import json
from typing import Annotated

import typer


def command(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with each family's contracts.")] = False,
) -> None:
    """List the families of models, their published sizes, and what each is."""
    from .. import recipes

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
    for name, family in families.items():
        typer.echo(f"{name}: {(family.__doc__ or '').strip().splitlines()[0]}")
        typer.echo(f"  sizes  {', '.join(family.SIZES)}")
        typer.echo(f"  reads  {', '.join(family.HF)}\n")
    typer.echo("sublayer show NAME prints one; --set PATH=VALUE changes it.")
