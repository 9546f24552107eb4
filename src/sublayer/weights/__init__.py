"""Weights in and out: folders in Sublayer's layout and in Hugging Face's, and GGUF files."""

from typing import TYPE_CHECKING, Any

from .load import load
from .save import save

if TYPE_CHECKING:
    from .exports import export

__all__ = ["export", "load", "save"]


def __getattr__(name: str) -> Any:
    if name != "export":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .exports import export  # with all that reads tokenizers, for which a model need not wait

    return export
