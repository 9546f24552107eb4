"""What holds for the tests of data."""

import os

import pytest


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of the time of these tests, and nothing that they could see."""
    monkeypatch.setattr(os, "fsync", lambda file: None)
