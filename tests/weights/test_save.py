"""Saving: what was there stays until the new files are whole, and what is written reads back to the bit."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import sublayer
from sublayer.errors import SpecError, UsageError, WeightsError
from sublayer.files import replacing, replacing_folder, stream_tensors, write_json
from sublayer.recipes import gpt2, to_hf
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

    def half_written(path, kinds, tensors) -> None:
        Path(path).write_bytes(b"half of the weights")
        raise space

    def no_room(self, *args, **kwargs) -> int:
        raise space

    if full == "weights":
        monkeypatch.setattr(sys.modules["sublayer.weights.save"], "stream_tensors", half_written)
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


@pytest.mark.parametrize(
    ("change", "nearest", "part"),
    [
        ("blocks.3.attn.op.window=512", "Mistral", "blocks.3.attn.op.window is None, not 512"),
        ("blocks.*.attn.op.position.pairing=interleaved", "Llama",
         "blocks.0.attn.op.position.pairing is 'half', not 'interleaved', and 4 more parts differ"),
        ("blocks.1.attn.scale=0.5", "Llama", "blocks.1.attn.scale is 1.0, not 0.5"),
    ],
)  # fmt: skip
def test_the_nearest_class_and_the_part_that_differs_are_named(change: str, nearest: str, part: str) -> None:
    said = f"the nearest is {nearest}ForCausalLM, in which decoder.{part}"
    with pytest.raises(SpecError, match=re.escape(said) + "$"):
        to_hf(tiny(layers=5).override(f"decoder.{change}"))


def test_a_model_without_values_is_not_saved(tmp_path) -> None:
    with pytest.raises(WeightsError, match="built on meta and has no values to save"):
        sublayer.save(tiny().build(device="meta"), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_path_that_is_a_file_is_one_line(tmp_path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WeightsError, match="cannot be written"):
        sublayer.save(tiny().build(), tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


# --- shards ---


@pytest.mark.parametrize("layout", ["sublayer", "hf"])
def test_shards_hold_the_same_as_one_file(layout, tmp_path) -> None:
    """No file is larger than asked, but for a tensor that is; each tensor is in one."""
    model = SPECS["tied llama"].build(seed=3)
    sublayer.save(model, tmp_path / "one", layout=layout)
    sublayer.save(model, tmp_path / "cut", layout=layout, shard_size=9000)
    names = sorted(path.name for path in (tmp_path / "cut").glob("*.safetensors"))
    assert names == [f"model-{i:05d}-of-{len(names):05d}.safetensors" for i in range(1, len(names) + 1)]
    whole, cut = load_file(tmp_path / "one" / "model.safetensors"), {}
    for name in names:
        part = load_file(tmp_path / "cut" / name)
        assert len(part) == 1 or sum(tensor.nbytes for tensor in part.values()) <= 9000
        assert not cut.keys() & part.keys()
        cut |= part
    index = json.loads((tmp_path / "cut" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())
    assert index["weight_map"].keys() == cut.keys() == whole.keys()
    assert all(torch.equal(cut[name], whole[name]) for name in whole)
    again = sublayer.load(tmp_path / "cut")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


def test_shards_are_refused_beside_one_file(tmp_path) -> None:
    """It would be read before their index."""
    sublayer.save(tiny().build(), tmp_path)
    before = contents(tmp_path)
    with pytest.raises(WeightsError, match=r"holds model\.safetensors of another checkpoint"):
        sublayer.save(tiny().build(), tmp_path, shard_size=9000)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("size", [0, -5])
def test_a_shard_of_nothing_is_refused(size: int, tmp_path) -> None:
    with pytest.raises(UsageError, match="shard_size"):
        sublayer.save(tiny().build(), tmp_path, shard_size=size)


def test_values_are_rounded_once_to_the_dtype_asked_for(tmp_path) -> None:
    model = tiny().build(seed=3)
    told: list[tuple[str, int, int]] = []
    sublayer.save(model, tmp_path, layout="hf", dtype=torch.bfloat16, progress=lambda *now: told.append(now))
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(
        found["model.embed_tokens.weight"], model.get_parameter("decoder.embed.tokens.weight").bfloat16()
    )
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    total = sum(tensor.nbytes for tensor in found.values())
    assert told[-1] == ("writing", total, total)
    assert told == sorted(told)


def test_a_value_beyond_float16_is_refused_by_name(tmp_path) -> None:
    """It would be written as infinite."""
    model = tiny().build(seed=3)
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.ffn.op.down.weight")[2, 3] = -66246.0
    with pytest.raises(WeightsError, match="layers.1.mlp.down_proj.weight: holds 66246, beyond float16's 65504"):
        sublayer.save(model, tmp_path / "new", layout="hf", dtype=torch.float16)
    assert list((tmp_path / "new").iterdir()) == []
    sublayer.save(model, tmp_path / "new", layout="hf", dtype=torch.bfloat16)


def test_a_stream_that_is_not_as_announced_is_a_fault(tmp_path) -> None:
    kinds = {"a": (torch.float32, (2, 3)), "b": (torch.float32, (4,))}
    tensors = {"a": torch.ones(2, 3), "b": torch.ones(3)}
    with pytest.raises(ValueError, match="was announced"):
        stream_tensors(tmp_path / "file", kinds, tensors.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_stream_is_read_by_the_safetensors_library(dtype: torch.dtype, tmp_path) -> None:
    tensors = {
        "scalar": torch.tensor(3.5),
        "none": torch.zeros(0, 4),
        "turned": torch.randn(3, 5).t(),
        "é": torch.ones(1),
    }
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    stream_tensors(tmp_path / "file", {n: (t.dtype, tuple(t.shape)) for n, t in tensors.items()}, tensors.items())
    found = load_file(tmp_path / "file")
    assert found.keys() == tensors.keys()
    assert all(torch.equal(found[name], tensors[name]) and found[name].dtype == dtype for name in tensors)


# --- files ---


def test_json_is_utf8_and_holds_paths_of_any_bytes(tmp_path) -> None:
    said = {"größe": os.fsdecode(b"caf\xe9"), "list": [1, None]}
    write_json(tmp_path / "a.json", said)
    raw = (tmp_path / "a.json").read_bytes()
    assert "größe".encode() in raw
    assert json.loads(raw) == said


def test_replacing_cleans_up_after_killed_writers_only(tmp_path) -> None:
    alive, dead, others = (tmp_path / f".a.{pid}.partial" for pid in (os.getppid(), 2**22 + 1, "mine"))
    neighbours = [tmp_path / f".{name}.{2**22 + 1}.partial" for name in ("ab", "a.json")]
    for path in (alive, dead, others, *neighbours):
        path.write_text("")
    with replacing(tmp_path / "a") as beside:
        beside.write_text("new")
    assert not dead.exists()
    assert alive.exists()
    assert others.exists()
    assert all(path.exists() for path in neighbours)
    assert (tmp_path / "a").read_text() == "new"
    assert not beside.exists()


@pytest.mark.parametrize("name", ["a", "[a]"])
def test_a_folder_is_replaced_beside_what_killed_writers_left(name: str, tmp_path) -> None:
    """Even by this process's number, as all may have it in a container."""
    for left in (f".{name}.{os.getpid()}.partial", f".{name}.former.{2**22 + 1}.partial"):
        (tmp_path / left).mkdir()
        (tmp_path / left / "x").write_text("half")
    (tmp_path / name).mkdir()
    (tmp_path / name / "old").write_text("old")
    with replacing_folder(tmp_path / name) as beside:
        (beside / "new").write_text("new")
    assert contents(tmp_path / name) == {"new": b"new"}
    assert [path.name for path in tmp_path.iterdir()] == [name]


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
