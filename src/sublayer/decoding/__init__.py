"""Generation from a model: sampling, beam search, streaming, translation, transcription, actions."""

from .act import act, forecast
from .beam import Hypothesis
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
    "Sampling",
    "Stream",
    "act",
    "forecast",
    "generate",
    "read_speech",
    "sample",
    "stream",
    "transcribe",
    "translate",
]
