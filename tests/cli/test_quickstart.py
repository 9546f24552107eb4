"""`sublayer quickstart`, a few steps of it, on a text of a few files."""

from pathlib import Path

import pytest

from sublayer.cli import main as cli
from sublayer.cli import quickstart
from sublayer.inspect.run import Judged, sides
from sublayer.train import read_run

QUICK = [
    "tokens=2_000",
    "eval.every=5",
    "eval.final=500",
    "eval.sample_tokens=4",
    "tokenizer.vocab=280",
    "data.length=64",
]


def text(folder: Path) -> Path:
    (folder / "text").mkdir()
    for i in range(30):
        (folder / "text" / f"{i}.py").write_text(f"def add_{i}(first, second):\n    return first + {i} * second\n" * 9)
    return folder / "text"


@pytest.mark.filterwarnings("ignore:Glyph")
def test_it_trains_judges_and_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["quickstart", f"data.paths={text(tmp_path)}", *QUICK]
    assert cli.main(command) == 0
    said = capsys.readouterr().out
    for word in ("tokenizer: 280 ids", "held out", "this model", "5-gram", "xz -9", "the run was changed", "next"):
        assert word in said
    page = (tmp_path / "quickstart" / "report.html").read_text()
    assert "343.6 GB" in page
    assert "42.9 GB" in page
    assert {path.name for path in (tmp_path / "quickstart").glob("*.png")} == {"attention.png", "bits.png", "loss.png"}
    assert cli.main(["generate", "quickstart/model", "--prompt", "def ", "--max-tokens", "3"]) == 0
    capsys.readouterr()
    assert cli.main(command) == 0
    assert "finished already, at step" in capsys.readouterr().out


def test_what_is_asked_depends_on_the_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The known text: the expected bits, within ±0.05. Another: no more than the 5-gram. A changed run: nothing."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["quickstart", f"data.paths={text(tmp_path)}", *QUICK]) == 0
    run = read_run(quickstart.CONFIG, ["out=quickstart"])
    tokens = sides(run)

    def verdict(model: float, *, changed: bool = False) -> bool:
        return quickstart._verdict(run, Judged(model, 2.0, 1.7, 1.4), changed=changed)

    assert [verdict(1.9), verdict(2.1), verdict(2.1, changed=True)] == [True, False, True]
    known = (sum(t.documents for t in tokens), sum(t.bytes for t in tokens))
    monkeypatch.setattr(quickstart, "TEXT", known)
    expected = quickstart.EXPECTED
    assert [verdict(expected + d) for d in (-0.06, -0.04, 0.04, 0.06)] == [False, True, True, False]
    assert "expected" in capsys.readouterr().out
