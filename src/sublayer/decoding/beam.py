"""Beam search: the most probable continuations of one prompt, found breadth first.

B live beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .sample import best, log_probabilities, without


@dataclass(frozen=True)
class Hypothesis:
    """A continuation: its tokens (the stop token with it), and what the model thinks of them."""

    ids: tuple[int, ...]
    logprob: float
    """Sum of logprobs: log p(ids | prompt)."""
    score: float
    """logprob / ((5 + tokens) / 6)^α, by which hypotheses rank."""
    finish: Literal["stop", "length"]
    logprobs: tuple[float, ...]


class Search:
    """The search of one prompt, step by step: logits of its live beams in, the beams that live on out.

    A hypothesis ends with a token of stop_ids, or with `room` tokens. In each step the B · V continuations are ranked
    (ties by beam, then by the lowest id): those among the first `beams` that stop are finished, the best `beams` that
    do not stop live on. The search ends when no live beam can come to score above the worst of `beams` finished ones,
    whatever its further tokens.
    Source: arXiv 1609.08144, section 7 (penalty and pruning); the stopping rule follows from logprob ≤ 0.
    """

    def __init__(
        self,
        beams: int,
        room: int,
        stop_ids: Collection[int] = (),
        length_penalty: float = 0.0,
        suppressed: Callable[[int], Sequence[int]] = lambda count: (),
    ) -> None:
        self.found: list[Hypothesis] = []
        """At most `beams` finished hypotheses, the best first."""
        self._beams, self._room, self._stop_ids, self._alpha = beams, room, stop_ids, length_penalty
        self._suppressed = suppressed
        self.tokens = 0
        self._live = [_Beam()]

    @property
    def last(self) -> list[int]:
        """The newest token of each live beam."""
        return [beam.ids[-1] for beam in self._live]

    def step(self, logits: Tensor) -> list[int]:
        """logits [B, V], of each live beam's next token (B is 1 before the first). Returns, for each beam that lives
        on, which of them it continues; nothing where the search has ended."""
        logprobs = without(log_probabilities(logits), self._suppressed(self.tokens))
        self.tokens += 1
        before = torch.tensor([beam.logprob for beam in self._live], dtype=logprobs.dtype)
        total = logprobs + before[:, None]
        # Enough for `beams` that live on, even if every stop token of every beam ranks above them.
        ranked = best(total.flatten(), self._beams + len(self._live) * len(self._stop_ids))
        values = total.flatten()[ranked].tolist(), logprobs.flatten()[ranked].tolist()
        parents, grown = list[int](), list[_Beam]()
        for rank, (place, sum_, logprob) in enumerate(zip(ranked.tolist(), *values, strict=True)):
            if sum_ == -torch.inf:
                break
            parent, token = divmod(place, total.shape[1])
            beam = self._live[parent].grow(token, logprob)
            if token in self._stop_ids and rank < self._beams:
                self.found.append(beam.end("stop", self._alpha))
            elif token not in self._stop_ids and len(grown) < self._beams:
                parents.append(parent)
                grown.append(beam)
        if self.tokens == self._room:
            self.found += [beam.end("length", self._alpha) for beam in grown]
        self.found = sorted(self.found, key=lambda hypothesis: -hypothesis.score)[: self._beams]
        self._live = grown
        return [] if self._ended() else parents

    def _ended(self) -> bool:
        if self.tokens == self._room or not self._live:
            return True
        bound = _bound(self._live[0].logprob, self.tokens, self._room, self._alpha)
        return len(self.found) == self._beams and self.found[-1].score >= bound


def penalty(tokens: int, length_penalty: float) -> float:
    """((5 + tokens) / 6)^α. Source: arXiv 1609.08144, eq. 14."""
    return ((5 + tokens) / 6) ** length_penalty


def _bound(logprob: float, tokens: int, room: int, length_penalty: float) -> float:
    """The score that a beam of so many tokens cannot exceed later: log-probabilities only fall, and are below 0.

    The penalty grows or falls with length, so that it is largest at one of the ends.
    """
    return logprob / max(penalty(tokens + 1, length_penalty), penalty(room, length_penalty))


@dataclass(frozen=True)
class _Beam:
    ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    logprob: float = 0.0

    def grow(self, token: int, logprob: float) -> _Beam:
        return _Beam((*self.ids, token), (*self.logprobs, logprob), self.logprob + logprob)

    def end(self, finish: Literal["stop", "length"], length_penalty: float) -> Hypothesis:
        score = self.logprob / penalty(len(self.ids), length_penalty)
        return Hypothesis(self.ids, self.logprob, score, finish, self.logprobs)
