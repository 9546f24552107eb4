"""Evaluation: how well a model tells text, and the tasks of lm-evaluation-harness (in harness.py, which needs it)."""

from .compare import Comparison, compare
from .text import Texts, begin_token, score

__all__ = ["Comparison", "Texts", "begin_token", "compare", "score"]
