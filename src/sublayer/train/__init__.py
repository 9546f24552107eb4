"""Training: a run from text to a model, and the parts that it is made of."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import Run, read_run
    from .run import Result, train

__all__ = ["Result", "Run", "read_run", "train"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in __all__:
        raise AttributeError(f"module 'sublayer.train' has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{'config' if name in ('Run', 'read_run') else 'run'}"), name)
