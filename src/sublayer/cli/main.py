"""The command `sublayer`: finds the subcommand, and turns a user's mistake into one line and an exit code.

Nothing of a subcommand is imported before it is called: `sublayer --help` must not wait for torch.
"""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup
from typer.exceptions import TyperException

from .. import __version__
from ..errors import SublayerError
from .terminal import complain, note


class Entry(NamedTuple):
    module: str  # holds a function `command`, whose annotations typer turns into arguments and options; or more, `app`
    help: str  # its line in `sublayer --help`; its own `--help` shows the function's docstring


COMMANDS = {
    "quickstart": Entry("sublayer.cli.quickstart", "Build a small model, train it, generate, and look inside."),
    "recipes": Entry("sublayer.cli.recipes", "List the families of models and their sizes."),
    "show": Entry("sublayer.cli.show", "Print an architecture: its parts, parameters, and bytes of state."),
    "train": Entry("sublayer.cli.train", "Train a model: text in, a folder with a model out."),
    "tokenizer": Entry("sublayer.cli.tokenizer", "Train a tokenizer, use it, compare it with others."),
    "eval": Entry("sublayer.cli.eval", "Score text with a model: bits per byte."),
    "generate": Entry("sublayer.cli.generate", "Continue a text with a model."),
    "export": Entry("sublayer.cli.export", "Write a model for transformers or llama.cpp."),
    "translate": Entry("sublayer.cli.translate", "Translate sentences with an encoder-decoder."),
    "transcribe": Entry("sublayer.cli.transcribe", "Write down what is said in recordings."),
    "embed": Entry("sublayer.cli.embed", "Vectors of texts; the texts nearest to one."),
    "words": Entry("sublayer.cli.words", "Train vectors of words; neighbours, analogies, search."),
    "chat": Entry("sublayer.cli.chat", "Talk with a model, or write a text together with one."),
}

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, context_settings=HELP)


def main(args: Sequence[str] | None = None) -> int:
    """Runs `sublayer` with args (default: those of the process) and returns the exit code.

    0: done. 1: the job failed. 2: the request could not be meant. 130: interrupted. A mistake is told in one line;
    `--debug`, before the subcommand, shows the traceback too. An error that is a fault of ours is not caught.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us has closed it
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    with warnings.catch_warnings():
        warnings.showwarning = _note
        try:
            return typer.main.get_command(app).main(args, prog_name="sublayer", standalone_mode=False) or 0
        except TyperException as error:
            return _complain(error.format_message().replace("Value error, ", ""), error.exit_code)


class Commands(TyperGroup):
    """A group that knows its subcommands by their line of help, and imports only the one that is called."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, entry in COMMANDS.items():
            self.add_command(TyperCommand(name, help=entry.help))

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str | None, Any, list[str]]:
        name, _, rest = super().resolve_command(ctx, args)
        return name, _load(str(name)), rest

    def invoke(self, ctx: typer.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (SublayerError, OSError) as error:
            if isinstance(error, OSError) and error.filename is None and error.errno != errno.ENOSPC:
                raise  # a closed pipe, which typer ends quietly, or a fault of ours
            if ctx.params["debug"]:
                traceback.print_exc()
            raise typer.Exit(_complain(*_told(error))) from error
        except UnicodeEncodeError as error:
            if error.encoding.startswith("utf"):
                raise  # a fault of ours
            told = f"stdout takes {error.encoding}, which has no {error.object[error.start]!r}"
            raise typer.Exit(_complain(f"{told}: set PYTHONIOENCODING=utf-8", 1)) from error
        except KeyboardInterrupt:
            raise typer.Exit(_complain("interrupted", 130)) from None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"sublayer {__version__}")
        raise typer.Exit()


@app.callback(cls=Commands, no_args_is_help=True)
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error too.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Every architecture is data: build models from parts, run them, and see what they do."""


def _load(name: str) -> Any:
    module = import_module(COMMANDS[name].module)
    if (several := getattr(module, "app", None)) is not None:
        return typer.main.get_command(several)
    single = typer.Typer(add_completion=False, context_settings=HELP)
    single.command(name)(module.command)
    return typer.main.get_command(single)


def _told(error: SublayerError | OSError) -> tuple[str, int]:
    if isinstance(error, SublayerError):
        return str(error), error.exit_code
    return f"{error.filename or 'stdout'}: {error.strerror}", 1


def _note(message: Warning | str, category: type[Warning], *where: object, **more: object) -> None:
    """A warning as one line, without the place in the code, which says nothing to a user."""
    note(" ".join(str(message).split()))


def _complain(message: str, code: int) -> int:
    if message:  # it is empty where typer has answered with the help
        complain(" ".join(message.split()))
    return code
