"""Objective: what is minimised — a spec with a function (model, batch) → Loss, and the collator that makes its batches.

The objectives themselves: language.py (running text), examples.py (pairs of texts, classes, tags), vision.py
(images), protein.py (alignments).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, Literal, Self, get_type_hints

from ..errors import UsageError
from ..nn.op import Op
from ..nn.sublayer import Model, ModelOp
from ..spec import Spec
from .batch import Batch
from .loss import Loss

Reads = Literal["text", "examples", "images", "alignments", "episodes"]

LossOf = Callable[[ModelOp, Batch], Loss]
"""What `update` and `evaluate` take: an Objective, or any function like it."""


class Objective(Spec):
    """Base of what a run minimises: `objective(model, batch)` is the Loss of a batch that its `collate` made."""

    kind: ClassVar[str]
    """Its name in a configuration."""
    reads: ClassVar[Reads] = "text"
    """What it is trained on, which decides how it collates (see feeds.py)."""
    uses: ClassVar[tuple[str, ...]] = ("field", "bad_bytes", "length", "held", "segments")
    """The keys of [data], beside paths and sources, that mean something then."""
    unit: ClassVar[str] = "nats"
    """What its loss is measured in, for each answer."""
    answer: ClassVar[str] = "token"
    """What it asks for, one of which its loss is for."""
    specials: ClassVar[tuple[str, ...]] = ()
    """Special tokens that a tokenizer trained for it has."""

    @property
    def judged(self) -> Self:
        """What held-out data is judged by: the same, without what only helps training."""
        changes = {name: 0.0 for name in ("z_loss", "smoothing") if hasattr(self, name)}
        return self.replace(**changes)

    def adapt(self, model: Model, classes: int) -> Model:
        """The architecture with a head that answers what is asked, where its own does not; `classes` of labels."""
        return model

    def fits(self, model: Model) -> None:
        """Raises UsageError for an architecture that it cannot train."""

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        """The loss of a batch, summed."""
        raise UsageError(f"objective: {self.kind} has no loss")


def refuse_sighted(objective: Objective, model: Model) -> None:
    """Raises UsageError where a position could see what it is to predict."""
    sighted = next((at for at, part in parts(model) if _sees_ahead(part)), None)
    if sighted is not None:
        raise UsageError(f"objective: {objective.kind}, but {sighted} sees what it is to predict: not causal")


def refuse_causal(objective: Objective, model: Model) -> None:
    """Raises UsageError where an op sees one side only, though both are meant: one that can be continued, token by
    token."""
    modules = model.empty(device="meta").named_modules()
    blind = next((at for at, module in modules if isinstance(module, Op) and module.state()), None)
    if blind is not None:
        raise UsageError(f"objective: {objective.kind}, but model.{blind} is causal: it sees one side only")


def _sees_ahead(part: Spec) -> bool:
    return getattr(part, "causal", True) is False or getattr(part, "direction", "forward") != "forward"


def parts(spec: Any, path: str = "model") -> Iterator[tuple[str, Spec]]:
    """Every spec inside a spec, with where it is."""
    if isinstance(spec, tuple):
        for i, item in enumerate(spec):
            yield from parts(item, f"{path}.{i}")
    elif isinstance(spec, Spec):
        yield path, spec
        for name in get_type_hints(type(spec)):
            yield from parts(getattr(spec, name, None), f"{path}.{name}")
