"""`sublayer train`: a run from its configuration, or on whatever text is named."""

from pathlib import Path
from typing import Annotated

import typer

PLAIN = Path(__file__).with_name("quickstart.toml")


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's .toml; or a file, folder or glob of text.")],
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Changes, such as train.steps=500 out=mine.")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Begin anew; what stands in the run's folder is moved aside.")
    ] = False,
) -> None:
    """Train a model: `sublayer train runs/NAME.toml key=value…`, or `sublayer train FOLDER` on your own text.

    For text, the quickstart's configuration is used, and out is the text's name with -model behind it. The same command
    goes on with a run that was interrupted.
    """
    from ..train import read_run, train
    from ..train.view import live

    typed = changes or []
    if run.endswith(".toml"):
        settled = read_run(Path(run), typed)
    else:  # a shell may have made several paths of a glob
        paths = [run, *(one for one in typed if "=" not in one and Path(one).exists())]
        typed = [one for one in typed if one not in paths]
        settled = read_run(PLAIN, [*_on_text(paths, typed), *typed])
    with live() as view:
        result = train(settled, view, restart=restart)
    typer.echo(f"{result.folder}: {result.score.described(settled.objective.unit, settled.objective.answer)}")
    if settled.objective.kind == "next_token":
        typer.echo(f"next: sublayer generate {result.folder} --prompt …, sublayer chat {result.folder}", err=True)
    elif settled.objective.kind == "text_to_text":
        typer.echo(f"next: sublayer translate {result.folder} --input FILE", err=True)


def _on_text(paths: list[str], changes: list[str]) -> list[str]:
    """What differs from the quickstart's configuration for text of one's own."""
    import json

    name = Path(paths[0]).resolve().name.split(".")[0].strip("*?[]") or "text"
    given = [f"data.paths={json.dumps(paths, ensure_ascii=False)}", 'eval.sample=""']
    out = json.dumps(f"{name}-model", ensure_ascii=False)
    return given if any(change.startswith("out=") for change in changes) else [*given, f"out={out}"]
