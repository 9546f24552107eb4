"""`sublayer quickstart`: the whole way from text that every machine has to a model that writes, and a page on it."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ..inspect.run import Judged
    from ..train import Run

CONFIG = Path(__file__).with_name("quickstart.toml")
TEXT = (657, 11_793_218)  # documents and bytes of the standard library of the Python that `EXPECTED` was found on
EXPECTED, WITHIN = 1.669, 0.05  # bits per byte
TITLE = "From raw text to a model that writes"
LINE = "    def __init__(self, name, value=None):"


def command(
    changes: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]…", help="Changes, such as out=elsewhere seed=1.")
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew; the former run is moved aside.")] = False,
) -> None:
    """Train a tokenizer and a small Llama-type model on Python's own library, judge the model, and show it all.

    It takes three to six minutes on two cores. Stopped, the same command goes on; finished, it says what it came to.
    """
    from ..inspect.report import write_report
    from ..inspect.run import a_line, judge, report
    from ..train import read_run, train
    from ..train.view import live

    run, plain = read_run(CONFIG, changes or []), read_run(CONFIG)
    typed = shlex.join(["sublayer", "quickstart", *(changes or [])])
    page = Path(run.out) / "report.html"
    with live() as view:
        result = train(run, view, restart=restart)
        judged = judge(run, result, view.note)
        view.note(f"writing {page}")
        line = LINE if run.data == plain.data else a_line(run)
        write_report(page, report(run, result, judged, title=TITLE, line=line, command=typed))
    typer.echo(f"\nbits per byte of text not trained on: {_table(judged)}")
    met = _verdict(run, judged, changed=run.replace(out=plain.out) != plain)
    typer.echo(f"report: {page}\n\nnext, on your own text:   sublayer train path/to/folder")
    typer.echo("and a real checkpoint:    sublayer generate path/to/SmolLM2-135M --prompt 'def '")
    if not met:
        raise typer.Exit(1)


def _table(judged: "Judged") -> str:
    return f"this model {judged.model:.3f}, 5-gram {judged.ngram:.3f}, xz -9 {judged.xz:.3f}"


def _verdict(run: "Run", judged: "Judged", *, changed: bool) -> bool:
    """Says whether the result is what it should be; of a run that was changed nothing is asked."""
    from ..inspect.run import sides

    tokens = sides(run)
    text = (sum(t.documents for t in tokens), sum(t.bytes for t in tokens))
    beaten = judged.model < judged.ngram
    if changed:
        typer.echo(f"the run was changed, so nothing is asked of it; the 5-gram is {'' if beaten else 'not '}beaten")
        return True
    if text == TEXT:
        met = abs(judged.model - EXPECTED) <= WITHIN
        typer.echo(f"expected {EXPECTED} ± {WITHIN}: {'met' if met else 'NOT met'}")
        return met
    why = "the library of this Python is another text than the one that was measured"
    typer.echo(f"{why}: all that is asked is to beat the 5-gram: {'done' if beaten else 'NOT done'}")
    return beaten
