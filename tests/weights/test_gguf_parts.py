"""GGUF models in several parts: those that the gguf package cuts are read as one, those that we cut llama.cpp opens."""

import re
import struct
import warnings
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from transformers import LlamaConfig

import sublayer
from sublayer.cli.main import main
from sublayer.errors import SublayerError, UsageError, WeightsError
from sublayer.text import load_tokenizer
from sublayer.weights.exports import export
from sublayer.weights.gguf.write import write_gguf
from sublayer.weights.load import read_spec
from tests.fuzz.mutate import Gguf, Key, packed
from tests.llama_cpp import LlamaCpp
from tests.oracle import oracle, saved
from tests.tiny import tiny
from tests.weights.gguf_writer import write
from tests.weights.test_gguf import IDS
from tests.weights.test_gguf_write import TOKENS

NAMES = ["x-00001-of-00003.gguf", "x-00002-of-00003.gguf", "x-00003-of-00003.gguf"]
THREE = {"split_max_tensors": 9}  # of 21 tensors
BARE_FIRST = {"split_max_tensors": 11, "small_first_shard": True}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(oracle(LlamaConfig), tmp_path_factory.mktemp("theirs"))


def cut(theirs: Path, folder: Path, **split: object) -> list[Path]:
    folder.mkdir()
    write(theirs, folder / "x.gguf", wide=False, tokens=True, split=split or THREE)
    assert sorted(path.name for path in folder.iterdir()) == NAMES
    return [folder / name for name in NAMES]


def edit(path: Path, change: Callable[[Gguf], Gguf]) -> None:
    path.write_bytes(change(Gguf.read(path.read_bytes())).write())


def same(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    wanted = dict(other.named_parameters())
    return all(torch.equal(value, wanted[name]) for name, value in one.named_parameters())


# --- in ---


@pytest.mark.parametrize("split", [THREE, BARE_FIRST])
@pytest.mark.parametrize("everywhere", [False, True])
def test_any_part_and_their_folder_is_the_whole_model(split, everywhere: bool, theirs: Path, tmp_path: Path) -> None:
    """everywhere: each part has all the metadata."""
    whole = write(theirs, tmp_path / "whole.gguf", wide=False, tokens=True)
    paths = cut(theirs, tmp_path / "parts", **split)
    if everywhere:
        keys = Gguf.read(paths[0].read_bytes()).keys
        for path in paths[1:]:
            edit(path, lambda one: one._replace(keys=[*(key for key in keys if key.name[:6] != b"split."), *one.keys]))
    wanted, ids = sublayer.load(whole), load_tokenizer(whole).encode("t5t7")
    for path in [*paths, tmp_path / "parts"]:
        assert same(sublayer.load(path), wanted), path
        assert read_spec(path)[0] == wanted.spec
        assert load_tokenizer(path).encode("t5t7") == ids


def test_show_tells_of_all_parts(theirs: Path, tmp_path: Path, capsys) -> None:
    paths = cut(theirs, tmp_path / "parts")
    assert main(["show", str(paths[1])]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"x-00001-of-00003\.gguf and 2 more, .*F32 100\.0% in 21", shown)
    assert re.search(r"tokenizer SentencePiece, 97 ids", shown)


def key(name: bytes, kind: int, value: bytes) -> Callable[[Gguf], Gguf]:
    return lambda one: one._replace(keys=[*(k for k in one.keys if k.name != name), Key(name, kind, value)])


TWICE = "tensor (.*) is also in x-00001-of-00003.gguf; take all parts from one place"
FAULTS: dict[str, tuple[int, Callable[[Gguf], Gguf], str]] = {
    "another's": (
        1, key(b"general.architecture", 8, packed(b"gemma")),
        "x-00002-of-00003.gguf: its general.architecture is another than that of x-00001-of-00003.gguf; take all parts",
    ),
    "of another cut": (
        1, key(b"split.tensors.count", 5, struct.pack("<i", 20)),
        "x-00002-of-00003.gguf: its split.tensors.count is another than that of x-00001-of-00003.gguf",
    ),
    "one tensor fewer": (
        2, lambda one: one._replace(records=one.records[:-1]),
        "x-00001-of-00003.gguf: split.tensors.count=21, but 20 are in its 3 parts; take all parts from one place",
    ),
    "of unknown number": (
        0, lambda one: one._replace(keys=[k for k in one.keys if k.name != b"split.tensors.count"]),
        "x-00001-of-00003.gguf: split.tensors.count=None, but 21",
    ),
    "a whole": (
        1, lambda one: one._replace(keys=[k for k in one.keys if k.name[:6] != b"split."]),
        "x-00002-of-00003.gguf: part 2 of 3 by its name, but split.no=0, split.count=1 within; parts are named NAME-",
    ),
    "a list for a number": (
        1, key(b"split.no", 9, struct.pack("<IQ", 0, 5_000) + bytes(5_000)),
        "x-00002-of-00003.gguf: part 2 of 3 by its name, but split.no=a list, split.count=3 within",
    ),
    "cut short": (
        2, lambda one: one._replace(data=one.data[:-64]), "x-00003-of-00003.gguf: tensor .* reach beyond the file's",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_parts_that_are_not_of_one_model_are_refused_by_name(fault: str, theirs: Path, tmp_path: Path) -> None:
    which, change, message = FAULTS[fault]
    paths = cut(theirs, tmp_path / "parts")
    edit(paths[which], change)
    with pytest.raises(WeightsError, match=message):
        sublayer.load(paths[1])


def test_a_tensor_in_two_parts_is_refused(theirs: Path, tmp_path: Path) -> None:
    paths = cut(theirs, tmp_path / "parts")
    records = Gguf.read(paths[0].read_bytes()).records
    edit(paths[2], lambda one: one._replace(records=[one.records[0]._replace(name=records[3].name), *one.records[1:]]))
    with pytest.raises(WeightsError, match=TWICE) as error:
        sublayer.load(paths[0])
    assert records[3].name.decode() in str(error.value)


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_part_that_is_missing_is_named(missing: int, theirs: Path, tmp_path: Path) -> None:
    paths = cut(theirs, tmp_path / "parts")
    paths[missing].unlink()
    for path in [paths[missing - 1], tmp_path / "parts"]:
        with pytest.raises(
            WeightsError, match=f"{NAMES[missing]}: part {missing + 1} of 3 is missing; put all of them"
        ):
            sublayer.load(path)


def test_a_part_of_another_name_is_told_the_right_one(theirs: Path, tmp_path: Path) -> None:
    path = cut(theirs, tmp_path / "parts")[1].rename(tmp_path / "x.gguf")
    with pytest.raises(WeightsError, match=r"split.no=1, split.count=3 within; parts are named NAME-00001-of-00003.gg"):
        sublayer.load(path)


def test_a_folder_of_two_models_in_parts_names_none(theirs: Path, tmp_path: Path) -> None:
    for path in cut(theirs, tmp_path / "parts"):
        path.with_name(path.name.replace("x-", "y-")).write_bytes(path.read_bytes())
    with pytest.raises(WeightsError, match="holds x-00001-of-00003.gguf and 1 more GGUF models; name one of them"):
        sublayer.load(tmp_path / "parts")


# --- out ---


@pytest.mark.parametrize("kind", ["f32", "q8_0"])
def test_llama_cpp_opens_the_parts_that_are_written(kind: str, tmp_path: Path) -> None:
    model = tiny(vocab=97).build(seed=1)
    whole = write_gguf(model, tmp_path / "whole.gguf", kind=kind, about=TOKENS)
    parts = write_gguf(model, tmp_path / "x.gguf", kind=kind, about=TOKENS, shard_size=12_000)
    assert [path.name for path in parts] == [f"x-{i:05d}-of-{len(parts):05d}.gguf" for i in range(1, len(parts) + 1)]
    ids = IDS[0].clamp(min=3).tolist()
    assert LlamaCpp(parts[0]).greedy(ids, 24) == LlamaCpp(whole[0]).greedy(ids, 24)
    with warnings.catch_warnings(action="ignore"):
        assert same(sublayer.load(parts[0]), sublayer.load(whole[0]))


def test_parts_hold_whole_tensors_of_so_many_bytes_or_one(tmp_path: Path) -> None:
    parts = write_gguf(tiny(vocab=97).build(), tmp_path / "x.gguf", shard_size=12_000)
    assert len(parts) > 2
    read = [gguf.GGUFReader(path) for path in parts]
    for i, one in enumerate(read):
        assert sum(tensor.n_bytes for tensor in one.tensors) <= 12_000 or len(one.tensors) == 1
        numbers = [one.fields[f"split.{name}"].parts[-1][0] for name in ("no", "count", "tensors.count")]
        assert numbers == [i, len(parts), sum(len(other.tensors) for other in read)]
    assert all("llama.block_count" not in one.fields for one in read[1:])  # as gguf-split has it


def test_an_export_in_parts_replaces_one_in_other_parts_and_no_other_file(tmp_path: Path, capsys) -> None:
    sublayer.save(tiny().build(seed=1), tmp_path / "a")
    out = tmp_path / "out"
    command = ["export", str(tmp_path / "a"), "--to", "gguf", "--out", str(out / "x.gguf"), "--shard-size"]
    assert main([*command, "30kB"]) == 0
    first = sorted(path.name for path in out.iterdir())
    assert len(first) > 2
    assert re.findall(r"x-\d+-of-\d+.gguf", capsys.readouterr().out) == first
    other = out / "x-small-00001-of-00009.gguf"
    other.write_bytes(b"")
    with pytest.raises(UsageError, match=f"{first[0]}: is there already; --force replaces it"):
        export(tmp_path / "a", out / "x.gguf", to="gguf", shard_size=60_000)
    written = export(tmp_path / "a", out / "x.gguf", to="gguf", shard_size=60_000, force=True)
    assert {*written, other} == {*out.iterdir()}
    assert len(written) < len(first)
    assert same(sublayer.load(written[-1]), sublayer.load(tmp_path / "a"))
    whole = export(written[1], out / "joined.gguf", to="gguf")
    assert whole == [out / "joined.gguf"]
    assert same(sublayer.load(whole[0]), sublayer.load(tmp_path / "a"))
    with pytest.raises(UsageError, match="is what is exported"):
        export(written[1], out / "x.gguf", to="gguf", shard_size=10**9, force=True)
    with pytest.raises(UsageError, match="is the name of a part; name the whole, such as y.gguf"):
        export(tmp_path / "a", out / "y-00001-of-00002.gguf", to="gguf")


def test_an_export_in_parts_that_is_interrupted_leaves_what_was_there(tmp_path: Path) -> None:
    sublayer.save(tiny().build(seed=1), tmp_path / "a")
    before = export(tmp_path / "a", tmp_path / "x.gguf", to="gguf", shard_size=30_000)
    bytes_before = [path.read_bytes() for path in before]

    def stop(what: str, done: int, total: int) -> None:
        if what == "writing" and done > 0.9 * total:
            raise KeyboardInterrupt

    sublayer.save(tiny().build(seed=2), tmp_path / "a")
    for size in (30_000, 50_000):
        with pytest.raises(KeyboardInterrupt):
            export(tmp_path / "a", tmp_path / "x.gguf", to="gguf", shard_size=size, force=True, progress=stop)
        assert {tmp_path / "a", *before} == {*tmp_path.iterdir()}
        assert [path.read_bytes() for path in before] == bytes_before


def test_more_parts_than_can_be_numbered_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublayer.weights.gguf.write.MOST_PARTS", 3)
    with pytest.raises(SublayerError, match="shard_size=1: makes 2. parts; they can be numbered up to 3"):
        write_gguf(tiny().build(), tmp_path / "x.gguf", shard_size=1)
    assert not list(tmp_path.iterdir())
