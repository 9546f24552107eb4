"""What holds for the tests of data, and their fixtures."""

import errno
import math
import os
from typing import Any

import numpy as np
import pytest

from sublayer.data import shards, writer
from tests.data.corpora import Counting


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of these tests, and nothing that they could see."""
    monkeypatch.setattr(os, "fsync", lambda file: None)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of progress as if twenty documents were a large corpus."""
    monkeypatch.setattr(shards, "GROUP", 200)
    monkeypatch.setattr(shards, "RECORD", 1000)


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    monkeypatch.setattr(Counting, "count", 0)
    return Counting(("<|end|>",))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """[how many more writes of tokens there is room for]; without end until a test says."""
    real, room = writer.put, [math.inf]

    def put(file: Any, values: np.ndarray) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, values)

    monkeypatch.setattr(writer, "put", put)
    return room
