"""How a new model begins: the one place where parameters get their first values.

Every recipe names an Init; an op adds only what is its own (`Op.initialise`), such as a recurrence's decay rates.
"""

from __future__ import annotations

import math
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..spec import Spec


class Init(Spec):
    """First values of weights: normal with mean 0 in matrices and tables, 0 in biases, norms at the identity."""

    std: float | Literal["fan_in", "torch"] = 0.02
    """Standard deviation of matrices; "fan_in": one over the square root of the input width; "torch": uniform within
    plus and minus that, as torch.nn.Linear begins."""
    residual: Literal["same", "depth"] | float = "same"
    """Matrices that write into the residual stream: like the others, or divided by the square root of how many
    of their trunk write there, so that the stream's variance does not grow with depth (GPT-2 report, section 2.3);
    or with a standard deviation of their own; 0: branches begin as nothing."""
    embedding: float | None = None
    """Standard deviation of embedding tables; None: as matrices (0.02 where those follow their width)."""
    position: float | None = None
    """Standard deviation of learned positions; None: as the embedding."""
    queries: Literal["same", "head_size"] = "same"
    """Matrices that make queries: like the others, or times H^−1/2, the scale that T5's attention leaves out."""

    def check(self) -> None:
        self.require(isinstance(self.std, str) or self.std > 0, f"std must be above 0, got {self.std}")
        residual = None if isinstance(self.residual, str) else self.residual
        for name, std in (("embedding", self.embedding), ("position", self.position)):
            self.require(std is None or std > 0, f"{name} must be above 0, got {std}")
        self.require(residual is None or residual >= 0, f"residual must not be below 0, got {residual}")

    @property
    def table(self) -> float:
        """Standard deviation of embedding tables."""
        if self.embedding is not None:
            return self.embedding
        return 0.02 if isinstance(self.std, str) else self.std

    def matrix(self, fan_in: int) -> float:
        """Standard deviation of a matrix with so many inputs."""
        known = {"fan_in": fan_in**-0.5, "torch": (3 * fan_in) ** -0.5}
        return known[self.std] if isinstance(self.std, str) else self.std

    def writer(self, fan_in: int, writers: int) -> float:
        """Standard deviation of one of so many matrices that write into a residual stream."""
        if isinstance(self.residual, str):
            return self.matrix(fan_in) / (math.sqrt(writers) if self.residual == "depth" else 1.0)
        return self.residual


def normal(weight: Tensor, std: float, generator: torch.Generator) -> None:
    """Fills a parameter of any device and dtype from fp32 values drawn on the CPU."""
    weight.copy_(torch.empty(weight.shape, dtype=torch.float32).normal_(0, std, generator=generator))


def uniform(weight: Tensor, bound: float, generator: torch.Generator) -> None:
    """The same, with values evenly between −bound and bound."""
    weight.copy_(torch.empty(weight.shape, dtype=torch.float32).uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def initialise(model: nn.Module, init: Init, seed: int) -> None:
    """Sets every parameter of a materialised model, the same for a seed on every device and dtype.

    A module's own `initialise(generator, init)` sets its parameters; linears and embeddings without one are set here.
    Raises SpecError for a parameter that nothing sets: it is never left uninitialised.
    """
    for parameter in model.parameters():
        parameter.view(-1)[:1] = math.nan  # a mark that whoever sets the parameter overwrites
    generator = torch.Generator().manual_seed(seed)
    special: dict[int, float] = {}  # standard deviations of matrices that begin unlike the others
    for trunk in model.children():
        own = [getattr(op, name) for op in trunk.modules() for name in getattr(op, "residual_outputs", ())]
        for writer in own:
            fan_in = writer.shape[-1] if isinstance(writer, nn.Parameter) else writer.in_features
            special[id(writer)] = init.writer(fan_in, len(own))
    if init.queries == "head_size":
        ops = [cast(Any, op) for op in model.modules() if hasattr(op, "head_size") and hasattr(op, "q")]
        special |= {id(op.q): init.matrix(op.q.in_features) * op.head_size**-0.5 for op in ops}
    for module in model.modules():
        if hasattr(module, "initialise"):
            cast(Any, module).initialise(generator, init)
            for name in getattr(module, "residual_outputs", ()):
                writer = getattr(module, name)
                if isinstance(writer, nn.Parameter):
                    normal(writer, special[id(writer)], generator)
        elif isinstance(module, nn.Linear):
            std = special.get(id(module), init.matrix(module.in_features))
            if init.std == "torch":
                uniform(module.weight, math.sqrt(3) * std, generator)
            else:
                normal(module.weight, std, generator)
            if module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            normal(module.weight, init.table, generator)
    for name, parameter in model.named_parameters():
        if parameter.numel() and bool(parameter.view(-1)[0].isnan()):
            owner = model.get_submodule(name.rpartition(".")[0])
            raise SpecError(f"{name}: nothing says how this parameter of {type(owner).__name__} begins")
