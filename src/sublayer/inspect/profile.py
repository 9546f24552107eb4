"""Where time and memory go in one training step, by part of the model; and what a key/value cache takes at 70B."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import recipes
from ..errors import UsageError
from ..nn.sublayer import BlockOp, Model, ModelOp, SublayerOp, TrunkOp
from ..train.batch import Batch
from ..train.objectives import LossOf
from ..train.optim import Optimizer, clip
from ..train.update import Precision, autocast
from .count import cost

HEAD, NORMS, OPTIMISER, REST = "head and loss", "norms", "optimiser", "rest"


@dataclass(frozen=True)
class Profile:
    """One training step. Its parts: "embed", the sublayers by name ("attn", "ffn", …), "norms", "head and loss",
    "optimiser" (clipping too), and "rest" (residual sums, masks, rotary tables, the Python between)."""

    seconds: dict[str, float]
    """By part, forward and backward together. They sum to the whole step, watched."""
    unwatched: float
    """Seconds of the same step with nobody watching."""
    tokens: int
    """Tokens that the step learned from."""
    parameters: int
    """Bytes of the parameters; a tied table counts once."""
    gradients: int
    """Bytes of their gradients."""
    optimiser: int
    """Bytes that the optimiser keeps."""
    activations: dict[str, int]
    """By part, the bytes that the forward pass keeps for the backward pass; what two parts keep is the first one's."""

    @property
    def memory(self) -> dict[str, int]:
        """Bytes by kind. What only lives within one operation is in none."""
        return {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimiser state": self.optimiser,
            "activations": sum(self.activations.values()),
        }


def profile_step(
    model: ModelOp,
    batch: Batch,
    objective: LossOf,
    optimizer: Optimizer,
    *,
    precision: Precision = "fp32",
    repeats: int = 3,
) -> Profile:
    """Watches training steps on one batch; of `repeats` the one of median time is shown.

    Times are the wall clock's, read where the parts of the model begin and end, forward and backward; an accelerator
    is waited for at each. Parameters, optimiser, random numbers and mode are afterwards as they were before.
    Raises UsageError for repeats below 1.
    """
    if repeats < 1:
        raise UsageError(f"repeats={repeats}: at least one step has to be watched")
    parameters = optimizer.parameters()
    device = parameters[0].device
    batch = batch.to(device)
    gradients = 0

    def step(clock: _Clock, objective: LossOf = objective) -> int:
        nonlocal gradients
        with autocast(device, precision):
            loss = objective(model, batch)
        loss.sum.backward()
        clock.turn(OPTIMISER)
        gradients = _bytes(p.grad for p in parameters if p.grad is not None)
        clip(parameters, 1.0, 1 / max(int(loss.tokens), 1))
        optimizer.step()
        optimizer.zero_grad()
        clock.stop()
        return int(loss.tokens)

    with _restored(model, optimizer):
        model.train()
        optimizer.zero_grad()
        # The first step, which also allocates and chooses kernels, is the one whose memory is counted.
        activations: dict[str, int] = {}
        clock = _Clock(device)
        with _watching(model, clock):
            tokens = step(clock, _counting(objective, model, clock, activations))
        plain, watched = [], []
        for _ in range(repeats):
            plain.append(_Clock(device))
            step(plain[-1])
            watched.append(_Clock(device))
            with _watching(model, watched[-1]):
                step(watched[-1])
        kept = _bytes(optimizer.state_tensors().values())
    seconds = sorted((clock.seconds for clock in watched), key=lambda found: sum(found.values()))[repeats // 2]
    unwatched = sorted(sum(clock.seconds.values()) for clock in plain)[repeats // 2]
    return Profile(seconds, unwatched, tokens, _bytes(model.parameters()), gradients, kept, activations)


def cache_bytes(spec: Model, rows: int, length: int, dtype: torch.dtype = torch.float16) -> int:
    """Bytes of what decoding keeps for `rows` texts of `length` tokens: keys and values, of a model as built."""
    return cost(spec, dtype).state_bytes(rows, length)


def cache_at_70b(rows: int = 16, length: int = 8192, dtype: torch.dtype = torch.float16) -> dict[int, int]:
    """{kv heads: bytes} for a model of Llama-2 70B's shape: 64, where each query head has its own, and the 8 it has."""
    spec = recipes.model("llama2-70b")
    grouped = {heads: spec.override(f"decoder.blocks.*.attn.op.kv_heads={heads}") for heads in (64, 8)}
    return {heads: cache_bytes(changed, rows, length, dtype) for heads, changed in grouped.items()}


class _Clock:
    """Time by part: whatever passes between two marks belongs to the part that was entered last, so nothing is lost."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._entered: list[tuple[object, str]] = []
        self._below = HEAD  # what the time is where no part is entered
        self._last = self._now()

    @property
    def part(self) -> str:
        return self._entered[-1][1] if self._entered else self._below

    def enter(self, key: object, part: str) -> None:
        self._mark()
        self._entered.append((key, part))

    def leave(self, key: object) -> None:
        """And what was entered within and never left: recomputation breaks off once it has what it needs."""
        self._mark()
        depth = next((i for i, (other, _) in enumerate(self._entered) if other == key), len(self._entered))
        del self._entered[depth:]

    def turn(self, part: str) -> None:
        """From here on time belongs to `part` where nothing else is entered."""
        self._mark()
        self._entered, self._below = [], part

    def stop(self) -> None:
        self._mark()

    def _mark(self) -> None:
        now = self._now()
        self.seconds[self.part] = self.seconds.get(self.part, 0.0) + now - self._last
        self._last = now

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


@contextmanager
def _watching(model: ModelOp, clock: _Clock) -> Iterator[None]:
    """Within it, the clock knows which part of the model runs, forward or backward."""
    handles: list[Any] = []
    for module in model.modules():
        if isinstance(module, TrunkOp):
            handles += _forward_hooks(module, REST, clock)
            # Before the gradient reaches the trunk there was only the head; embed, the first part, is the last to run.
            handles.append(module.register_forward_hook(_turning(REST, clock)))
            handles += _forward_hooks(module.embed, "embed", clock)
            handles.append(module.embed.register_forward_hook(_turning("embed", clock)))
        if isinstance(module, SublayerOp):
            handles += _forward_hooks(
                module, REST, clock
            )  # recomputed, it runs within the backward pass of another part
    for module, part in _parts(model):
        handles += _forward_hooks(module, part, clock)
        handles.append(module.register_full_backward_pre_hook(_entering(part, clock)))
        handles.append(module.register_full_backward_hook(lambda module, *_: clock.leave(module)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _parts(model: ModelOp) -> Iterator[tuple[nn.Module, str]]:
    """The modules whose time is taken, none inside another, and what each is."""
    for module in model.modules():
        if isinstance(module, SublayerOp):
            yield module.op, module.spec.name
        if isinstance(module, SublayerOp | BlockOp | TrunkOp):
            places = (getattr(module, name, None) for name in ("pre", "post", "after", "norm"))
            yield from ((place, NORMS) for place in places if isinstance(place, nn.Module))


def _forward_hooks(module: nn.Module, part: str, clock: _Clock) -> list[Any]:
    return [
        module.register_forward_pre_hook(_entering(part, clock)),
        module.register_forward_hook(lambda module, *_: clock.leave(module)),
    ]


def _entering(part: str, clock: _Clock) -> Callable[..., None]:
    return lambda module, *_: clock.enter(module, part)


class _Kept:
    """What autograd keeps in place of a tensor, as long as the backward pass needs it."""

    def __init__(self, tensor: Tensor, part: str) -> None:
        self.tensor, self.part = tensor, part


def _turning(part: str, clock: _Clock) -> Callable[..., None]:
    """A hook on a module: once the gradient has come back to what it returned, time belongs to `part`."""

    def hook(module: nn.Module, given: Any, returned: Any) -> None:
        x = returned[0] if isinstance(returned, tuple) else returned
        if isinstance(x, Tensor) and x.requires_grad:
            x.register_hook(lambda _: clock.turn(part))

    return hook


def _counting(objective: LossOf, model: ModelOp, clock: _Clock, found: dict[str, int]) -> LossOf:
    """The objective, which adds up in `found` the bytes that the backward pass will need, no parameter's among them."""
    seen = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[weakref.ref[_Kept]] = []

    def keep(tensor: Tensor) -> _Kept:
        held = _Kept(tensor, clock.part)
        kept.append(weakref.ref(held))
        return held

    def counted(model: ModelOp, batch: Batch) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda held: held.tensor):
            loss = objective(model, batch)
        for held in (reference() for reference in kept):
            if held is not None:  # not of a graph that has come and gone within the objective
                storage = held.tensor.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    found[held.part] = found.get(held.part, 0) + storage.nbytes()
        return loss

    return counted


@contextmanager
def _restored(model: ModelOp, optimizer: Optimizer) -> Iterator[None]:
    """Afterwards all that training steps change is as it was before."""
    parameters = [(p, p.detach().clone(), p.grad) for p in model.parameters()]
    state = {name: tensor.clone() for name, tensor in optimizer.state_tensors().items()}
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices=[] if parameters[0][0].device.type == "cpu" else None):
            yield
    finally:
        with torch.no_grad():
            for p, value, gradient in parameters:
                p.copy_(value)
                p.grad = gradient
        optimizer.load_state_tensors(state)
        for module, was in training:
            module.training = was


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
