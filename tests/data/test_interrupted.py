"""No interruption of a writing leaves less than there was, and no corpus takes memory."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sublayer.data.readers import Document
from sublayer.data.shards import Progress, Tokens, prepare
from sublayer.errors import InputError, SublayerError
from tests.data.corpora import Counting, files, many
from tests.data.tokenizer import END

# Interrupted


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("documents", [many(200), [Document("same\n" * 20, "a")] * 100], ids=["many", "same"])
def test_an_interrupted_writing_is_gone_on_with(tmp_path: Path, counting: Counting, documents: list[Document]) -> None:
    prepare(documents, END, tmp_path / "whole", shard_tokens=500)
    whole, calls = files(tmp_path / "whole"), 0
    seen: list[Progress] = []
    lines: list[str] = []

    class Interrupted(Counting):
        def encode_batch(self, texts: Sequence[str], **options: Any) -> list[Any]:
            nonlocal calls
            calls += 1
            if calls % 9 == 0:
                raise KeyboardInterrupt
            return super().encode_batch(texts, **options)

    def attempt() -> bool:
        try:
            prepare(
                documents, Interrupted(("<|end|>",)), tmp_path / "data", shard_tokens=500, progress=seen.append,
                say=lines.append,
            )  # fmt: skip
        except KeyboardInterrupt:
            return False
        return True

    while not attempt():
        assert calls < 1000
        with pytest.raises(InputError, match="there is no index.json"):
            Tokens.open(tmp_path / "data" / "train")
    assert files(tmp_path / "data") == whole
    assert calls > 9
    if len(documents) == 200:
        assert 200 < counting.count < 400  # only what came after the last record is encoded again
        assert any("goes on after " in line for line in lines)
        assert seen[-1] == Progress(200, seen[-1].tokens, sum(len(document.text) for document in documents), 1.0)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    "damage", ["{", "[]", '{"build": 1}', "sides", "negative", "another", "files", "shard", "sources"]
)
def test_a_record_that_is_not_true_begins_anew(tmp_path: Path, damage: str) -> None:
    documents = many(100)
    prepare(documents, END, tmp_path / "whole", shard_tokens=500)

    def stop(made: Progress) -> None:
        if made.documents > 60:
            raise KeyboardInterrupt

    held = 0.3 if damage == "another" else 0.05
    with pytest.raises(KeyboardInterrupt):
        prepare(documents, END, tmp_path / "data", held=held, shard_tokens=500, progress=stop)
    path = tmp_path / "data" / "partial.json"
    record = json.loads(path.read_text())
    build = tmp_path / "data" / "train" / record["build"]
    if damage == "sides":
        record["sides"].pop()
    elif damage == "negative":
        record["sides"][0]["tokens"] = -1
    elif damage == "files":
        (build / "starts.bin").write_bytes(b"")
    elif damage == "shard":
        (build / "tokens-00000.bin").unlink()
    elif damage == "sources":
        record["read"] = 1000
    path.write_text(json.dumps(record) if damage.isalpha() else damage)
    prepare(documents, END, tmp_path / "data", shard_tokens=500)
    assert files(tmp_path / "data") == files(tmp_path / "whole")


@pytest.mark.usefixtures("small")
def test_leftovers_of_another_writing_are_removed(tmp_path: Path) -> None:
    def stop(made: Progress) -> None:
        raise KeyboardInterrupt

    for held in (0.1, 0.2):
        with pytest.raises(KeyboardInterrupt):
            prepare(many(100), END, tmp_path, held=held, progress=stop)
    (tmp_path / "train" / "notes").mkdir()  # not ours: it stays
    for left in (".partial.json.999999999.partial", "train/.index.json.999999999.partial"):
        (tmp_path / left).touch()
    train, _ = prepare(many(100), END, tmp_path, held=0.3)
    assert {path.name for path in (tmp_path / "train").iterdir()} == {"index.json", "notes", train.index.build}
    assert {path.name for path in tmp_path.iterdir()} == {"train", "held"}


@pytest.mark.usefixtures("small")
def test_a_full_disk_loses_nothing(tmp_path: Path, disk: list[float]) -> None:
    prepare(many(200), END, tmp_path / "whole")
    failures = 0
    while failures < 100:
        disk[0] = 60
        try:
            prepare(many(200), END, tmp_path / "data")
            break
        except SublayerError as error:
            failures += "No space left on device" in str(error)
    assert 2 <= failures < 100
    assert files(tmp_path / "data") == files(tmp_path / "whole")


KILL = Path(__file__).with_name("kill.py")


def killed(folder: Path, first: int, stride: int) -> None:
    command = [sys.executable, str(KILL), str(folder), str(first), str(stride)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=KILL.parent.parent.parent)
    assert (done.returncode, done.stderr) == (0, "")
    deaths, finished = map(int, done.stdout.split())
    assert deaths > 3  # the test has tested something
    assert finished == 1  # and its last try outlived the writing


def test_a_kill_leaves_the_old_or_the_new_and_the_next_call_finishes(tmp_path: Path) -> None:
    killed(tmp_path, 5, 37)


@pytest.mark.slow
def test_a_kill_at_any_write_or_rename(tmp_path: Path) -> None:
    killed(tmp_path, 1, 1)


@pytest.mark.usefixtures("small")
def test_two_that_prepare_one_folder_wait_for_each_other(tmp_path: Path, counting: Counting) -> None:
    started, go = threading.Event(), threading.Event()
    lines: list[str] = []

    def progress(made: Progress) -> None:
        started.set()
        assert go.wait(30)

    def say(line: str) -> None:
        lines.append(line)
        if "waits" in line:
            go.set()

    first = threading.Thread(target=prepare, args=(many(100), counting, tmp_path), kwargs={"progress": progress})
    first.start()
    assert started.wait(30)
    train, _ = prepare(many(100), counting, tmp_path, say=say)
    first.join()
    assert counting.count == 100
    assert train.documents > 50
    assert "waits for another process that writes there" in lines[0]
    assert "used again" in lines[1]


# Memory

MEMORY = """
import sys
import numpy as np
from sublayer.data import shards
from sublayer.data.shards import prepare
from sublayer.text import Bytes

def private():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("RssAnon")) * 1024

before, most = private(), 0
def progress(made):
    global most
    most = max(most, private())
train, held = prepare(sys.argv[1], Bytes(("<|end|>",)), sys.argv[2], progress=progress)
rng = np.random.default_rng(0)
for at in rng.integers(0, len(train) - 1000, 2000):
    train.read(at, at + 1000), train.where(int(at)), train.begins(at, at + 1000)
print(train.documents + held.documents, train.bytes + held.bytes, max(most, private()) - before)
"""


def memory(source: Path, folder: Path) -> tuple[int, int, int]:
    """(documents, bytes, bytes of its own that a process took to prepare and read them)."""
    done = subprocess.run([sys.executable, "-c", MEMORY, source, folder], capture_output=True, text=True, check=True)
    documents, size, grown = map(int, done.stdout.split())
    return documents, size, grown


def test_a_corpus_larger_than_the_memory_it_takes(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(50_000):
            file.write('{"text": "' + f"line {number} of text; " * 21 + '"}\n')
    documents, size, grown = memory(tmp_path / "a.jsonl", tmp_path / "data")
    assert documents == 50_000
    assert size > 20e6
    assert grown < 50e6


@pytest.mark.slow
def test_neither_many_documents_nor_large_files_take_memory(tmp_path: Path) -> None:
    with open(tmp_path / "a.jsonl", "w") as file:
        for number in range(600_000):
            file.write('{"text": "' + str(number) + '"}\n')
    documents, _, few = memory(tmp_path / "a.jsonl", tmp_path / "many")
    assert documents == 600_000
    assert few < 50e6
    (tmp_path / "a.jsonl").unlink()
    with open(tmp_path / "b.txt", "w") as file:
        for number in range(6_000_000):
            file.write(f"a line of text, number {number}\n")
    _, size, large = memory(tmp_path / "b.txt", tmp_path / "large")
    assert size > 180e6
    assert large < 120e6
