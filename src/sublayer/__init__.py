"""Sublayer: every architecture is data, and one set of parts builds it, runs it and shows what it does.

Importing the package imports none of its parts, so that a command line or a tokenizer does not wait for torch:
each public name below is fetched from its module when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sublayer.errors import nearest

if TYPE_CHECKING:
    from sublayer import decoding, eval, inspect, nn, recipes, text, train, weights
    from sublayer.nn.attend import attend
    from sublayer.nn.sublayer import Model
    from sublayer.spec import Spec
    from sublayer.state import State
    from sublayer.step import Step
    from sublayer.weights import load, save

__version__ = "0.1.0"

__all__ = [
    "Model",
    "Spec",
    "State",
    "Step",
    "attend",
    "decoding",
    "eval",
    "inspect",
    "load",
    "nn",
    "recipes",
    "save",
    "text",
    "train",
    "weights",
]

_HOMES = {
    "Model": "sublayer.nn.sublayer",
    "Spec": "sublayer.spec",
    "State": "sublayer.state",
    "Step": "sublayer.step",
    "attend": "sublayer.nn.attend",
    "load": "sublayer.weights",
    "save": "sublayer.weights",
}  # the other names are packages


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'sublayer' has no attribute {name!r}{nearest(name, __all__)}")
    if name not in _HOMES:
        return import_module(f"sublayer.{name}")
    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
