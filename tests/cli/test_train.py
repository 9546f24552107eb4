"""`sublayer train`, on text and on configurations: what is made, what is told, what is left behind."""

from pathlib import Path

import pytest

from sublayer.cli import main as cli
from sublayer.data.tokens import Tokens

QUICK = [
    "steps=2", "batch=2", "data.length=16", "tokenizer.kind=bytes", "model.dim=16", "model.layers=1", "model.heads=2",
    "model.kv_heads=1", "model.hidden=24", "eval.final=100", "eval.sample_tokens=2", "schedule.warmup=1",
]  # fmt: skip


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("notes").mkdir()
    for i in range(20):
        Path(f"notes/n{i}.txt").write_text(f"note {i}: nothing but words, {i} of them or more\n" * 5)
    return Path("notes")


def test_a_folder_of_text_is_trained_on(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "notes", *QUICK]) == 0
    said = capsys.readouterr()
    assert "notes-model/model: " in said.out
    assert "bits per byte on held-out text" in said.out
    assert cli.main(["generate", "notes-model/model", "--prompt", "note", "--max-tokens", "2"]) == 0
    assert "trained on" not in capsys.readouterr().err
    assert cli.main(["generate", "notes-model/model", "--prompt", "note", "--max-tokens", "20"]) == 0
    assert "row 0: up to 25 tokens, of a model trained on 16: it may lose the thread" in capsys.readouterr().err
    assert cli.main(["generate", "notes-model", "--prompt", "note"]) == 1
    assert "its result is notes-model/model" in capsys.readouterr().err


def test_what_a_shell_made_of_a_glob_is_read_as_a_whole(notes: Path) -> None:
    paths = [str(path) for path in sorted(notes.iterdir())]
    assert cli.main(["train", *paths, "out=mine", *QUICK]) == 0
    assert sum(Tokens.open(f"mine/data/{side}").documents for side in ("train", "held")) == 20


@pytest.mark.parametrize(
    ("typed", "code", "said"),
    [
        (["nowhere"], 1, "nowhere"),
        (["notes", "out=notes"], 2, "out: notes is the folder of the text"),
        (["notes", "train.stepz=1"], 2, "train.stepz: unknown key"),
        (["notes", "model.recipe=gtp2"], 2, "unknown family 'gtp2'"),
        (["notes", "model.heads=5"], 2, "heads"),
        (["empty.txt", "tokenizer.kind=bpe"], 1, "empty.txt"),
        (["other.toml"], 2, "other.toml: cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    typed: list[str], code: int, said: str, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").write_text("")
    before = sorted(Path().rglob("*"))
    assert cli.main(["train", typed[0], *QUICK, *typed[1:]]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert sorted(Path().rglob("*")) == before


def test_a_start_that_failed_does_not_stand_in_the_way(notes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    large = ["tokenizer.kind=bpe", "tokenizer.vocab=5000"]
    assert cli.main(["train", "notes", *QUICK, *large]) == 1
    assert "ask for" in capsys.readouterr().err
    assert cli.main(["train", "notes", *QUICK]) == 0


@pytest.mark.parametrize(("start", "said"), [("nope", "nope: no such folder"), ("notes", "notes: neither spec.json")])
def test_a_start_that_is_no_model_is_told_by_its_key(
    start: str, said: str, notes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(Path().rglob("*"))
    assert cli.main(["train", "notes", f"model.start={start}"]) == 2
    assert f"sublayer: model.start: {said}" in capsys.readouterr().err
    assert sorted(Path().rglob("*")) == before
