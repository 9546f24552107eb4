"""What holds for every test: fixed random numbers, no network for model hubs, the same examples on every run, and the
same terminal, whatever the environment says of it."""

import os

import pytest
import torch
from hypothesis import settings

# Without a deadline, because a machine under load is no fault of the code.
settings.register_profile("sublayer", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("sublayer")


def pytest_configure() -> None:
    """Before transformers, typer and rich are first imported, which read some of this then."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    for name in ("FORCE_COLOR", "PY_COLORS", "NO_COLOR", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
