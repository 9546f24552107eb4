"""`sublayer show`: what it prints of sizes, contexts and windows."""

import json

import pytest

from sublayer.cli import main as cli


def shown(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert cli.main(["show", *args]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_json_has_exact_sizes_and_the_whole_spec(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "gpt2-124m", "--json"))
    assert (found["parameters"], found["state_bytes_per_token"]) == (124_439_808, 36 * 1024)
    assert sum(found["parameters_by_part"].values()) == found["parameters"]
    assert found["spec"]["spec"] == "Model"


def test_a_row_is_no_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1 row of 1,024 tokens  36 MiB" in shown(capsys, "gpt2-124m")
    assert "has 1024 positions" in shown(capsys, "gpt2-124m", "--length", "2048", code=2)


def test_a_window_shows_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "llama3-8b", "--set", "decoder.blocks.*.attn.op.window=512", "--batch", "2")
    assert "2 rows of 8,192 tokens  2 GiB" in said
    assert "of which its windows need  128 MiB" in said
    assert "windows" not in shown(capsys, "llama3-8b")


def test_a_family_lists_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpt2 is a family; its sizes: gpt2-124m," in shown(capsys, "gpt2", code=2)


def test_a_name_in_other_capitals_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'bert-base'?" in shown(capsys, "BERT-base", code=2)


def test_a_model_that_decodes_nothing_has_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "bert-base")
    assert said.endswith("state  none: it answers all at once\n")
    assert "state, in 2-byte elements" in shown(capsys, "mamba-130m")


def test_counts_stand_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line for line in shown(capsys, "evoformer-48").splitlines() if line.startswith("  ") and line.endswith("%")]
    assert len(rows) == 11
    assert len({len(row) for row in rows}) == 1
