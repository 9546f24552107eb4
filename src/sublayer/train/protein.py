"""Objective on alignments of proteins: masked cells, and how far apart residues are.

B crops, S sequences, L residues.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.alignments import Crops
from ..errors import UsageError
from ..nn.sublayer import Model, ModelOp
from ..recipes.evoformer import AMINO_ACIDS, MASKED, AlignmentHead, EmbedAlignment
from ..step import Step
from .batch import Batch
from .loss import IGNORED, Loss
from .objectives import Objective, Reads

NEAREST, FARTHEST = 2.3125, 21.6875  # Å: the edges of the first and of the last bin of distances (section 1.9.8)


class MaskedAlignment(Objective):
    """Cells of an alignment hidden at random, to be told from the others (Jumper et al. 2021, supplement, sections
    1.2.7 and 1.9.9), and the distances of the target's residues where they are known (1.9.8).

    What it is judged by are the nats of a masked cell. Gaps are cells like any other. The target's own row is never
    asked for, though AlphaFold masks it too: the model is given the target.
    """

    kind: ClassVar[str] = "masked_msa"
    answer: ClassVar[str] = "cell"
    reads: ClassVar[Reads] = "alignments"
    uses: ClassVar[tuple[str, ...]] = ("judge", "length", "depth", "held")
    share: float = 0.15
    """Of the cells that are asked for."""
    hidden: float = 0.7
    """Of those, the share that becomes the mask."""
    uniform: float = 0.1
    """Of those, the share that becomes an amino acid, each as likely as the other."""
    profile: float = 0.1
    """Of those, the share that becomes what is drawn from the column; the rest is left as it is."""
    msa_weight: float = 2.0
    """What the mean over masked cells is multiplied by."""
    distogram_weight: float = 0.3
    """What the mean over pairs whose distance is known is multiplied by."""

    def check(self) -> None:
        self.require(0 < self.share < 1, f"share is between 0 and 1, got {self.share}")
        parts = (self.hidden, self.uniform, self.profile)
        whole = min(parts) >= 0 and sum(parts) <= 1 + 1e-9
        self.require(whole, f"hidden, uniform and profile are shares of one whole, got {parts}")
        weights = (self.msa_weight, self.distogram_weight)
        self.require(min(weights) >= 0 and max(weights) > 0, f"weights are 0 or above, and not both 0, got {weights}")

    def fits(self, model: Model) -> None:
        front = model.embedding
        if not isinstance(front, EmbedAlignment) or not isinstance(model.head, AlignmentHead):
            raise UsageError(f"objective: {self.kind} trains models of alignments, as evoformer, and nothing else")
        if front.features or min(front.classes, model.head.classes) <= MASKED:
            raise UsageError(
                f"objective: {self.kind} gives a cell its class of {MASKED + 1} and no features: features=0"
            )

    def collate(self, crops: Crops, generator: torch.Generator) -> Batch:
        cells = crops.msa
        chosen = crops.asked & (torch.rand(cells.shape, generator=generator) < self.share)
        part = torch.rand(cells.shape, generator=generator)
        any_of = torch.randint(len(AMINO_ACIDS), cells.shape, generator=generator)
        shares = crops.profile.cumsum(-1)
        draw = torch.rand(cells.shape, generator=generator)[..., None] * shares[:, None, :, -1:]
        column = (draw >= shares[:, None]).sum(-1).clamp(max=shares.shape[-1] - 1)
        edges = (self.hidden, self.hidden + self.uniform, self.hidden + self.uniform + self.profile)
        shown = torch.where(part < edges[2], column, cells)
        shown = torch.where(part < edges[1], any_of, shown)
        shown = torch.where(part < edges[0], MASKED, shown)
        inputs = {"msa": torch.where(chosen, shown, cells), "target": crops.target, "present": crops.present}
        labels = {"msa": cells.masked_fill(~chosen, IGNORED)}
        if crops.distances is not None:
            labels["distances"] = crops.distances
        return Batch(inputs, labels, Step(segment=crops.segment))

    def __call__(self, model: ModelOp, batch: Batch) -> Loss:
        found: Any = model(batch.inputs, batch.step)
        answer, extras = found if isinstance(found, tuple) else (found, {})
        asked = batch.labels["msa"] != IGNORED
        logits, labels = _wide(answer["msa"][asked]), batch.labels["msa"][asked]
        nats = F.cross_entropy(logits, labels, reduction="sum")
        other = sum(extras.values())
        if "distances" in batch.labels and self.distogram_weight:
            other = other + self.distogram_weight * distance_loss(answer["distogram"], batch.labels["distances"])
        total = self.msa_weight * nats + other * len(labels)
        return Loss(total, len(labels), (total - nats).detach(), (logits.argmax(-1) == labels).sum())


def distance_loss(logits: Tensor, distances: Tensor) -> Tensor:
    """The mean nats of a pair whose distance is known: logits [B, L, L, bins], distances [B, L, L] in Å, or NaN.

    All bins but the first and the last are equally wide; a residue's distance from itself counts too.
    """
    known = distances.isfinite()
    edges = torch.linspace(NEAREST, FARTHEST, logits.shape[-1] - 1, device=distances.device, dtype=distances.dtype)
    nats = F.cross_entropy(_wide(logits[known]), torch.bucketize(distances[known], edges), reduction="sum")
    return nats / known.sum().clamp(min=1)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
