"""`sublayer transcribe`: a recording in, a line out, and mistakes in one line."""

import sys
import wave
from pathlib import Path
from random import Random

import pytest

from sublayer.cli.main import main
from sublayer.cli.terminal import harmless
from sublayer.data.audio import read_audio
from sublayer.decoding import read_speech, transcribe
from sublayer.recipes import whisper
from sublayer.recipes.whisper import TINY
from sublayer.text import Bytes
from sublayer.weights import load, save
from tests.decoding.models import tiny

MARKS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")
SPEC = whisper(**{**TINY, "vocab": 272, "context": 8})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save(tiny(SPEC, sharpness=12.0), folder)  # which answers each recording otherwise
    Bytes(MARKS).save(folder)
    for name in ("a", "b"):
        with wave.open(str(folder / f"{name}.wav"), "wb") as file:
            file.setparams((1, 2, 8000, 0, "NONE", ""))
            file.writeframes(Random(name).randbytes(2000))
    return folder


def test_recordings_are_written_down_in_order(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [folder / "b.wav", folder / "a.wav"]
    texts = transcribe(load(folder), Bytes(MARKS), [*map(read_audio, paths)], read_speech(folder), beams=2)
    assert texts[0] != texts[1]
    assert main(["transcribe", str(folder), *map(str, paths), "--beams", "2"]) == 0
    assert capsys.readouterr().out == f"{paths[0]}\t{texts[0]}\n{paths[1]}\t{texts[1]}\n"
    assert main(["transcribe", str(folder), str(paths[0]), "--beams", "2", "--language", "en"]) == 0
    assert capsys.readouterr().out == f"{texts[0]}\n"


def test_what_a_model_writes_does_not_reach_into_the_terminal(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = folder / "b.wav", SPEC.build(1)
    save(model, tmp_path)
    Bytes(MARKS).save(tmp_path)
    (text,) = transcribe(model, Bytes(MARKS), [read_audio(path)], read_speech(tmp_path))
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["transcribe", str(tmp_path), str(path)]) == 0
    assert capsys.readouterr().out == harmless(text) + "\n" != text + "\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{folder}", "{folder}/c.wav"], 1, "c.wav: cannot be read: No such file"),
        (["{folder}", "{folder}/spec.json"], 1, "spec.json: no recording"),
        (["{folder}", "{folder}/a.wav", "--language", "xx"], 2, "language 'xx' is none"),
        (["{folder}/none", "{folder}/a.wav"], 1, "none: no such folder"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], code: int, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["transcribe", *(part.format(folder=folder) for part in arguments)]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
