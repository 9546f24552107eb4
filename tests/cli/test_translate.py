"""`sublayer translate`: a line in, a line out, and mistakes in one line."""

import io
import sys
from pathlib import Path
from typing import Any

import pytest

from sublayer.cli.main import main
from sublayer.cli.terminal import harmless
from sublayer.decoding import translate
from sublayer.recipes import gpt2, transformer
from sublayer.text import Bytes
from sublayer.weights import load, save
from tests.decoding.models import tiny

LINES = ["the second is longer than the first", "", "so", "last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, tokenizer = tmp_path_factory.mktemp("model"), Bytes(("<|end|>",))
    save(tiny(transformer(16, 1, 2, 24, vocab=tokenizer.size), sharpness=3.0), folder)
    tokenizer.save(folder)
    return folder


def expected(folder: Path, **options: Any) -> str:
    made = translate(load(folder), Bytes(("<|end|>",)), LINES, **options)
    return "".join(f"{' '.join(line.splitlines())}\n" for line in made)


def test_lines_of_a_file_are_translated_in_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(LINES) + "\n")
    assert main(["translate", str(folder), "--input", str(path)]) == 0
    said = capsys.readouterr()
    assert said.out == expected(folder)
    assert len({*said.out.split("\n")}) == len(LINES)
    path.write_bytes("\r\n".join(LINES).encode())  # as Windows has it
    assert main(["translate", str(folder), "--input", str(path)]) == 0
    assert capsys.readouterr().out == said.out
    assert said.err == ""


def test_what_a_model_writes_does_not_reach_into_the_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["translate", str(folder), "--input", str(tmp_path / "lines.txt")]) == 0
    assert capsys.readouterr().out == harmless(expected(folder)) != expected(folder)


def test_stdin_and_options(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("\n".join(LINES).encode())))
    assert main(["translate", str(folder), "--beams", "2", "--length-penalty", "1.5", "--prefix", "de: "]) == 0
    assert capsys.readouterr().out == expected(folder, beams=2, length_penalty=1.5, prefix="de: ")


@pytest.mark.parametrize(
    ("arguments", "data", "code", "said"),
    [
        ([], b" \n\n", 1, "nothing to translate"),
        ([], b"so\nc\xff", 1, "byte 0xFF at offset 4 is not UTF-8"),
        (["--start", "<pad>"], b"so", 2, "no special token '<pad>'"),
        (["--beams", "0"], b"so", 2, "beams"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], data: bytes, code: int, said: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    path = tmp_path / "lines.txt"
    path.write_bytes(data)
    assert main(["translate", str(folder), "--input", str(path), *arguments]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_other_folders_are_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("so\n")
    assert main(["translate", str(tmp_path), "--input", str(path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    save(gpt2(16, 1, 2, vocab=257, context=64).build(), tmp_path / "gpt2")
    Bytes(("<|end|>",)).save(tmp_path / "gpt2")
    assert main(["translate", str(tmp_path / "gpt2"), "--input", str(path)]) == 2
    assert "no encoder" in capsys.readouterr().err
    assert main(["translate", str(folder), "--input", str(tmp_path / "none")]) == 1
    assert "none: No such file" in capsys.readouterr().err
