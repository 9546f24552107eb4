"""Generation from a model: sampling, beam search, streaming, translation."""

from .beam import Hypothesis
from .generate import Event, Generated, Stream, generate, stream
from .request import Options
from .sample import Sampling, sample
from .translate import translate

__all__ = [
    "Event",
    "Generated",
    "Hypothesis",
    "Options",
    "Sampling",
    "Stream",
    "generate",
    "sample",
    "stream",
    "translate",
]
