"""What the module of a family says that no architecture of Hugging Face's is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Row
from ..nn.sublayer import Model

NAMES: list[Row] = []
PREFIX = ""
IGNORED: tuple[str, ...] = ()
HF: dict[str, Any] = {}


def to_hf(model: Model) -> Mapping[str, Any]:
    """Raises SpecError: there is none."""
    raise SpecError(f"no Hugging Face architecture is this model of width {model.dim}")
