"""A run that is killed at fifty random moments comes to what an uninterrupted one comes to, bit for bit."""

import os
import random
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

RUN = """
out = "out"
[model]
recipe = "llama"
dim = 32
layers = 2
heads = 2
kv_heads = 1
hidden = 48
dropout = 0.1
[tokenizer]
vocab = 290
[data]
paths = "texts"
length = 32
[train]
steps = 60
batch = 8
ema = 0.9
[optimizer]
kind = "muon"
[eval]
every = 5
tokens = 500
sample_tokens = 8
[save]
every = 1
"""


def start(folder: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "sublayer", "train", "run.toml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )


def prepared(folder: Path) -> Path:
    (folder / "texts").mkdir(parents=True)
    generator = random.Random(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon", "(", ")", "=", "\n", "    return"]
    for i in range(60):
        (folder / "texts" / f"{i:02}.txt").write_text(" ".join(generator.choices(words, k=400)))
    (folder / "run.toml").write_text(RUN)
    return folder


def compared(whole: Path, killed: Path) -> None:
    """Weights, tokenizer and tokens are the same; nothing half-written is left."""
    for pattern in ("model/*", "tokenizer/*", "data/*/*/tokens-00000.bin"):
        files = [sorted((folder / "out").glob(pattern)) for folder in (whole, killed)]
        assert [path.name for path in files[0]] == [path.name for path in files[1]]
        assert files[0]
        for a, b in zip(*files, strict=True):
            assert a.read_bytes() == b.read_bytes(), a.name
    assert [path.name for path in (killed / "out").rglob("*") if "partial" in path.name] == []


@pytest.mark.slow
def test_fifty_kills_change_nothing(tmp_path: Path) -> None:
    """Runs are killed and started again until they end, and then others, until fifty kills have come."""
    whole, generator, kills = prepared(tmp_path / "whole"), random.Random(1), 0
    began = time.monotonic()
    process = start(whole)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 0, said.decode()
    seconds = time.monotonic() - began
    for number in count():
        folder = prepared(tmp_path / str(number))
        while True:
            process = start(folder)
            try:
                _, said = process.communicate(timeout=generator.uniform(0, seconds) if kills < 50 else 300)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                kills += 1
                continue
            assert process.returncode == 0, said.decode()
            break
        compared(whole, folder)
        if kills >= 50:
            return
