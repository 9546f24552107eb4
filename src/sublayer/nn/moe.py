"""Mixture of experts: a router sends each token to a few of many feed-forward layers (arXiv 1701.06538).

B batch, L length, D width, E experts, k experts a token, T tokens (B · L).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from ..spec import Spec
from ..state import State
from ..step import Step
from .experts import ExpertsOp
from .feed_forward import FeedForward
from .initialise import Init
from .op import Context, Extras, Op, Part
from .projection import Projection


class Router(Spec):
    """How a token chooses its experts, and what keeps the experts equally busy."""

    active: int = 2
    """k, experts a token is sent to."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """What the router's logits become: shares of all experts, or of each alone (DeepSeek-V3)."""
    renormalise: bool = True
    """Whether the k weights are divided by their sum."""
    scale: float = 1.0
    """What the weights are multiplied by, after that."""
    bias: bool = False
    """Whether the logits have a bias."""
    groups: int = 1
    """Groups that the experts are divided into; a token's experts come from the best of them."""
    active_groups: int = 1
    """How many groups those are."""
    group_votes: int = 2
    """How many of its experts, the best, a group counts as much as together: 2 in DeepSeek-V3 (arXiv 2412.19437,
    section 2.1.2), 1 in DeepSeek-V2."""
    balance_rate: float | None = None
    """How far `balance` moves each expert's selection bias, which joins the scores for the choice alone; None: there
    is no such bias (arXiv 2408.15664)."""
    capacity: int | None = None
    """Tokens of one document in a call that an expert takes; later ones are dropped, and get nothing from it."""
    capacity_factor: float | None = None
    """c: an expert takes c · k · tokens / E of a call's tokens, rounded up (arXiv 2101.03961, eq. 3)."""
    jitter: float = 0.0
    """ε: while training, the router's input is multiplied by random numbers from 1 − ε to 1 + ε."""
    balance_loss: float = 0.0
    """α of Switch's auxiliary loss α · E · Σ f P: f is the share of tokens sent to an expert (which sum to k), P its
    mean score (arXiv 2101.03961, eq. 4). A model adds up the losses of its layers."""
    z_loss: float = 0.0
    """What the mean of logsumexp(logits)² is multiplied by as an auxiliary loss (arXiv 2202.08906, eq. 5)."""

    def check(self) -> None:
        self.require(self.active > 0, f"active must be above 0, got {self.active}")
        self.require(
            0 < self.active_groups <= self.groups,
            f"active_groups={self.active_groups} must be from 1 to groups={self.groups}",
        )
        self.require(self.group_votes > 0, f"group_votes must be above 0, got {self.group_votes}")
        self.require(self.capacity is None or self.capacity > 0, f"capacity must be above 0, got {self.capacity}")
        self.require(
            self.capacity_factor is None or self.capacity_factor > 0,
            f"capacity_factor must be above 0, got {self.capacity_factor}",
        )
        self.require(self.capacity is None or self.capacity_factor is None, "give capacity or capacity_factor")
        self.require(0 <= self.jitter < 1, f"jitter is from 0 to below 1, got {self.jitter}")
        for name in ("balance_rate", "balance_loss", "z_loss"):
            value = getattr(self, name)
            self.require(value is None or value >= 0, f"{name} must be at least 0, got {value}")


class MoE(Part):
    """Σ weight · expert(x) over the experts that the router chose, plus the shared expert."""

    experts: int
    """E."""
    expert: FeedForward
    """The shape of each."""
    router: Router = Router()
    """How tokens choose."""
    shared: FeedForward | None = None
    """A layer that every token goes through beside its experts."""
    shared_gated: bool = False
    """Whether its output is multiplied by sigmoid(w · x), a number a token (Qwen2-MoE)."""

    def check(self) -> None:
        router = self.router
        self.require(self.experts > 0, f"experts must be above 0, got {self.experts}")
        self.require(
            self.experts % router.groups == 0,
            f"router.groups={router.groups} do not divide experts={self.experts}",
        )
        choice = self.experts // router.groups * router.active_groups
        self.require(router.active <= choice, f"router.active={router.active} is above the {choice} to choose from")
        self.require(
            router.groups == 1 or self.experts >= router.group_votes * router.groups,
            f"router.groups={router.groups}: a group is judged by its best router.group_votes={router.group_votes} "
            "experts, so it needs as many",
        )
        self.require(self.shared is not None or not self.shared_gated, "shared_gated needs a shared expert")

    def build(self, dim: int, context: Context) -> MoEOp:
        return MoEOp(self, dim, context)


class Routing(NamedTuple):
    """Where the tokens of a call went."""

    logits: Tensor
    """[B, L, E], of the router, in fp32 at least."""
    scores: Tensor
    """[B, L, E]."""
    chosen: Tensor
    """[B, L, k] int64, the best first."""
    weights: Tensor
    """[B, L, k], what their outputs are multiplied by."""
    sent: Tensor | None
    """[B, L, k] bool: not for padding, and not where an expert is full; None: everywhere."""
    real: Tensor | None
    """[B, L] bool: no padding; None: all tokens are real."""


class MoEOp(Op):
    """[B, L, D] → [B, L, D]; while training also auxiliary losses, means over the real tokens."""

    def __init__(self, spec: MoE, dim: int, context: Context) -> None:
        super().__init__()
        self.spec = spec
        self.watch: Callable[[Routing], None] | None = None  # is told the routing of each call
        self.router = Projection(dim, spec.experts, spec.router.bias)
        self.experts = ExpertsOp(spec.expert, spec.experts, dim)
        self.shared = spec.shared.build(dim, context) if spec.shared else None
        self.shared_gate = Projection(dim, 1, bias=False) if spec.shared_gated else None
        one = sum(parameter[0].numel() for parameter in self.experts.parameters())
        self.idle = (spec.experts - spec.router.active) * one
        self.selection_bias: nn.Parameter | None = None
        if spec.router.balance_rate is not None:
            # Moved by `balance`, not by gradients; a parameter, for checkpoints hold it.
            self.selection_bias = nn.Parameter(torch.empty(spec.experts), requires_grad=False)
            self.load = nn.Buffer(torch.zeros(spec.experts, dtype=torch.long), persistent=False)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        if self.selection_bias is not None:
            self.selection_bias.zero_()

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor | tuple[Tensor, Extras]:
        routing = self.route(x, step)
        if self.watch is not None:
            self.watch(routing)
        y = self._send(x, routing)
        if self.shared is not None:
            shared = self.shared(x)
            y = y + (shared if self.shared_gate is None else torch.sigmoid(self.shared_gate(x)) * shared)
        extras = self._losses(routing) if self.training else {}
        return (y, extras) if extras else y

    def route(self, x: Tensor, step: Step) -> Routing:
        """The experts of each token, chosen in fp32 at least: x [B, L, D]."""
        router = self.spec.router
        real = None if step.segment is None else step.segment != 0
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            inputs = x.to(wide)
            if self.training and router.jitter:
                inputs = inputs * torch.empty_like(inputs).uniform_(1 - router.jitter, 1 + router.jitter)
            bias = None if self.router.bias is None else self.router.bias.to(wide)  # pyright: ignore[reportUnnecessaryComparison]
            logits = nn.functional.linear(inputs, self.router.weight.to(wide), bias)
            scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
            chosen = self._choose(scores.detach())
            weights = scores.gather(-1, chosen)
            if router.renormalise:
                weights = weights / (weights.sum(-1, keepdim=True) + TINY)
            weights = weights * router.scale if router.scale != 1.0 else weights
        sent = None if real is None else real[..., None].expand_as(chosen)
        if router.capacity is not None or router.capacity_factor is not None:
            within = self._within_capacity(chosen, real, step)
            sent = within if sent is None else within & sent
        if self.selection_bias is not None and self.training and torch.is_grad_enabled() and not _again():
            self.load += _count(chosen, real, self.spec.experts)
        return Routing(logits, scores, chosen, weights, sent, real)

    @torch.no_grad()
    def balance(self, reduce: Callable[[Tensor], object] | None = None, *, move: bool = True) -> None:
        """Moves the selection bias by the balance rate: up for experts below the mean load since the last call.

        The load is counted by the forward passes of training, over all real tokens of all micro-batches; `reduce`
        adds up a tensor over ranks, in place. move=False forgets the load: for a step that was not taken. Without a
        selection bias it does nothing. Source: arXiv 2408.15664, algorithm 1.
        """
        if self.selection_bias is None:
            return
        if reduce is not None:
            reduce(self.load)
        if move:
            load = self.load.double()
            rate = self.spec.router.balance_rate or 0.0
            self.selection_bias.add_(rate * torch.sign(load.mean() - load))
        self.load.zero_()

    def _choose(self, scores: Tensor) -> Tensor:
        """[…, k]: the experts with the highest scores, of the best groups."""
        router = self.spec.router
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if router.active_groups < router.groups:
            grouped = scores.view(*scores.shape[:-1], router.groups, -1)
            best = grouped.topk(router.group_votes, -1).values.sum(-1).topk(router.active_groups, -1).indices
            open_groups = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores = torch.where(open_groups[..., None], grouped, -torch.inf).flatten(-2)
        return scores.topk(router.active, -1).indices

    def _within_capacity(self, chosen: Tensor, real: Tensor | None, step: Step) -> Tensor:
        """[B, L, k] bool: choices that are among the first of their expert, in the order of tokens."""
        router, E = self.spec.router, self.spec.experts
        queue = chosen if real is None else torch.where(real[..., None], chosen, E)
        if router.capacity_factor is not None:
            tokens = chosen[..., 0].numel() if real is None else real.sum()
            share = torch.as_tensor(router.capacity_factor * router.active * tokens / E, device=chosen.device)
            return _rank(queue) < share.ceil()
        assert router.capacity is not None
        document = step.shared.document if step.shared is not None else None
        rows = torch.arange(len(chosen), device=chosen.device)[:, None]
        key = rows if document is None else rows * (document.max() + 1) + document
        return _rank(key[..., None] * (E + 1) + queue) < router.capacity

    def _send(self, x: Tensor, routing: Routing) -> Tensor:
        """The weighted sums of the experts' outputs, [B, L, D]."""
        E, chosen, weights = self.spec.experts, routing.chosen.flatten(0, -2), routing.weights.flatten(0, -2)
        if routing.sent is not None:
            sent = routing.sent.flatten(0, -2)
            chosen, weights = torch.where(sent, chosen, E), torch.where(sent, weights, 0)
        expert, order = chosen.flatten().sort(stable=True)
        ends = torch.searchsorted(expert, torch.arange(E, device=x.device), right=True)
        y = self.experts(x.flatten(0, -2)[order // chosen.shape[1]], ends)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
        y = y[back].unflatten(0, chosen.shape)
        return torch.bmm(weights.to(y.dtype)[:, None], y).view_as(x).to(x.dtype)

    def _losses(self, routing: Routing) -> Extras:
        router, E = self.spec.router, self.spec.experts
        real = routing.real if routing.real is not None else torch.ones_like(routing.chosen[..., 0], dtype=torch.bool)
        tokens = real.sum().clamp(min=1)
        extras: Extras = {}
        if router.balance_loss:
            load = _count(routing.chosen, routing.real, E).to(routing.scores.dtype) / tokens
            share = routing.scores / routing.scores.sum(-1, keepdim=True)
            mean = torch.where(real[..., None], share, 0).flatten(0, -2).sum(0) / tokens
            extras["balance"] = router.balance_loss * E * (load * mean).sum()
        if router.z_loss:
            squares = torch.where(real, routing.logits.logsumexp(-1).square(), 0)
            extras["router_z"] = router.z_loss * squares.sum() / tokens
        return extras


TINY = 1e-20  # keeps a sum of sigmoids that are all 0 from dividing (DeepSeek-V3's own)


def balance(model: nn.Module, reduce: Callable[[Tensor], object] | None = None, *, move: bool = True) -> None:
    """`MoEOp.balance` of every layer: what training calls after each optimiser step."""
    for module in model.modules():
        if isinstance(module, MoEOp):
            module.balance(reduce, move=move)


def _count(chosen: Tensor, real: Tensor | None, experts: int) -> Tensor:
    """[E] int64: how many real tokens chose each expert."""
    if real is not None:
        chosen = torch.where(real[..., None], chosen, experts)
    counts = torch.zeros(experts + 1, dtype=torch.long, device=chosen.device)
    flat = chosen.flatten()
    return counts.scatter_add(0, flat, torch.ones_like(flat))[:experts]


def _rank(key: Tensor) -> Tensor:
    """How many elements of the same value stand before each, in the order of memory."""
    value, order = key.flatten().sort(stable=True)
    index = torch.arange(len(order), device=key.device)
    rank = index - torch.searchsorted(value, value)
    return torch.empty_like(order).scatter_(0, order, rank).view_as(key)


def _again() -> bool:
    """Whether this forward pass runs inside a backward pass: the recomputation of one that was counted already."""
    if torch.compiler.is_compiling():
        return False
    return getattr(torch._C, "_current_graph_task_id", lambda: -1)() != -1  # pyright: ignore[reportPrivateUsage]
