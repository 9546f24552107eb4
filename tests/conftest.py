"""What holds for every test: fixed random numbers, no network for model hubs, and the same examples on every run."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is first imported

import pytest
import torch
from hypothesis import settings

# Without a deadline, because a machine under load is no fault of the code.
settings.register_profile("sublayer", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("sublayer")


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
