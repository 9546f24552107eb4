"""From one row's logits to a token: filters in one fixed order, then one draw that depends on seed and count alone.

Rows are treated one by one, in fp64: nothing of a neighbour can reach a row. V vocabulary.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from ..errors import SublayerError
from ..spec import Spec


class Sampling(Spec):
    """How a token is chosen. Every default leaves the model's distribution as it is.

    The order is fixed: repetition penalty → temperature → top-k → top-p → min-p → draw. Each step sees what the one
    before it left; probabilities are taken anew over that. Tokens of equal logits rank by id, the lowest first.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0: the best token is taken and nothing is drawn, whatever the filters say."""
    top_k: int | None = None
    """How many of the best tokens stay; more than V keeps all; None: all."""
    top_p: float = 1.0
    """The fewest best tokens whose probabilities reach it stay; at least one (arXiv 1904.09751)."""
    min_p: float = 0.0
    """Tokens with less than this share of the best token's probability are dropped (arXiv 2407.01082)."""
    repetition_penalty: float = 1.0
    """For tokens of the prompt or the answer so far, logits above 0 are divided by it and others multiplied
    (arXiv 1909.05858, section 4.1); above 1 repeats less."""

    def check(self) -> None:
        self.require(self.temperature >= 0, f"temperature is 0 (take the best token) or above, got {self.temperature}")
        self.require(
            self.top_k is None or self.top_k >= 1, f"top_k={self.top_k} would keep nothing; give 1 or more, or None"
        )
        self.require(0 <= self.top_p <= 1, f"top_p is a probability from 0 to 1, got {self.top_p}")
        self.require(0 <= self.min_p <= 1, f"min_p is a share from 0 to 1, got {self.min_p}")
        # Within these bounds no penalised logit of fp32 overflows fp64.
        self.require(
            0.01 <= self.repetition_penalty <= 100,
            f"repetition_penalty is from 0.01 to 100 (1: none), got {self.repetition_penalty}",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def sample(logits: Tensor, sampling: Sampling, *, seen: Collection[int] = (), seed: int = 0, draw: int = 0) -> int:
    """The id chosen from logits [V]: the best one for temperature 0, else the draw-th draw of the row's seed.

    seen: the tokens that the repetition penalty concerns, those of prompt and answer.
    Raises SublayerError for logits that are no distribution (NaN, +inf, or nothing but −inf).
    """
    if sampling.greedy:
        return int(_finite(_penalised(logits, sampling, seen)).argmax())
    weights = filtered(logits, sampling, seen).exp()
    upto = weights.cumsum(0)
    # u < 1, so that u · total < total: a token of weight 0 is never the first whose sum exceeds it.
    return int(torch.searchsorted(upto, upto[-1] * uniform(seed, draw), right=True))


def filtered(logits: Tensor, sampling: Sampling, seen: Collection[int] = ()) -> Tensor:
    """logits [V] → fp64 [V] on the CPU: what a draw is made from, up to a constant; −inf for dropped tokens.

    The best token always stays, and is 0. sampling.temperature is above 0. Raises SublayerError as `sample` does.
    """
    values = _finite(_penalised(logits, sampling, seen))
    values = (values - values.max()) / sampling.temperature  # the best is 0, so that no temperature overflows
    if sampling.top_k is not None and sampling.top_k < len(values):
        values = _only(values, best(values, sampling.top_k))
    if sampling.top_p < 1:
        values = _only(values, _nucleus(values, sampling.top_p))
    if sampling.min_p > 0:
        values = values.masked_fill(values < math.log(sampling.min_p), -torch.inf)
    return values


def best(values: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest of values [V], in falling order; equal ones by id, the lowest first."""
    if count < len(values):
        ids = (values >= values.topk(count).values[-1]).nonzero()[:, 0]  # with all that tie with the last
    else:
        ids = torch.arange(len(values), device=values.device)
    return ids[values[ids].sort(descending=True, stable=True).indices][:count]


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) from (seed, draw) alone, the same on every machine: 53 bits of a hash.

    Without a generator's hidden state a row can be moved, interrupted and taken up again.
    """
    digest = blake2b(struct.pack("<QQ", seed, draw), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def log_probabilities(logits: Tensor) -> Tensor:
    """log softmax of logits [.., V] → fp64 on the CPU: the model's own, before any step of Sampling.

    Raises SublayerError as `sample` does.
    """
    return _finite(precise(logits)).log_softmax(-1)


def without(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """logits [.., V] with −inf for ids: nothing chooses them."""
    return logits.index_fill(-1, torch.tensor(ids, device=logits.device), -torch.inf) if ids else logits


def precise(logits: Tensor) -> Tensor:
    """In fp64 on the CPU, where every device's rows are sampled alike."""
    return logits.to("cpu", torch.float64)


def _penalised(logits: Tensor, sampling: Sampling, seen: Collection[int]) -> Tensor:
    values = precise(logits)
    if not seen or sampling.repetition_penalty == 1:
        return values
    ids, penalty = torch.tensor(sorted(seen)), sampling.repetition_penalty
    chosen = values[ids]
    return values.index_copy(0, ids, torch.where(chosen > 0, chosen / penalty, chosen * penalty))


def _finite(values: Tensor) -> Tensor:
    largest = values.amax(-1)  # NaN if any is NaN
    if not bool(largest.isfinite().all()):
        bad = float(largest[~largest.isfinite()].reshape(-1)[0])
        raise SublayerError(f"the model's logits are no distribution: their maximum is {bad}")
    return values


def _nucleus(values: Tensor, top_p: float) -> Tensor:
    """Ids of the fewest best tokens whose probabilities reach top_p; values are at most 0."""
    weights = values.exp()
    wanted = top_p * weights.sum()
    inside, ids = values.new_empty(0, dtype=torch.long), best(values, min(256, int(weights.count_nonzero())))
    if weights[ids].sum() < wanted:
        inside, ids = _bracket(values, weights, wanted)
    before = weights[inside].sum() + weights[ids].cumsum(0) - weights[ids]  # what the better ones have
    last = ids[before < wanted]
    return torch.cat([inside, last if len(inside) or len(last) else ids[:1]])


def _bracket(values: Tensor, weights: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """(ids that are inside the nucleus, ids in falling order among which is its last one), without sorting all of V.

    The range in which the last one's value lies is halved until few are left in it.
    """
    low, high = max(float(values.min()), -746.0), 0.0  # e^−746 is 0 in fp64
    for _ in range(10):
        middle = (low + high) / 2
        if torch.where(values > middle, weights, 0.0).sum() < wanted:
            high = middle
        else:
            low = middle
    ids = ((values >= low) & (values <= high)).nonzero()[:, 0]
    return (values > high).nonzero()[:, 0], ids[best(values[ids], len(ids))]


def _only(values: Tensor, ids: Tensor) -> Tensor:
    return torch.full_like(values, -torch.inf).index_copy(0, ids, values[ids])
