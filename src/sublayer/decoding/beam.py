"""Beam search: the most probable continuations of one prompt, found breadth first.

B live beams, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .sample import best, log_probabilities
from .slots import Slots


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


def search(
    slots: Slots,
    logits: Tensor,
    *,
    beams: int,
    room: int,
    stop_ids: Collection[int] = (),
    length_penalty: float = 0.0,
) -> list[Hypothesis]:
    """At most `beams` finished hypotheses, the best first; ties rank by beam, then by the lowest id.

    slots: at least `beams` of them, slot 0 holding the prompt; logits [V]: those of the first token. A hypothesis ends
    with a token of stop_ids, or with `room` tokens. In each step the B · V continuations are ranked: those among the
    first `beams` that stop are finished, the best `beams` that do not stop live on. The search ends when no live beam
    can come to score above the worst of `beams` finished ones, whatever its further tokens.
    Source: arXiv 1609.08144, section 7 (penalty and pruning); the stopping rule follows from logprob ≤ 0.
    """
    live, finished, rows = [_Beam()], list[Hypothesis](), logits[None]
    for tokens in range(1, room + 1):
        logprobs = [log_probabilities(row) for row in rows]
        total = torch.stack([row + beam.logprob for row, beam in zip(logprobs, live, strict=True)])
        # Enough for `beams` that live on, even if every stop token of every beam ranks above them.
        ranked = best(total.flatten(), beams + len(live) * len(stop_ids))
        parents, grown = list[int](), list[_Beam]()
        for rank, place in enumerate(ranked.tolist()):
            parent, token = divmod(place, total.shape[1])
            if total[parent, token] == -torch.inf:
                break
            beam = live[parent].grow(token, float(logprobs[parent][token]))
            if token in stop_ids and rank < beams:
                finished.append(beam.end("stop", length_penalty))
            elif token not in stop_ids and len(grown) < beams:
                parents.append(parent)
                grown.append(beam)
        if tokens == room:
            finished += [beam.end("length", length_penalty) for beam in grown]
        finished = sorted(finished, key=lambda hypothesis: -hypothesis.score)[:beams]
        if tokens == room or not grown:
            break
        if len(finished) == beams and finished[-1].score >= _bound(grown[0].logprob, tokens, room, length_penalty):
            break
        slots.reorder(parents)
        live, rows = grown, slots.decode([beam.ids[-1] for beam in grown])
    return finished


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
