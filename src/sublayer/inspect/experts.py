"""What the experts of a model do: how busy each is, who works with whom, which tokens go where.

E experts, k experts a token, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..decoding.slots import evaluating
from ..errors import InputError
from ..nn.moe import MoEOp, Routing
from ..nn.sublayer import ModelOp
from ..step import Step

Routings = dict[str, list[Routing]]


@dataclass(frozen=True)
class Experts:
    """What one layer's router did with the real tokens of some batches."""

    tokens: int
    """How many there were."""
    sent: Tensor
    """[E] int64: how many each expert received."""
    dropped: int
    """Choices that met a full expert."""
    weight: Tensor
    """[E]: the mean weight of an expert's output, where it was one of the chosen; 0 for one that never was."""
    together: Tensor
    """[E, E] int64: tokens that chose both; on the diagonal, tokens that chose the one."""
    by_token: Tensor
    """[E, V] int64: how often each token id was sent to each expert."""
    doubt: float
    """Mean entropy of a token's scores, in nats: 0 where the router is certain, log E where it knows nothing."""

    @property
    def load(self) -> Tensor:
        """[E]: each expert's share of all that was sent; 1/E each where they are equally busy."""
        return self.sent / self.sent.sum().clamp(min=1)

    @property
    def entropy(self) -> float:
        """Of the load, in nats: log E where experts are equally busy, 0 where one does everything."""
        return float(torch.special.entr(self.load).sum())

    def most(self, expert: int, count: int = 10) -> list[tuple[int, int]]:
        """[(token id, how often)]: what an expert received most, the most frequent first."""
        times, ids = self.by_token[expert].topk(min(count, self.by_token.shape[1]))
        return [(int(i), int(n)) for i, n in zip(ids, times, strict=True) if n > 0]


def experts(model: ModelOp, batches: Iterable[Tensor | tuple[Tensor, Step]]) -> dict[str, Experts]:
    """Runs a model over batches and says what its routers did: {layer: Experts}, layers named as in the model.

    batches: ids [B, L], or (ids, step) with padding and documents, of a model that reads nothing else; it runs in
    evaluation mode. Raises InputError for a model without experts, and for no batches.
    """
    with evaluating(model), torch.no_grad(), routings(model) as seen:
        layers: dict[str, list[tuple[Routing, Tensor]]] = {}
        for batch in batches:
            ids, step = batch if isinstance(batch, tuple) else (batch, Step())
            seen.clear()
            model(ids, step)
            for name, calls in seen.items():
                layers.setdefault(name, []).extend((routing, ids) for routing in calls)
    if not layers:
        raise InputError("no expert was asked: the model has no mixture of experts, or there were no batches")
    vocab = model.spec.vocab or 1
    return {name: _summary(calls, vocab) for name, calls in layers.items()}


@contextmanager
def routings(model: nn.Module) -> Iterator[Routings]:
    """Within it, the routing of every forward pass: {layer: a Routing for each call}, as it was computed there."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoEOp)}
    watches = [layer.watch for layer in layers.values()]
    seen: Routings = {}
    try:
        for name, layer in layers.items():
            layer.watch = _recorder(seen, name.removesuffix(".op"))
        yield seen
    finally:
        for layer, watch in zip(layers.values(), watches, strict=True):
            layer.watch = watch


def _recorder(seen: Routings, name: str) -> Callable[[Routing], None]:
    def record(routing: Routing) -> None:
        logits, scores, weights = (part.detach() for part in (routing.logits, routing.scores, routing.weights))
        seen.setdefault(name, []).append(routing._replace(logits=logits, scores=scores, weights=weights))

    return record


def _summary(calls: list[tuple[Routing, Tensor]], vocab: int) -> Experts:
    E = calls[0][0].scores.shape[-1]
    device = calls[0][0].scores.device
    sent = torch.zeros(E, dtype=torch.long, device=device)
    weight = torch.zeros(E, dtype=torch.float64, device=device)
    together = torch.zeros(E, E, dtype=torch.long, device=device)
    by_token = torch.zeros(E, vocab, dtype=torch.long, device=device)
    tokens, dropped, doubt = 0, 0, 0.0
    for routing, ids in calls:
        real = torch.ones_like(ids, dtype=torch.bool) if routing.real is None else routing.real
        chosen, weights, scores = routing.chosen[real], routing.weights[real], routing.scores[real]
        there = torch.ones_like(chosen, dtype=torch.bool) if routing.sent is None else routing.sent[real]
        tokens += len(chosen)
        dropped += int((~there).sum())
        sent += torch.bincount(chosen[there], minlength=E)
        weight += torch.bincount(chosen[there], weights[there].double(), minlength=E)
        one = torch.zeros(len(chosen), E, dtype=torch.double, device=device).scatter_(1, chosen, 1)
        together += (one.t() @ one).long()
        pairs = chosen * vocab + ids[real][:, None]
        by_token += torch.bincount(pairs[there], minlength=E * vocab).view(E, vocab)
        shares = scores.double() / scores.double().sum(-1, keepdim=True)
        doubt += float(torch.special.entr(shares).sum())
    mean = weight / sent.clamp(min=1)
    return Experts(tokens, sent, dropped, mean, together, by_token, doubt / max(tokens, 1))
