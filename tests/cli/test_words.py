"""`sublayer words`: what it writes and prints, and the line for each mistake."""

from collections.abc import Callable
from pathlib import Path

import pytest

from sublayer.cli import main as cli


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple]:
    """run("text", "--out", "v") → exit code, stdout, stderr, in a folder with text."""
    monkeypatch.chdir(tmp_path)
    Path("text").mkdir()
    Path("text/a.txt").write_text("the king rules the land and the queen rules the land\n" * 20)
    Path("text/b.txt").write_text("the fish swims in the sea\n" * 20)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["words", *arguments])
        said = capsys.readouterr()
        return code, said.out, said.err

    return call


@pytest.mark.parametrize("method", ["skipgram", "glove"])
def test_trains_and_shows_neighbours_and_analogies(run, method: str) -> None:
    code, out, err = run("text", "--out", "v", "--method", method, "--dim", "8", "--epochs", "2", "--vocab", "9")
    assert code == 0
    assert out.startswith(f"v: 9 words, 8 wide, {method}, in ")
    assert err.startswith("320 words, 9 distinct\n")
    assert "epoch 2 of 2: loss " in err
    code, out, _ = run("v", "--near", "king", "--near", "sea", "--top", "3")
    assert code == 0
    assert [line[:1] for line in out.splitlines()] == ["k", " ", " ", " ", "s", " ", " ", " "]
    code, out, _ = run("v", "--analogy", "king queen land", "--top", "1")
    assert out.startswith("king : queen = land : …\n  ")


def test_searches_documents_by_tfidf_beside_the_vectors(run) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    assert run("text", "--out", "v", "--dim", "8")[0] == 0
    code, out, _ = run("text", "--search", "fish sea", "--vectors", "v", "--top", "1")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "fish sea (TF-IDF)"
    assert lines[2] == "fish sea (vectors)"
    assert all(line.endswith("text/b.txt") for line in lines[1::2])


def test_mistakes_are_told_in_one_line(run) -> None:
    assert run("text", "--out", "v", "--dim", "4")[0] == 0
    for arguments, message, code in (
        (("text",), "say one thing to do", 2),
        (("text", "--out", "v"), "there are vectors already", 2),
        (("v", "--near", "kinq"), "did you mean 'king'", 2),
        (("v", "--analogy", "king queen"), "three words", 2),
        (("text", "--near", "king"), "no word vectors", 1),
        (("text", "v", "--near", "king"), "one folder", 2),
        (("text", "--out", "w", "--least", "1000"), "need more text", 1),
        (("v", "--near", "king", "--top", "0"), "--top 0", 2),
        (("nowhere", "--out", "w"), "nowhere", 1),
    ):
        found, out, err = run(*arguments)
        assert (found, out) == (code, "")
        assert message in err
        assert err.count("\n") == 1
