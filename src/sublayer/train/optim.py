"""Optimisers: which parameters decay, AdamW and Muon behind one face, clipping, and a state saved without pickle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..errors import InputError, WeightsError, nearest
from ..nn.head import HeadOp
from ..nn.position import LearnedOp, ShawOp, T5BucketsOp
from ..nn.sublayer import BlockOp
from ..spec import Spec

Kind = Literal["matrix", "outer", "table", "vector"]

TABLES = (nn.Embedding, LearnedOp, T5BucketsOp, ShawOp)
MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, HeadOp)
FUSED = ("cpu", "cuda", "mps", "xpu")  # devices on which torch updates all parameters in one kernel


def kinds(model: nn.Module, *, frozen: bool = False) -> dict[str, Kind]:
    """The kind of every parameter that trains, or with `frozen` of every one, by name.

    A shared one is listed once, as its first owner's.
    "matrix": weights of linear maps between hidden vectors. "outer": such weights where the model begins or ends
    (the head's, a front end's). "table": rows looked up by a number (tokens, types, learned positions, buckets of
    distances). "vector": all else: norms, biases, sinks, and what an op holds for itself (rates of a recurrence),
    whatever its shape, unless the op names it in `Op.matrices`.
    """
    ends = [inner for end in _ends(model) for inner in end.modules()]
    blocks = {id(inner) for block in ends if isinstance(block, BlockOp) for inner in block.modules()}
    outer = {id(inner) for inner in ends} - blocks  # a front end may hold a trunk of its own
    found: dict[int, tuple[str, Kind]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix=path, recurse=False):
            if frozen or parameter.requires_grad:
                kind = _kind(module, name.rpartition(".")[2], id(module) in outer)
                found.setdefault(id(parameter), (name, kind))
    return dict(found.values())


def _kind(module: nn.Module, name: str, outer: bool) -> Kind:
    if isinstance(module, TABLES):
        return "table"
    weight = isinstance(module, MAPS) and name == "weight"
    if weight or name in getattr(module, "matrices", ()):
        return "outer" if outer else "matrix"
    return "vector"


def _ends(model: nn.Module) -> Iterator[nn.Module]:
    trunks = [getattr(model, name, None) for name in ("encoder", "decoder")]
    for end in (getattr(model, "head", None), *(getattr(trunk, "embed", None) for trunk in trunks)):
        if isinstance(end, nn.Module):
            yield end


class AdamW(Spec):
    """Adam with decoupled weight decay (arXiv 1711.05101), in one fused kernel where torch has one."""

    rate: float = 1e-3
    """Peak learning rate; a schedule scales it. GPT-2's 124M took 6e-4, smaller models bear more."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the mean gradient and of its mean square; .95 (GPT-3) forgets a spike sooner than Adam's .999."""
    eps: float = 1e-8
    """Added to the root of the mean square; Adam's own value (2017's Transformer: 1e-9)."""
    decay: float = 0.1
    """Share of a weight that a step at rate 1 takes away; GPT-3's value. Matrices alone decay: a norm's or a bias's
    size is not what overfits."""
    decay_tables: bool = False
    """Whether tables (embeddings, learned positions) decay too: by default not, since rows that a batch does not
    touch would shrink all the same. nanoGPT's runs decay them."""

    def check(self) -> None:
        self.require(self.rate > 0, f"rate must be above 0, got {self.rate}")
        self.require(all(0 <= beta < 1 for beta in self.betas), f"betas are from 0 to below 1, got {self.betas}")
        self.require(self.eps >= 0, f"eps must be at least 0, got {self.eps}")
        self.require(self.decay >= 0, f"decay must be at least 0, got {self.decay}")

    def build(self, model: nn.Module) -> Optimizer:
        """The optimiser of all parameters of `model` that train. Raises InputError where none does."""
        return Optimizer(model, [self._over(model, kinds(model))])

    def _over(self, model: nn.Module, chosen: Mapping[str, Kind]) -> torch.optim.AdamW:
        decayed = ("matrix", "outer", "table") if self.decay_tables else ("matrix", "outer")
        parameters = dict(model.named_parameters())
        groups = [
            {"params": [parameters[n] for n, kind in chosen.items() if (kind in decayed) == decays], "weight_decay": d}
            for decays, d in ((True, self.decay), (False, 0.0))
        ]
        groups = [group for group in groups if group["params"]]
        everything = [p for group in groups for p in group["params"]]
        fused = all(p.device.type in FUSED and p.is_floating_point() for p in everything)
        options: dict[str, Any] = {"fused": True} if fused else {"foreach": True}
        return torch.optim.AdamW(_some(groups), lr=self.rate, betas=self.betas, eps=self.eps, **options)


class Muon(Spec):
    """Momentum whose matrices are made orthogonal by Newton–Schulz steps (arXiv 2502.16982), AdamW for the rest.

    It concerns the matrices between hidden vectors; tables, the head, a front end, norms and biases go to `rest`.
    """

    rate: float = 1e-3
    """Peak learning rate of the matrices; a schedule scales it."""
    momentum: float = 0.95
    """Decay of the mean gradient, looked ahead as Nesterov's; the value of its authors."""
    decay: float = 0.1
    """Share of a weight that a step at rate 1 takes away."""
    scale: Literal["adamw", "original"] = "adamw"
    """What an update [A, B] is multiplied by. "adamw": 0.2 · sqrt(max(A, B)), as large as AdamW's updates, so that its
    rate and decay carry over (eq. 4); "original": sqrt(max(1, A / B)), for rates near 0.02."""
    rest: AdamW = AdamW()
    """What trains everything else."""

    def check(self) -> None:
        self.require(self.rate > 0, f"rate must be above 0, got {self.rate}")
        self.require(0 <= self.momentum < 1, f"momentum is from 0 to below 1, got {self.momentum}")
        self.require(self.decay >= 0, f"decay must be at least 0, got {self.decay}")

    def build(self, model: nn.Module) -> Optimizer:
        """The optimiser of all parameters of `model` that train. Raises InputError where it has no matrix."""
        parameters, chosen = dict(model.named_parameters()), kinds(model)
        matrices = [n for n, kind in chosen.items() if kind == "matrix" and parameters[n].dim() == 2]
        muon = _Muon(_some([parameters[n] for n in matrices]), self)
        rest: dict[str, Kind] = {n: kind for n, kind in chosen.items() if n not in set(matrices)}
        return Optimizer(model, [muon, self.rest._over(model, rest)] if rest else [muon])


class _Muon(torch.optim.Optimizer):
    """Muon alone, over matrices. torch.optim.Muon iterates in bfloat16 always: on a CPU without such instructions a
    step took 20 times as long as in fp32."""

    def __init__(self, matrices: list[nn.Parameter], spec: Muon) -> None:
        self.spec = spec
        super().__init__(matrices, {"lr": spec.rate, "weight_decay": spec.decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        momentum = self.spec.momentum
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p)
                mean = state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
                update = orthogonal(p.grad.lerp(mean, momentum))
                rows, columns = p.shape
                adamw = self.spec.scale == "adamw"
                size = 0.2 * math.sqrt(max(rows, columns)) if adamw else math.sqrt(max(1.0, rows / columns))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update.to(p.dtype), alpha=-group["lr"] * size)


def orthogonal(x: Tensor) -> Tensor:
    """Nearly U Vᵀ of x = U S Vᵀ: singular values go to about 1, but for the smallest; [A, B] → [A, B].

    Five Newton–Schulz steps X ← a X + b (X Xᵀ) X + c (X Xᵀ)² X from X / ‖x‖, in fp32 or wider on a CPU and in
    bfloat16 elsewhere. Source of a, b, c: K. Jordan, "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[0] > x.shape[1]
    wide = x.mT if tall else x  # the smaller X Xᵀ
    wide = wide.to(torch.promote_types(x.dtype, torch.float32) if x.device.type == "cpu" else torch.bfloat16)
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


class Optimizer:
    """One or more of torch's optimisers as one, over all parameters of a model that train, each in exactly one group.

    Its state is tensors by name: the continuation from a saved one is the same to the last bit.
    """

    def __init__(self, model: nn.Module, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.groups = [group for part in parts for group in part.param_groups]
        self.peaks = [group["lr"] for group in self.groups]
        listed = [id(p) for p in self.parameters()]
        if sorted(listed) != sorted(self.names):
            raise InputError("an optimiser takes each parameter that trains exactly once")

    def parameters(self) -> list[Tensor]:
        """Every parameter, in the order of the groups."""
        return [p for group in self.groups for p in group["params"]]

    @property
    def rate(self) -> float:
        """The learning rate of the first group: the matrices'."""
        return self.groups[0]["lr"]

    def set_rate(self, factor: float) -> None:
        """Every learning rate becomes `factor` times its peak."""
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """One update from the gradients; a parameter without one stays as it is."""
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_tensors(self) -> dict[str, Tensor]:
        """All that `step` remembers, as "parameter#what": moments, momentum and counts of steps; not copied."""
        return {
            f"{self.names[id(p)]}#{leaf}": value
            for part in self.parts
            for p, leaves in part.state.items()
            for leaf, value in leaves.items()
        }

    def load_state_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over, copied, what `state_tensors` gave for the same model and the same optimiser.

        Raises WeightsError, before anything changes, for a name, shape or dtype that is not this optimiser's.
        """
        found: dict[str, dict[str, Tensor]] = {}
        for key, value in tensors.items():
            name, _, leaf = key.rpartition("#")
            found.setdefault(name, {})[leaf] = value
        known = set(self.names.values())
        for name in found:
            if name not in known:
                raise WeightsError(f"optimiser state: {name!r} is no parameter that trains here{nearest(name, known)}")
        loaded: list[tuple[torch.optim.Optimizer, Tensor, dict[str, Tensor]]] = []
        for part in self.parts:
            for group in part.param_groups:
                for p in group["params"]:
                    leaves = found.get(self.names[id(p)])  # none for a parameter that has had no gradient
                    if leaves is not None:
                        loaded.append((part, p, _taken(self.names[id(p)], p, leaves, part, group)))
        for part in self.parts:
            part.state.clear()
        for part, p, leaves in loaded:
            part.state[p] = leaves


def _taken(
    name: str, p: Tensor, leaves: dict[str, Tensor], part: torch.optim.Optimizer, group: dict[str, Any]
) -> dict[str, Tensor]:
    """The leaves of one parameter as its optimiser keeps them."""
    expected = ("momentum_buffer",) if isinstance(part, _Muon) else ("step", "exp_avg", "exp_avg_sq")
    if leaves.keys() != set(expected):
        raise WeightsError(f"optimiser state: {name} has {sorted(leaves)}, this optimiser keeps {sorted(expected)}")
    taken: dict[str, Tensor] = {}
    for leaf in expected:
        counts = leaf == "step"
        shape, dtype = (torch.Size(), torch.float32) if counts else (p.shape, p.dtype)
        value = leaves[leaf]
        if (value.shape, value.dtype) != (shape, dtype):
            raise WeightsError(
                f"optimiser state: {name}#{leaf} is {value.dtype} {list(value.shape)}, not {dtype} {list(shape)}"
            )
        # The fused kernel counts where the parameter is; the others count on the CPU.
        device = p.device if not counts or group.get("fused") else "cpu"
        taken[leaf] = value.detach().to(device, copy=True)
    return taken


def _some(groups: list[Any]) -> list[Any]:
    if not groups:
        raise InputError("nothing to train: the model has no parameter of this optimiser's kind that takes gradients")
    return groups


@torch.no_grad()
def clip(parameters: Iterable[Tensor], limit: float = math.inf, scale: float = 1.0) -> Tensor:
    """Multiplies the gradients by `scale`, and by less where their norm over all parameters would exceed `limit`.

    `scale` is what sums still wait for (1 / tokens, 1 / loss scale), so that the gradients are written once. Returns
    the norm before clipping, a scalar that is not waited for; where it is not finite, neither are the gradients, and
    the step must be left out. Source: arXiv 1211.5063, algorithm 1.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients) * scale
    if gradients and (scale != 1 or math.isfinite(limit)):
        factor = scale * (limit / (norm + 1e-6)).clamp(max=1.0)
        cast(Any, torch)._foreach_mul_(gradients, factor)
    return norm
