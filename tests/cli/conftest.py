import math

import pytest

from sublayer.cli import progress


@pytest.fixture(autouse=True)
def untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job tells how far it has come, however slow the machine is."""
    monkeypatch.setattr(progress, "AFTER", math.inf)
