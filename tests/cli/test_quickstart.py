"""`sublayer quickstart`, a few steps of it."""

from pathlib import Path

import pytest

from sublayer.cli import main as cli
from sublayer.cli import quickstart


def test_it_trains_saves_reloads_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sublayer.data.corpus.standard_library", lambda: ["import os\n" * 30, "x = 1\n" * 40] * 20)
    assert cli.main(["quickstart", "--steps", "3"]) == 0
    said = capsys.readouterr().out
    for word in ("corpus", "parameters", "step 3/3", "held out", "saved", "It continues 'def '", "next:"):
        assert word in said
    assert {path.name for path in quickstart.OWN.iterdir()} == {"spec.json", "model.safetensors", "tokenizer.json"}
    assert cli.main(["generate", str(quickstart.OWN), "--prompt", "import ", "--max-tokens", "3"]) == 0
    assert cli.main(["quickstart", "--steps", "1"]) == 0  # its own folder may be written again


@pytest.mark.parametrize("out", ["taken", "file/inside"])
def test_a_folder_that_cannot_be_used_is_told_before_training(
    out: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "file").write_text("")
    assert cli.main(["quickstart", "--out", str(tmp_path / out)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
