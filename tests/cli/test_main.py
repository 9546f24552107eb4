import io
import subprocess
import sys
from types import SimpleNamespace
from typing import Annotated

import pytest
import typer

from sublayer import __version__
from sublayer.cli.main import COMMANDS, Entry, main
from sublayer.errors import InputError, UsageError


def greet(name: str, times: Annotated[int, typer.Option(help="How often.")] = 1) -> None:
    """Greets somebody."""
    print(f"hello {name} " * times)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs `sublayer probe` with a function as its command: run(function, *arguments) → exit code, stdout, stderr."""

    def call(function, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setitem(COMMANDS, "probe", Entry("a_module_for_this_test", "A line of help."))
        monkeypatch.setitem(sys.modules, "a_module_for_this_test", SimpleNamespace(command=function))
        return main(arguments), *capsys.readouterr()

    return call


def raising(error: BaseException):
    def command() -> None:
        raise error

    return command


def test_a_subcommand_gets_its_arguments(run) -> None:
    assert run(greet, "probe", "you", "--times", "2") == (0, "hello you hello you \n", "")


def test_help_lists_every_subcommand_with_its_line(run) -> None:
    code, out, _ = run(greet, "--help")
    assert code == 0
    for name, entry in COMMANDS.items():
        assert any(name in line and entry.help[:30] in line for line in out.splitlines())


def test_help_of_a_subcommand_is_its_docstring(run) -> None:
    code, out, _ = run(greet, "probe", "--help")
    assert code == 0
    assert "Greets somebody." in out
    assert "How often." in out


def test_help_imports_neither_a_subcommand_nor_torch() -> None:
    program = "import sys; from sublayer.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported = set(done.stdout.split())
    assert "sublayer.cli.main" in imported
    assert not imported & {"torch", *(entry.module for entry in COMMANDS.values())}


def test_without_arguments_it_shows_the_help_and_is_wrong_usage(run) -> None:
    code, out, err = run(greet)
    assert (code, err) == (2, "")
    assert "probe" in out


def test_version(run) -> None:
    assert run(greet, "--version") == (0, f"sublayer {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["prob"], "sublayer: No such command 'prob'. Did you mean 'probe'?"),
        (["probe", "you", "--time", "2"], "sublayer: No such option: --time (Possible options: --times)"),
        (["probe"], "sublayer: Missing argument 'name'."),
        (["--debug"], "sublayer: Missing command."),
    ],
)
def test_wrong_usage_is_told_in_one_line(run, arguments, line) -> None:
    assert run(greet, *arguments) == (2, "", line + "\n")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (InputError("ids.txt, line 3:\n  'x' is no number"), 1, "sublayer: ids.txt, line 3: 'x' is no number"),
        (
            UsageError("no recipe 'lama' (did you mean 'llama'?)"),
            2,
            "sublayer: no recipe 'lama' (did you mean 'llama'?)",
        ),
        (FileNotFoundError(2, "No such file or directory", "a.json"), 1, "sublayer: a.json: No such file or directory"),
        (KeyboardInterrupt(), 130, "sublayer: interrupted"),
    ],
)
def test_an_error_of_a_subcommand_is_told_in_one_line(run, error, code, line) -> None:
    assert run(raising(error), "probe") == (code, "", line + "\n")


def test_debug_shows_the_traceback_before_the_line(run) -> None:
    code, _, err = run(raising(InputError("wrong")), "--debug", "probe")
    assert code == 1
    assert err.startswith("Traceback")
    assert err.endswith("sublayer: wrong\n")


@pytest.mark.parametrize("error", [ZeroDivisionError("ours"), OSError("ours")])
def test_a_fault_of_ours_is_not_hidden(run, error) -> None:
    with pytest.raises(type(error), match="ours"):
        run(raising(error), "probe")


def test_what_stdout_cannot_write_is_told_in_one_line(run, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    code, _, err = run(lambda: typer.echo("a → b"), "probe")
    line = "stdout takes latin-1, which has no '→': set PYTHONIOENCODING=utf-8"
    assert (code, err) == (1, f"sublayer: {line}\n")
    with pytest.raises(UnicodeEncodeError):
        run(raising(UnicodeEncodeError("utf-8", "\ud800", 0, 1, "ours")), "probe")


def test_streams_may_be_closed(run, monkeypatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    seen: list[object] = []
    code, *_ = run(
        lambda: seen.append((sys.stdin.isatty(), sys.stdin.read(), typer.echo("a"), sys.stderr.isatty())), "probe"
    )
    assert (code, len(seen)) == (0, 1)


def test_python_m_sublayer_is_the_command() -> None:
    command = [sys.executable, "-m", "sublayer", "--versio"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sublayer: No such option: --versio (Possible options: --version)\n"
