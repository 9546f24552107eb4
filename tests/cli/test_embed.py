"""`sublayer embed`: vectors in a file or as JSON, and the lines nearest to a text."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from sublayer.cli.main import main
from sublayer.decoding import embed
from sublayer.nn.head import Pooled
from sublayer.recipes import bert
from sublayer.recipes.bert import TINY
from sublayer.text import Bytes
from sublayer.weights import load, save

LINES = ["the second is longer than the first", "so", "so", "a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(bert(**{**TINY, "vocab": 257, "head": Pooled("mean")}).build(1), folder)
    Bytes(("<|end|>",)).save(folder)
    (folder / "lines.txt").write_text("\n".join(LINES) + "\n")
    return folder


def test_vectors_of_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = embed(load(folder), Bytes(("<|end|>",)), LINES)
    arguments = ["embed", str(folder), "--input", str(folder / "lines.txt")]
    assert main([*arguments, "--out", str(tmp_path / "vectors.npy")]) == 0
    assert capsys.readouterr().out == ""
    torch.testing.assert_close(torch.from_numpy(np.load(tmp_path / "vectors.npy")), expected)
    assert main(arguments) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    torch.testing.assert_close(torch.tensor(printed), expected, rtol=0, atol=1e-6)


def test_lines_near_a_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(folder), "--input", str(folder / "lines.txt"), "--near", "so", "--top", "3"]) == 0
    found = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [line for _, line in found[:2]] == ["so", "so"]
    vectors = torch.nn.functional.normalize(embed(load(folder), Bytes(("<|end|>",)), LINES), dim=1)
    cosines = sorted((vectors @ vectors[1]).tolist(), reverse=True)
    assert [value for value, _ in found] == [f"{value:.3f}" for value in cosines[:3]]


@pytest.mark.parametrize(
    ("data", "arguments", "code", "said"),
    [(b" \n", [], 1, "nothing to embed"), (b"a\xff", [], 1, "byte 0xFF at offset 1"), (b"a", ["--top", "0"], 2, "top")],
)
def test_a_mistake_is_one_line(
    data: bytes, arguments: list[str], code: int, said: str, folder: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "lines.txt").write_bytes(data)
    assert main(["embed", str(folder), "--input", str(tmp_path / "lines.txt"), *arguments]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
