"""Evaluation: how well a model tells text, and the tasks of lm-evaluation-harness (in harness.py, which needs it)."""

from .text import Texts, begin_token, score

__all__ = ["Texts", "begin_token", "score"]
