"""`sublayer export`: what it prints, and how it refuses."""

import json
from pathlib import Path

import pytest

import sublayer
from sublayer.cli import export as module
from sublayer.cli import main as cli
from sublayer.text import Bytes, Characters
from tests.tiny import tiny


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    tokenizer = Bytes(("<|end|>",))
    sublayer.save(tiny(vocab=tokenizer.size).build(), "mine")
    tokenizer.save("mine")
    return "mine"


def test_the_files_and_their_sizes_are_shown(model: str, capsys) -> None:
    assert cli.main(["export", model, "--to", "hf", "--shard-size", "30kB", "--out", "theirs"]) == 0
    said = capsys.readouterr()
    for path in Path("theirs").iterdir():
        assert path.name in said.out
    index = json.loads(Path("theirs/model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    assert said.err == ""


def test_what_stays_as_it_is_is_told(model: str, capsys) -> None:
    sublayer.save(tiny(vocab=257, hidden=40).build(), "narrow")
    assert cli.main(["export", "narrow", "--to", "gguf", "--quantize", "Q8_0", "--out", "x.gguf"]) == 0
    said = capsys.readouterr()
    assert "2 matrices stay F16, as their rows are no multiple of 32: blk.0.ffn_down.weight" in said.err
    assert "no tokenizer there" in said.err
    assert said.out.startswith("x.gguf  ")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["mine", "--to", "gguf", "--out", "mine"], "mine: is what is exported"),
        (["nothing", "--to", "hf", "--out", "x"], "nothing"),
        (["mine", "--to", "hf", "--out", "x", "--shard-size", "5 apples"], "expected a size such as 5GB"),
        (["mine", "--to", "hf", "--out", "x", "--quantize", "q8_0"], "quantize='q8_0': for gguf"),
        (["mine", "--to", "onnx", "--out", "x"], "Invalid value for '--to': 'onnx' is not one of"),
        (["mine", "--to", "gguf", "--out", "x"], "x: a GGUF file is known by its name's end; name it x.gguf"),
        (["mine", "--to", "gguf", "--out", "mine/model.safetensors/x.gguf"], "model.safetensors is a file"),
    ],
)
def test_a_mistake_is_one_line(model: str, given: list[str], said: str, capsys) -> None:
    assert cli.main(["export", *given]) in (1, 2)
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
    assert sorted(path.name for path in Path().iterdir()) == ["mine"]


def test_a_tokenizer_that_the_format_has_not_is_one_line(model: str, capsys) -> None:
    Characters.train(["".join(map(chr, range(32, 200)))], end="<|end|>").save("mine")
    assert cli.main(["export", model, "--to", "gguf", "--out", "x.gguf"]) == 1
    told = capsys.readouterr().err
    assert "mine: GGUF holds" in told
    assert "no table of characters: with a tokenizer of kind bytes or bpe a model can be written" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "size"), [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2GiB", 2 << 30), ("700", 700), ("10kb", 10_000)]
)
def test_sizes_are_read_as_they_are_usually_written(text: str, size: int) -> None:
    assert module._bytes(text) == size
