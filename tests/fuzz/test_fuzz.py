"""Mutated files end in a model or in one line; `python -m tests.fuzz` tries many more, and under limits."""

import struct
from pathlib import Path
from random import Random

import pytest
from transformers import LlamaConfig

from tests.fuzz import run
from tests.fuzz.child import FILES, outcome
from tests.fuzz.mutate import MUTATORS, Gguf
from tests.oracle import oracle, saved
from tests.weights.gguf_writer import write


@pytest.fixture(scope="module")
def seeds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("seeds")
    theirs = oracle(LlamaConfig, num_hidden_layers=1).float()
    whole = saved(theirs, folder / "whole")
    (folder / "llama").mkdir()
    write(whole, folder / "llama" / "x.gguf", wide=False, tokens=True)
    (folder / "parts").mkdir()
    write(whole, folder / "parts" / "x.gguf", wide=False, split={"split_max_tensors": 7})
    return {
        "safetensors": whole,
        "GGUF": folder / "llama",
        "GGUF part": folder / "parts",
        "config.json": saved(theirs, folder / "described"),
        "index.json": saved(theirs, folder / "shards", max_shard_size="20KB"),
    }


@pytest.mark.parametrize("kind", FILES)
def test_a_hundred_files_that_lie_are_refused_in_one_line(kind: str, seeds: dict[str, Path]) -> None:
    path, places = seeds[kind], set[str]()
    data = (path / FILES[kind]).read_bytes()
    for i in range(100):
        (path / FILES[kind]).write_bytes(MUTATORS[kind](Random(i), data))
        found = outcome(path, kind)
        assert "fault" not in found, found["fault"]
        places.add(str(found["where"]))
    (path / FILES[kind]).write_bytes(data)
    assert outcome(path, kind) == {"where": None}
    assert len(places) > 5  # it goes far into the reader


def test_a_gguf_file_is_written_as_it_was_read(seeds: dict[str, Path]) -> None:
    data = (seeds["GGUF"] / "x.gguf").read_bytes()
    assert Gguf.read(data).write() == data


@pytest.mark.parametrize(
    ("tensor", "key"),
    [(b"token_embd.weight", None), (None, b"tokenizer.ggml.model"), (None, b"tokenizer.ggml.pre")],
)
def test_what_was_once_no_refusal(tensor: bytes | None, key: bytes | None, seeds: dict[str, Path]) -> None:
    """A table that is a single number; a list where a name should be."""
    path = seeds["GGUF"] / "x.gguf"
    data = path.read_bytes()
    whole = Gguf.read(data)
    records = [one._replace(shape=[]) if one.name == tensor else one for one in whole.records]
    numbers = struct.pack("<IQI", 4, 1, 7)
    keys = [one._replace(kind=9, value=numbers) if one.name == key else one for one in whole.keys]
    path.write_bytes(Gguf(keys, records, whole.data).write())
    found = outcome(path.parent, "GGUF")
    path.write_bytes(data)
    assert "fault" not in found, found["fault"]


def test_every_refusal_of_the_readers_is_known_by_its_line() -> None:
    for file in run.READERS:
        assert run.refusals(file)
        for begin in run.refusals(file):
            assert run.beginning(file, begin) == begin
    every = [text for file in run.READERS for text in run.refusals(file).values()]
    for part in run.NOT_OF_FILES:  # each exemption stands for something
        assert any(part in text for text in every), part


def test_what_a_reader_should_not_do_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that takes too long, too much, or dies is told apart from one that refuses."""
    child = tmp_path / "child.py"
    child.write_text(
        "import json, os, signal, sys\n"
        "first = int(sys.argv[4])\n"
        "if first == 0:\n"
        "    print(json.dumps({'i': 0, 'where': None, 'seconds': 3.0, 'bytes': 1}), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "for i in range(first, int(sys.argv[5])):\n"
        "    print(json.dumps({'i': i, 'fault': 'MemoryError', 'seconds': 0.0, 'bytes': 1}), flush=True)\n"
    )
    monkeypatch.setattr(run, "make", lambda folder: None)
    monkeypatch.setattr(run, "CHILD", [str(child)])
    found = run.fuzz(tmp_path, {"GGUF": 3}, 0)
    assert [fault.split(": ", 1)[1] for fault in found.faults] == ["3.0 s", "ended the process: SIGSEGV", "MemoryError"]
    assert found.inputs["GGUF"] == 3


@pytest.mark.slow
def test_two_thousand_files_under_limits_of_time_and_memory(tmp_path: Path) -> None:
    found = run.fuzz(tmp_path, {kind: round(2_000 * share) for kind, share in run.SHARES.items()}, seed=1)
    assert not found.faults
    assert len({(file, line) for _, file, line in found.paths}) > 80
