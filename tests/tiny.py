"""The tiny Llama that many tests build on."""

from typing import Any

from sublayer.nn.sublayer import Model
from sublayer.recipes import llama
from sublayer.recipes.llama import TINY


def tiny(**changes: Any) -> Model:
    """Its spec, with some of the recipe's arguments changed."""
    return llama(**TINY | changes)
