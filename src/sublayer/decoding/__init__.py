"""Generation from a model: sampling, beam search, streaming."""

from .beam import Hypothesis
from .generate import Event, Generated, Stream, generate, stream
from .request import Options
from .sample import Sampling, sample

__all__ = ["Event", "Generated", "Hypothesis", "Options", "Sampling", "Stream", "generate", "sample", "stream"]
