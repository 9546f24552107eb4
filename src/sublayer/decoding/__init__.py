"""Generation from a model: sampling, beam search, streaming, translation, transcription, vectors of texts, actions."""

from ..weights.pooling import Pooling, read_pooling
from .act import act, forecast
from .beam import Hypothesis
from .embed import embed
from .generate import Event, Generated, Stream, generate, stream
from .kept import KeptSlot
from .request import Options
from .sample import Sampling, sample
from .transcribe import read_speech, transcribe
from .translate import translate

__all__ = [
    "Event",
    "Generated",
    "Hypothesis",
    "KeptSlot",
    "Options",
    "Pooling",
    "Sampling",
    "Stream",
    "act",
    "embed",
    "forecast",
    "generate",
    "read_pooling",
    "read_speech",
    "sample",
    "stream",
    "transcribe",
    "translate",
]
