"""Weights in and out of folders of safetensors, in Sublayer's layout and in Hugging Face's."""

from .load import load
from .save import save

__all__ = ["load", "save"]
