"""Masked alignments and their distances, held to counts and formulas; and a run from files to a judged model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sublayer
from sublayer.data.alignments import Crop, Crops, gathered, parted, read_alignments
from sublayer.errors import SpecError, UsageError
from sublayer.recipes import llama
from sublayer.recipes.evoformer import GAP, MASKED, TINY, evoformer
from sublayer.train.config import run_of
from sublayer.train.feeds import AlignmentFeed
from sublayer.train.protein import MaskedAlignment, distance_loss
from sublayer.train.view import Quiet
from tests.assets import debian
from tests.case import roughen
from tests.train.objectives import carry_out, generator

# --- alignments ---


def family(folder: Path, structure: bool = False) -> str:
    """Sequences of one amino acid or of another, so that a cell is told by its row; but for two at the end, by which
    sequences differ."""
    draw = np.random.default_rng(0)
    text = "\n".join(
        f"n{i}  {'AM'[i % 2] * 22}{''.join(draw.choice(list('ARNDCQEGHILKMFPSTWYV'), 2))}" for i in range(60)
    )
    path = folder / "family.sto"
    path.write_text(f"# STOCKHOLM 1.0\n{text}\n//\n")
    if structure:
        np.save(folder / "family.npy", np.arange(72.0).reshape(24, 3))
    return str(path)


def one_crop(count: int = 40, columns: int = 200) -> Crops:
    cells = np.random.default_rng(0).integers(0, 22, (count, columns)).astype(np.uint8)
    cells[0] = 0
    profile = np.zeros((columns, 22), np.float32)
    profile[:, 21] = 1.0  # what is drawn from a column is told by it: a gap
    asked = np.arange(count) > 0
    return gathered([Crop(cells, asked, profile, None, "here")])


def test_cells_are_masked_as_alphafold_masks_them() -> None:
    """15% of the cells; of those 70% hidden, 10% any amino acid, 10% drawn from the column, 10% kept."""
    crops = one_crop()
    batch = MaskedAlignment().collate(crops, generator())
    shown, cells, asked = batch.inputs["msa"], crops.msa, batch.labels["msa"] != -100
    assert not asked[:, 0].any(), "the target is given"
    assert torch.equal(shown[~asked], cells[~asked])
    assert torch.equal(batch.labels["msa"][asked], cells[asked])
    assert float(asked[:, 1:].float().mean()) == pytest.approx(0.15, abs=0.01)
    shares = MaskedAlignment(hidden=0.7, uniform=0.0, profile=0.3).collate(crops, generator())
    drawn = shares.inputs["msa"][shares.labels["msa"] != -100]
    assert float((drawn == MASKED).float().mean()) == pytest.approx(0.7, abs=0.04)
    assert set(drawn[drawn != MASKED].tolist()) == {GAP}
    found, was = shown[asked], cells[asked]
    assert float((found == MASKED).float().mean()) == pytest.approx(0.7, abs=0.04)
    assert float(((found == GAP) & (was != GAP)).float().mean()) == pytest.approx(0.1 * 21 / 22, abs=0.03)
    other = (found < 20) & (found != was)
    assert float(other.float().mean()) == pytest.approx(0.1 * (1 - 1 / 22), abs=0.03)
    assert len(found[other].unique()) == 20
    kept = (found == was) & (was != GAP)
    assert float(kept.float().mean()) == pytest.approx((0.1 + 0.1 / 20) * 21 / 22, abs=0.03)
    again = MaskedAlignment().collate(crops, generator())
    assert torch.equal(again.inputs["msa"], shown)


def test_a_column_gives_its_classes_as_often_as_they_stand_in_it() -> None:
    crops = one_crop(60, 400)
    profile = torch.zeros(22)
    profile[torch.tensor([0, 3, 21])] = torch.tensor([0.5, 0.3, 0.2])
    crops = crops._replace(profile=profile.expand_as(crops.profile))
    batch = MaskedAlignment(share=0.9, hidden=0.0, uniform=0.0, profile=1.0).collate(crops, generator())
    drawn = batch.inputs["msa"][batch.labels["msa"] != -100]
    assert [float((drawn == i).float().mean()) for i in (0, 3, 21)] == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_distances_are_binned_as_alphafold_bins_them() -> None:
    """64 bins between 2.3125 and 21.6875 Å, pair by pair; pairs of which one is not known count for nothing."""
    logits = torch.randn(1, 4, 4, 64, generator=generator(), dtype=torch.float64)
    apart = torch.tensor([[0.0, 2.4, 21.5, 99.0], [2.4, 0.0, 10.0, 2.3], [21.5, 10.0, 0.0, torch.nan],
                          [99.0, 2.3, torch.nan, 0.0]], dtype=torch.float64)  # fmt: skip
    width, nats = (21.6875 - 2.3125) / 62, []
    for i in range(4):
        for j in range(4):
            if apart[i, j].isfinite():
                number = min(max(int((float(apart[i, j]) - 2.3125) // width) + 1, 0), 63)
                nats.append(-logits[0, i, j].log_softmax(-1)[number])
    torch.testing.assert_close(distance_loss(logits, apart[None]), torch.stack(nats).mean())
    assert distance_loss(logits, torch.full((1, 4, 4), torch.nan)) == 0


def test_the_loss_of_an_alignment_is_its_two_parts_weighed() -> None:
    model = evoformer(**TINY).build(seed=0)
    roughen(model)
    known = np.arange(36, dtype=np.float32).reshape(12, 3)
    cells = np.random.default_rng(1).integers(0, 20, (5, 12)).astype(np.uint8)
    profile = np.full((12, 22), 1 / 22, np.float32)
    crops = gathered([Crop(cells, np.arange(5) > 0, profile, known, "here")])
    objective = MaskedAlignment(msa_weight=3.0, distogram_weight=0.5)
    batch = objective.collate(crops, generator())
    loss, answer = objective(model, batch), model(batch.inputs, batch.step)
    labels = batch.labels["msa"]
    cells_nats = F.cross_entropy(answer["msa"].flatten(0, 2), labels.flatten(), reduction="sum")
    count = int((labels != -100).sum())
    pairs = distance_loss(answer["distogram"], batch.labels["distances"])
    torch.testing.assert_close(loss.sum, 3 * cells_nats + 0.5 * count * pairs)
    torch.testing.assert_close(loss.nats, cells_nats.detach())
    assert loss.tokens == count
    alone = objective.replace(distogram_weight=0.0)(model, batch)
    torch.testing.assert_close(alone.sum, 3 * cells_nats)


def test_an_alignment_and_its_structure_are_learned(tmp_path: Path) -> None:
    """By its column alone half of the cells of a held-out sequence are told right; a distance told by nothing is one of
    six, 1.79 nats."""
    sections: dict[str, Any] = {
        "objective": "masked_msa",
        "model": {"recipe": "evoformer", **TINY | {"layers": 1}},
        "data": {"paths": family(tmp_path, structure=True), "length": 12, "depth": 8, "held": 0.3},
        "train": {"steps": 100, "batch": 4, "micro": 3},
    }
    result = carry_out(tmp_path, **sections)
    assert result.score.accuracy > 0.8
    feed = AlignmentFeed(run_of({"out": "x"} | sections), tmp_path, Quiet())
    feed.open()
    batch, _ = feed.at(1000)
    with torch.no_grad():
        answer = sublayer.load(result.folder)(batch.inputs, batch.step)
    assert distance_loss(answer["distogram"], batch.labels["distances"]) < 0.5


def test_alignments_are_held_out_by_their_files_too(tmp_path: Path) -> None:
    path = family(tmp_path)
    data = {"paths": path, "judge": path, "length": 24, "depth": 8}
    run = run_of({"out": "x", "objective": "masked_msa", "model": {"recipe": "evoformer", **TINY}, "data": data,
                  "train": {"steps": 1, "batch": 2}})  # fmt: skip
    feed = AlignmentFeed(run, tmp_path, Quiet())
    feed.open()
    count, batches = feed.held(None)
    asked = [batch.labels["msa"] for batch, _ in batches]
    assert len(asked) == count == 5  # of 2 crops, each with 7 of the 59 sequences
    assert feed.held(60)[0] == 2
    assert sum(int((labels != -100).sum()) for labels in asked) == pytest.approx(0.15 * 59 * 24, rel=0.3)


def test_models_of_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match="trains models of alignments"):
        MaskedAlignment().fits(llama(16, 1, 2, 1, 16, 32))
    with pytest.raises(UsageError, match="features=0"):
        MaskedAlignment().fits(evoformer(**TINY | {"features": 2}))
    with pytest.raises(SpecError, match="shares of one whole"):
        MaskedAlignment(hidden=0.9, uniform=0.2)


@pytest.mark.assets
def test_a_real_family_is_told_better_than_by_how_often_amino_acids_occur(tmp_path: Path) -> None:
    """Fibronectin type III, 98 sequences of Pfam's seed: masked cells of those held out cost fewer nats than by the
    frequencies in the others, gaps counted as cells, and without gaps."""
    path = next(debian("hmmer-examples").rglob("fn3.sto"))
    sizes = {"dim": 32, "layers": 2, "heads": 4, "pair": 16, "pair_heads": 2, "head_size": 8, "rank": 8, "widening": 2}
    sections: dict[str, Any] = {
        "objective": "masked_msa",
        "model": {"recipe": "evoformer", **sizes},
        "data": {"paths": str(path), "length": 100, "depth": 24, "held": 0.3},
        "train": {"steps": 60, "batch": 2},
    }
    result = carry_out(tmp_path, **sections)
    feed = AlignmentFeed(run_of({"out": "x"} | sections), tmp_path, Quiet())
    feed.open()
    train, _ = parted(read_alignments(path)[0], 0.3)
    model, background = sublayer.load(result.folder), torch.from_numpy(train.profile).mean(0)
    for classes in (22, 20):
        nats: list[torch.Tensor] = []
        for batch, _ in feed.held(None)[1]:
            with torch.no_grad():
                logits = model(batch.inputs, batch.step)["msa"]
            asked = (batch.labels["msa"] >= 0) & (batch.labels["msa"] < classes)
            labels, told = batch.labels["msa"][asked], logits[asked][:, :classes].log_softmax(-1)
            frequency = background[:classes] / background[:classes].sum()
            nats.append(torch.stack([-told.gather(1, labels[:, None])[:, 0], -frequency[labels].log()]))
        ours, theirs = torch.cat(nats, 1).mean(1).tolist()
        assert ours < theirs - 0.1, classes
