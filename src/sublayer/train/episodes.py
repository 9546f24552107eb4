"""The feed of episodes: observations and the actions that followed them, in an order that seed and step decide."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ..data.bins import Bins
from ..data.episodes import Episode, Moments, all_actions, episodes, parted, pixels
from ..errors import InputError, UsageError
from ..files import write_json
from ..weights.load import read_json
from . import checkpoint
from .actions import BehaviourCloning, told
from .batch import Batch
from .config import Run
from .examples import framed
from .language import Words
from .prepare import tokenizer_of
from .view import View


class EpisodeFeed:
    """Moments of episodes; whole episodes are held out. The ranges of actions stand in the run's bins.json."""

    length = None
    bytes_per_token: float = 0.0

    def __init__(self, run: Run, out: Path, view: View) -> None:
        source, *others = run.data.all_sources()
        if others:
            raise UsageError("data.sources: episodes are read from one source: give data.paths")
        self.run, self.out, self.view = run, out, view
        self.objective = cast(BehaviourCloning, run.objective)
        found = episodes(source.paths, without=out)
        self.training, self.kept = (
            (found, episodes(run.data.judge, without=out)) if run.data.judge else parted(found, run.data.held)
        )
        first = self.kept[0]
        if (first.dimensions, first.shape) != (found[0].dimensions, found[0].shape):
            raise InputError(f"{first.path}: actions or images of other sizes than in {found[0].path}")
        self.prefix = source.prefix
        self.tokenizer = tokenizer_of(run, out, view, self._texts)
        self.words = Words(self.tokenizer)
        self.sizes: Mapping[str, Any] = {"vocab": self.tokenizer.size + self.objective.bins}
        if first.shape is not None:
            _, channels, height, width = first.shape
            self.sizes |= {"image": height if height == width else (height, width), "channels": channels}

    def open(self) -> None:
        path, objective = self.out / "bins.json", self.objective
        if checkpoint.saved(self.out / "checkpoints"):
            self.bins = Bins.from_json(read_json(path))
        else:
            actions = all_actions(self.training)
            self.bins = Bins.spanning(actions, objective.bins, self.tokenizer.size, objective.tails)
            write_json(path, self.bins.to_json())
        self.moments = Moments(self.training, objective.steps, self.run.seed)
        short = len(self.training) - len(self.moments.source)
        over = f"; {short:,} of fewer than {objective.steps} steps are left out" if short else ""
        self.view.note(f"{len(self.training):,} episodes, {len(self.moments):,} moments{over}")

    def at(self, step: int, rank: int = 0, ranks: int = 1) -> tuple[Batch, Sequence[str]]:
        rows = self.run.train.batch
        if rows % ranks or not 0 <= rank < ranks:
            raise UsageError(f"a batch of {rows} rows cannot be shared by {ranks} ranks")
        share = rows // ranks
        first = step * rows + rank * share
        return self._batch([self.moments.drawn(row) for row in range(first, first + share)])

    def held(self, limit: int | None, stride: int | None = None) -> tuple[int, Iterator[tuple[Batch, int]]]:
        """With a limit, about so many bins of actions, of moments evenly chosen."""
        moments, rows = Moments(self.kept, self.objective.steps), max(self.run.train.batch, 64)
        each, count = self.objective.steps * self.kept[0].dimensions, len(moments)
        if limit is not None:
            count = min(count, max(1, limit // each))
        chosen = np.linspace(0, len(moments) - 1, count).round().astype(np.int64).tolist()
        starts = range(0, count, rows)

        def batches() -> Iterator[tuple[Batch, int]]:
            for start in starts:
                yield self._batch([moments[number] for number in chosen[start : start + rows]])[0], 0

        return len(starts), batches()

    def _batch(self, found: Sequence[tuple[Episode, int]]) -> tuple[Batch, Sequence[str]]:
        texts = [framed(self.words, self.prefix + episode.instruction) for episode, _ in found]
        done = [
            self.bins.encode(episode.actions(at, at + self.objective.steps)).ravel().tolist() for episode, at in found
        ]
        longest = max(len(text) + len(ids) for text, ids in zip(texts, done, strict=True))
        if longest > self.run.data.length:
            raise InputError(f"an instruction and its actions are {longest} tokens: raise data.length")
        images = None
        if found[0][0].shape is not None:
            images = pixels(torch.stack([episode.images(at) for episode, at in found]))
        return told(texts, done, images), [f"{episode.path}, step {at}" for episode, at in found]

    def _texts(self) -> Iterator[str]:
        for episode in self.training:
            yield self.prefix + episode.instruction
