"""The bench of loading: its smallest form runs, and private memory is told from a file's pages."""

import json
import mmap
import os
from pathlib import Path

import pytest

from bench import harness, loading
from bench.harness import Options


def test_the_smallest_form_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "private", lambda folder, dtype: (101.0, 100.0))
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    loading.main(Options(quick=True))
    rows = json.loads((tmp_path / "loading.json").read_text())["rows"]
    cases = ["float32", "q4_0 as float32"]
    assert [row["name"] for row in rows] == [f"{case}: {what}" for case in cases for what in ("time", "memory")]
    assert rows[1]["ratio"] == 1.01


def test_private_memory_is_what_no_file_backs(tmp_path: Path) -> None:
    size = 64 << 20
    with open(tmp_path / "file", "wb+") as file:
        file.truncate(size)
        before = loading.anonymous(os.getpid())
        with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY) as pages:
            sum(pages[::4096])
            assert loading.anonymous(os.getpid()) < before + size // 2
            pages[:] = bytes(size)
            assert loading.anonymous(os.getpid()) > before + size // 2
    assert loading.anonymous(0) == 0
