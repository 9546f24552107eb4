"""Saving: what was there stays until the new files are whole, and what is written reads back to the bit."""

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import sublayer
from sublayer.errors import SpecError, UsageError, WeightsError
from sublayer.files import replacing
from sublayer.recipes import gpt2
from sublayer.recipes.gpt2 import TINY as TINY_GPT2
from tests.tiny import tiny

SPECS = {"llama": tiny(), "tied llama": tiny(tied=True), "gpt2": gpt2(**TINY_GPT2)}


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("layout", ["sublayer", "hf"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_written_reads_back_to_the_bit(name, layout, dtype, tmp_path) -> None:
    model = SPECS[name].build(seed=5, dtype=dtype)
    sublayer.save(model, tmp_path, layout=layout)
    again = sublayer.load(tmp_path, dtype=dtype)
    assert again.spec.replace(init=model.spec.init) == model.spec
    wanted = dict(model.named_parameters())
    assert wanted.keys() == dict(again.named_parameters()).keys()
    for key, value in again.named_parameters():
        assert torch.equal(value, wanted[key]), key


def test_own_layout_keeps_the_whole_spec_hf_the_function(tmp_path) -> None:
    spec = tiny().override("init.std=0.5")
    sublayer.save(spec.build(), tmp_path / "own")
    assert sublayer.load(tmp_path / "own").spec == spec


def test_a_tied_head_is_stored_once(tmp_path) -> None:
    model = SPECS["gpt2"].build()
    sublayer.save(model, tmp_path, layout="hf")
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names: list[str] = file.keys()
        assert "lm_head.weight" not in names
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


@pytest.mark.parametrize("layout", ["sublayer", "hf"])
@pytest.mark.parametrize("full", ["weights", "description"])
def test_a_save_that_fails_leaves_the_old_checkpoint(layout, full: str, tmp_path, monkeypatch) -> None:
    """The disk fills up while the weights, or the description after them, are being written."""
    old = tiny().build(seed=1)
    sublayer.save(old, tmp_path, layout=layout)
    before = contents(tmp_path)
    new = tiny(hidden=40).build(seed=2)
    space = OSError(errno.ENOSPC, "No space left on device")

    def half_written(path, tensors, metadata) -> None:
        Path(path).write_bytes(b"half of the weights")
        raise space

    def no_room(self, *args, **kwargs) -> int:
        raise space

    if full == "weights":
        monkeypatch.setattr(sys.modules["sublayer.weights.save"], "write_tensors", half_written)
    else:
        monkeypatch.setattr(Path, "write_text", no_room)
    with pytest.raises(WeightsError, match="cannot be written: .*No space left on device"):
        sublayer.save(new, tmp_path, layout=layout)
    monkeypatch.undo()
    assert contents(tmp_path) == before
    assert sublayer.load(tmp_path).spec == old.spec or layout == "hf"
    sublayer.save(new, tmp_path, layout=layout)
    assert sublayer.load(tmp_path).spec.find("decoder.blocks.0.ffn.op.hidden") == 40


def test_a_real_limit_on_file_sizes_leaves_the_old_checkpoint(tmp_path) -> None:
    """The operating system itself refuses the bytes: in a child process, whose files may not pass 20 kB."""
    code = """
import resource, signal, sublayer
from sublayer.recipes import llama
from sublayer.recipes.llama import TINY
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    sublayer.save(llama(**TINY).build(seed=2), ".")
except sublayer.errors.WeightsError as error:
    print(error)
"""
    sublayer.save(tiny().build(seed=1), tmp_path)
    before = contents(tmp_path)
    result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env=os.environ)
    assert "cannot be written" in result.stdout, result.stderr
    assert result.stdout.count("\n") == 1
    assert contents(tmp_path) == before


@pytest.mark.parametrize("other", ["config.json", "model.safetensors.index.json"])
def test_a_folder_with_another_checkpoint_is_refused(other: str, tmp_path) -> None:
    """Beside an index the old shards would be read, beside another description the wrong names."""
    (tmp_path / other).write_text("{}")
    with pytest.raises(WeightsError, match=f"holds {other} of another checkpoint"):
        sublayer.save(tiny().build(), tmp_path)
    assert contents(tmp_path) == {other: b"{}"}


def test_hf_beside_a_spec_is_refused(tmp_path) -> None:
    sublayer.save(tiny().build(), tmp_path)
    with pytest.raises(WeightsError, match=r"holds spec\.json"):
        sublayer.save(tiny().build(), tmp_path, layout="hf")
    sublayer.load(tmp_path)


def test_a_model_without_a_class_of_theirs_writes_nothing(tmp_path) -> None:
    model = tiny().override("decoder.blocks.*.attn.op.softcap=30.0").build()
    with pytest.raises(SpecError, match="no Hugging Face architecture"):
        sublayer.save(model, tmp_path / "new", layout="hf")
    assert not (tmp_path / "new").exists()


def test_a_model_without_values_is_not_saved(tmp_path) -> None:
    with pytest.raises(WeightsError, match="built on meta and has no values to save"):
        sublayer.save(tiny().build(device="meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_a_file_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WeightsError, match="cannot be written"):
        sublayer.save(tiny().build(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- files ---


def test_replacing_cleans_up_after_killed_writers_only(tmp_path) -> None:
    alive, dead, others = (tmp_path / f".a.{pid}.partial" for pid in (os.getppid(), 2**22 + 1, "mine"))
    neighbour = tmp_path / f".ab.{2**22 + 1}.partial"
    for path in (alive, dead, others, neighbour):
        path.write_text("")
    with replacing(tmp_path / "a") as beside:
        beside.write_text("new")
    assert not dead.exists()
    assert alive.exists()
    assert others.exists()
    assert neighbour.exists()
    assert (tmp_path / "a").read_text() == "new"
    assert not beside.exists()


def test_replacing_keeps_the_old_file_when_the_writer_fails(tmp_path) -> None:
    (tmp_path / "a").write_text("old")

    def fail() -> None:
        with replacing(tmp_path / "a") as beside:
            beside.write_text("ne")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert contents(tmp_path) == {"a": b"old"}


def test_replacing_fails_where_nothing_was_written(tmp_path) -> None:
    (tmp_path / "a").write_text("old")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "a"):
        pass
    assert contents(tmp_path) == {"a": b"old"}


def test_an_unknown_layout_is_refused(tmp_path) -> None:
    with pytest.raises(UsageError, match="layout='HF'"):
        sublayer.save(tiny().build(), tmp_path / "new", layout="HF")  # pyright: ignore[reportArgumentType]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("layout", ["sublayer", "hf"])
def test_weights_can_be_read_by_whoever_can_read_the_description(layout, tmp_path) -> None:
    sublayer.save(tiny().build(), tmp_path, layout=layout)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1


def test_a_dtype_that_holds_no_weights_is_refused(tmp_path) -> None:
    sublayer.save(tiny().build(), tmp_path)
    for dtype in ("bfloat16", torch.int8):
        with pytest.raises(UsageError, match="expected a floating-point dtype"):
            sublayer.load(tmp_path, dtype=dtype)  # pyright: ignore[reportArgumentType]
