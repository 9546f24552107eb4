"""Checkpoints: whole or not there, the newest and the best kept, damage told."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import sublayer
from sublayer.errors import SublayerError, WeightsError
from sublayer.text import Bytes
from sublayer.train import checkpoint
from sublayer.train.optim import AdamW


def model(seed: int = 0) -> Any:
    return sublayer.recipes.llama(16, 1, 2, 1, hidden=24, vocab=257).build(seed)


def write(folder: Path, step: int, seed: int = 0, **facts: Any) -> checkpoint.Saved:
    return checkpoint.write(folder, step, model(seed), Bytes(("<|end|>",)), {"optimizer/x": torch.ones(2)}, facts)


def test_a_checkpoint_is_a_model_and_what_training_needs(tmp_path: Path) -> None:
    write(tmp_path, 7, seed=4, loss=1.5)
    (found,) = checkpoint.saved(tmp_path)
    assert (found.step, found.facts, found.path.name) == (7, {"step": 7, "loss": 1.5}, "step-00000007")
    into = model(1)
    found.load_into(into)
    tensors = found.tensors()
    assert torch.equal(tensors["optimizer/x"], torch.ones(2))
    loaded = sublayer.load(found.path)
    for a, b, c in zip(into.parameters(), model(4).parameters(), loaded.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert sublayer.text.load_tokenizer(found.path) == Bytes(("<|end|>",))


def test_an_optimiser_goes_on_from_its_tensors(tmp_path: Path) -> None:
    def step(built: Any, optimizer: Any) -> None:
        built(torch.tensor([[1, 2, 3]])).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    first = model()
    optimizer = AdamW().build(first)
    step(first, optimizer)
    tensors = {f"optimizer/{name}": t for name, t in optimizer.state_tensors().items()}
    checkpoint.write(tmp_path, 1, first, Bytes(), tensors, {})
    second = model(9)
    again = AdamW().build(second)
    checkpoint.saved(tmp_path)[0].load_into(second)
    read = checkpoint.saved(tmp_path)[0].tensors()
    again.load_state_tensors({name.removeprefix("optimizer/"): t for name, t in read.items()})
    step(first, optimizer)
    step(second, again)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    for step, loss in enumerate([3.0, 1.0, 2.0, 2.5, 2.6], 1):
        write(tmp_path, step, loss=loss)
    checkpoint.prune(tmp_path, 2, "loss")
    assert [one.step for one in checkpoint.saved(tmp_path)] == [2, 4, 5]
    (tmp_path / "step-00000002" / "training.json").write_text("{")  # damaged: neither the best nor in the way
    checkpoint.prune(tmp_path, 1, "loss")
    assert [one.step for one in checkpoint.saved(tmp_path)] == [4, 5]
    checkpoint.prune(tmp_path, 1, "other")
    assert [one.step for one in checkpoint.saved(tmp_path)] == [5]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]


def test_a_write_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk, half-way through."""
    write(tmp_path, 1, seed=1)

    def full(path: Path, *rest: Any) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", full)
    with pytest.raises((OSError, SublayerError)):
        write(tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    checkpoint.saved(tmp_path)[0].load_into(model())


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / f".step-00000003.{gone.pid}.partial").mkdir()
    (tmp_path / f".step-00000004.{os.getppid()}.partial").mkdir()
    assert checkpoint.saved(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == [f".step-00000004.{os.getppid()}.partial"]


@pytest.mark.parametrize("name", ["training.safetensors", "model.safetensors", "training.json"])
def test_a_damaged_file_is_told(name: str, tmp_path: Path) -> None:
    path = write(tmp_path, 1).path / name
    path.write_bytes(path.read_bytes()[:-9])
    (found,) = checkpoint.saved(tmp_path)

    def read() -> None:
        found.load_into(model())
        found.tensors()
        found.facts

    with pytest.raises(WeightsError, match=name.split(".")[0]):
        read()


def test_no_pickle(tmp_path: Path) -> None:
    path = write(tmp_path, 1).path
    assert {p.suffix for p in path.iterdir()} <= {".safetensors", ".json"}
    assert json.loads((path / "training.json").read_text())["step"] == 1
