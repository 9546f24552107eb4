import json
import shutil
from pathlib import Path

import pytest
import torch

import sublayer
from sublayer.cli import progress
from sublayer.cli.main import main
from sublayer.eval import Texts, score
from sublayer.recipes import bert, llama
from sublayer.text import Bytes, Characters

END = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    sublayer.save(llama(32, 1, 4, 2, hidden=64, vocab=257).build(), folder)
    Bytes(("<|end|>",)).save(folder)
    return folder


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str, str]:
        code, (out, err) = main(["eval", *map(str, arguments)]), capsys.readouterr()
        return code, out, err

    return call


def test_files_of_all_kinds_are_scored_and_told_in_json(folder: Path, run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Größe ist keine Sache der Länge.")
    (tmp_path / "b.jsonl").write_text('{"said": "one"}\n{"said": "two of them"}\n')
    options = ("--field", "said", "--length", 8, "--stride", 2, "--dtype", "float64", "--json")
    code, out, _ = run(folder, "--text", tmp_path / "a.txt", "--text", tmp_path / "b.jsonl", *options)
    shown = json.loads(out)
    texts = Texts.encode(["Größe ist keine Sache der Länge.", "one", "two of them"], Bytes(("<|end|>",)), END)
    expected = score(sublayer.load(folder).double(), texts, length=8, stride=2)
    assert code == 0
    assert shown.pop("seconds") > 0
    assert shown.pop("perplexity") == pytest.approx(expected.perplexity)
    assert shown == {
        "model": str(folder), "bits_per_byte": expected.bits_per_byte, "bits_per_token": expected.bits,
        "nats": expected.nats, "documents": 3, "bytes": 49, "tokens": 49, "begin": END, "length": 8, "stride": 2,
        "dtype": "float64",
    }  # fmt: skip


def test_figures_go_to_stdout_and_speed_to_stderr(folder: Path, run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    code, out, err = run(folder, "--text", tmp_path, "--length", 6)
    assert code == 0
    assert out.startswith(
        "documents       1, each behind token 256\nbytes           9\ntokens          9, 1.00 bytes each\n"
    )
    assert "windows         6 tokens every 3\nbits per byte   " in out
    assert err.endswith(" tokens/s\n")


def test_bytes_that_are_no_text_are_refused_or_read_as_asked(folder: Path, run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("größer".encode("latin-1"))
    asked = ("--text", tmp_path / "a.txt", "--length", 8)
    code, _, err = run(folder, *asked)
    assert code == 1
    assert 'a.txt: byte 0xF6 at offset 2 is not UTF-8 (invalid start byte); bad_bytes="replace" reads it' in err
    code, out, _ = run(folder, *asked, "--bad-bytes", "replace")
    assert code == 0
    assert "bytes           10\n" in out  # four letters, and three for each of the two


def test_another_model_is_compared_with(folder: Path, run, tmp_path: Path) -> None:
    """A head of three times the weights: the distribution is known from the first one's logits."""
    model = sublayer.load(folder)
    model.get_parameter("head.weight").data.mul_(3)
    sublayer.save(model, tmp_path / "sharp")
    Bytes(("<|end|>",)).save(tmp_path / "sharp")
    (tmp_path / "a.txt").write_text("some text")
    options = ("--text", tmp_path / "a.txt", "--length", 16)
    code, out, _ = run(folder, *options, "--against", tmp_path / "sharp", "--json")
    found = json.loads(out)
    ids = torch.tensor([[END, *b"some text"]])
    with torch.no_grad():
        logits = sublayer.load(folder)(ids)[0, :-1].double()
    mine, other = logits.log_softmax(-1), (3 * logits).log_softmax(-1)
    assert code == 0
    assert found["bits_per_byte"] == pytest.approx(json.loads(run(folder, *options, "--json")[1])["bits_per_byte"])
    assert found["against"] == {
        "model": str(tmp_path / "sharp"), "agreement": 1.0,
        "divergence": pytest.approx(float((other.exp() * (other - mine)).sum(-1).mean()), rel=1e-5),
        "bits_per_byte": pytest.approx(json.loads(run(tmp_path / "sharp", *options, "--json")[1])["bits_per_byte"]),
    }  # fmt: skip
    assert f"against         {tmp_path / 'sharp'}, " in run(folder, *options, "--against", tmp_path / "sharp")[1]


def test_models_of_other_tokens_are_not_compared(folder: Path, run, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ab")
    shutil.copytree(folder, tmp_path / "other")
    Characters("ba").save(tmp_path / "other")
    code, out, err = run(folder, "--text", tmp_path / "a.txt", "--length", 4, "--against", tmp_path / "other")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{tmp_path / 'other'}: its tokens of this text are not those of {folder}" in err
    sublayer.save(llama(32, 1, 4, 2, hidden=64, vocab=300).build(), tmp_path / "wider")
    Bytes(("<|end|>",)).save(tmp_path / "wider")
    code, _, err = run(folder, "--text", tmp_path / "a.txt", "--length", 4, "--against", tmp_path / "wider")
    assert (code, err.count("\n")) == (2, 1)
    assert "the model has 257 ids, the other 300" in err


def test_long_jobs_tell_how_far_they_have_come(
    folder: Path, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)
    (tmp_path / "a.txt").write_text("some text")
    err = run(folder, "--text", tmp_path, "--length", 6)[2]
    assert "reading text: 9 B of 9 B, " in err
    assert "tokens scored: 9 of 9, " in err


@pytest.mark.parametrize(
    ("options", "code", "told"),
    [
        ((), 2, "nothing says how long a text it was trained on: give --length"),
        (("--length", 4, "--stride", 5), 2, "--stride 5: windows of 4 tokens would leave some out"),
        (("--length", 4, "--device", "nowhere"), 2, "device 'nowhere' cannot be used"),
    ],
)
def test_what_cannot_be_meant_is_told_in_one_line(folder: Path, run, options, code: int, told: str) -> None:
    found, out, err = run(folder, "--text", folder / "spec.json", *options)
    assert (found, out) == (code, "")
    assert told in err
    assert err.count("\n") == 1


def test_a_model_without_a_head_over_tokens_is_refused_before_anything_is_read(run, tmp_path: Path) -> None:
    sublayer.save(bert(32, 1, 4, vocab=257).build(), tmp_path)
    code, _, err = run(tmp_path, "--text", tmp_path / "none.txt")
    assert code == 2
    assert f"{tmp_path}: an encoder sees a text from both sides" in err
    code, _, err = run(tmp_path / "none", "--text", tmp_path / "none.txt")
    assert code == 1
    assert "no such folder" in err
