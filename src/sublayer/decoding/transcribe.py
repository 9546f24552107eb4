"""Transcription: recordings in, what is said in them out, by a Whisper.

N samples of a recording, T frames, F mel bands.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ..data.audio import HOP, RATE, log_mel
from ..errors import InputError, SpecError, UsageError
from ..nn.frames import Frames
from ..nn.sublayer import ModelOp
from ..spec import Spec
from ..text.ending import read_json
from ..text.tokenizer import Tokenizer, special_id
from .generate import Stream
from .request import read_options, read_rows
from .slots import evaluating

LOOK = 5.0
"""Seconds before the end of a window in which a longer recording may be cut."""
SILENT = 1e-3
"""Beside the loudest sample of its recording, what a window that holds nothing stays below: 60 dB."""


class Speech(Spec):
    """What a checkpoint says about how its answers begin. The tokens themselves are the tokenizer's special ones."""

    languages: bool = False
    """Whether the language and the task stand before an answer: models of English alone have neither."""
    suppress: tuple[int, ...] = ()
    """Tokens that are never chosen: sounds that are not speech, and marks."""
    suppress_first: tuple[int, ...] = ()
    """Tokens with which no answer begins."""


def read_speech(folder: Path | str) -> Speech:
    """From generation_config.json, else from config.json, as older checkpoints have it.

    Raises InputError for a value of the wrong type.
    """
    found: dict[str, Any] = {}
    for name in ("config.json", "generation_config.json"):
        path = Path(folder) / name
        found |= read_json(path) if path.is_file() else {}
    # The vocabulary of English alone has one token less.
    several = bool(found.get("is_multilingual", found.get("vocab_size") != 51864))
    try:
        return Speech(several, found.get("suppress_tokens") or (), found.get("begin_suppress_tokens") or ())
    except SpecError as error:
        raise InputError(f"{folder}: suppress_tokens and begin_suppress_tokens are lists of ids: {error}") from None


def transcribe(
    model: ModelOp,
    tokenizer: Tokenizer,
    recordings: Sequence[Tensor],
    speech: Speech,
    *,
    language: str | None = None,
    task: str = "transcribe",
    beams: int = 1,
    slots: int = 8,
    progress: Callable[[int, int, float], object] | None = None,
) -> list[str]:
    """What is said in each recording, samples [N] as `sublayer.data.audio.read_audio` gives them.

    Recordings longer than the model's window (30 s) are cut where they are quietest in the last 5 s of each window;
    windows 60 dB below the loudest sample hold nothing. language: "en", "de", …; None: what the model takes the first
    window of each recording for. task: "transcribe", or "translate" into English. beams=1 takes the best token each
    time. progress(windows done, windows, share): after each window.

    Raises UsageError for a model that hears no frames, a language or a task that it does not know, or a tokenizer
    without Whisper's special tokens.
    """
    front = None if model.encoder is None else model.encoder.spec.embed
    if not isinstance(front, Frames):
        raise UsageError("the model hears no sound: transcription takes a Whisper")
    marks = _Marks(tokenizer, cast(int, model.spec.vocab))
    if not speech.languages and (language not in (None, "en") or task != "transcribe"):
        raise UsageError("the model knows English only: it takes no other language, and no other task")
    parts = [windows(samples, 2 * front.length * HOP) for samples in recordings]
    frames: list[Tensor] = []
    prompts: list[list[int]] = []
    with evaluating(model):
        for windows_ in parts:
            heard = [log_mel(part, front.features, seconds=2 * front.length * HOP / RATE) for part in windows_]
            frames += heard
            if heard:
                prompts += [marks.prompt(model, heard[0], speech, language, task)] * len(heard)
    if not frames:
        return [""] * len(parts)
    asked: dict[str, Any] = {"beams": beams, "slots": slots, "stop_ids": (marks.end,), "max_tokens": 224}
    asked |= {} if beams > 1 else {"temperature": 0.0}
    asked |= {"suppress": (*speech.suppress, *marks.times), "suppress_first": speech.suppress_first}
    options = read_options(asked)
    stream, done = Stream(model, read_rows(model, prompts, frames, None, tokenizer, options), options, tokenizer), 0
    for event in stream:
        if event.finish is not None:
            done += 1
            if progress is not None:
                progress(done, len(frames), done / len(frames))
    texts = [(made.text or "").strip() for made in stream.generated()]
    ends = list(accumulate(map(len, parts)))
    return [" ".join(filter(None, texts[end - len(part) : end])) for part, end in zip(parts, ends, strict=True)]


def windows(samples: Tensor, longest: int) -> list[Tensor]:
    """samples [N] in parts of at most `longest`, those left out in which nothing is heard."""
    if samples.dim() != 1:
        raise InputError(f"a recording is one row of samples [N], got {list(samples.shape)}")
    loudest, found = samples.abs().amax() if len(samples) else 0.0, list[Tensor]()
    while len(samples):
        end = len(samples) if len(samples) <= longest else _quietest(samples, longest)
        part, samples = samples[:end], samples[end:]
        if part.abs().amax() > SILENT * loudest:
            found.append(part)
    return found


def _quietest(samples: Tensor, longest: int) -> int:
    """Where to cut, within the last seconds of the first window: the middle of the quietest fifth of a second."""
    look = min(round(LOOK * RATE), longest)
    width = min(RATE // 5, look)
    hop = max(1, width // 4)
    power = samples[longest - look : longest].unfold(0, width, hop).square().mean(1)
    return longest - look + int(power.argmin()) * hop + width // 2


class _Marks:
    """Whisper's special tokens, in the ids of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        self._tokenizer = tokenizer
        self.start, self.no_times, self.end = map(
            self._id, ("<|startoftranscript|>", "<|notimestamps|>", "<|endoftext|>")
        )
        self.times = range(self.no_times + 1, vocab)  # they follow, and not every tokenizer names them

    def prompt(self, model: ModelOp, frames: Tensor, speech: Speech, language: str | None, task: str) -> list[int]:
        """What stands before an answer to frames [T, F]."""
        if not speech.languages:
            return [self.start, self.no_times]
        if task not in ("transcribe", "translate"):
            raise UsageError(f'task {task!r}: "transcribe", or "translate" into English')
        known = range(self.start + 1, self._id("<|translate|>"))  # the languages lie between the two
        if language is None:
            spoken = known[int(self._first(model, frames)[known.start : known.stop].argmax())]
        else:
            spoken = special_id(self._tokenizer, f"<|{language}|>")
        if spoken is None or spoken not in known:
            raise UsageError(f"language {language!r} is none that the model knows; they are called as in en, de, zh")
        return [self.start, spoken, self._id(f"<|{task}|>"), self.no_times]

    @torch.inference_mode()
    def _first(self, model: ModelOp, frames: Tensor) -> Tensor:
        """[V]: the logits of an answer's first token."""
        device = next(model.parameters()).device
        return model(torch.tensor([[self.start]], device=device), source=frames[None].to(device))[0, -1]

    def _id(self, name: str) -> int:
        found = special_id(self._tokenizer, name)
        if found is None:
            raise UsageError(
                f"the tokenizer has no special token {name!r}, with which a Whisper's answers begin or end"
            )
        return found
