"""Images from noise: a model that knows its data exactly gives that data back."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import Tensor

import sublayer
from sublayer.data.images import Pictures
from sublayer.decoding.diffuse import STEPS, diffuse, signal_share
from sublayer.errors import UsageError
from sublayer.train.optim import AdamW
from sublayer.train.update import update
from sublayer.train.vision import Diffusion

MEAN, SPREAD = torch.tensor([1.5, -0.5]), 0.3  # of the pixels of two classes, each normal


def knows_noise(inputs: dict[str, Tensor]) -> Tensor:
    """The expected noise, given the noised image, where pixels are normal around the class's mean."""
    kept = signal_share(inputs["time"]).view(-1, 1, 1, 1)
    mean = MEAN[inputs["classes"]].view(-1, 1, 1, 1)
    return (1 - kept).sqrt() * (inputs["images"] - kept.sqrt() * mean) / (kept * SPREAD**2 + 1 - kept)


def knows_velocity(inputs: dict[str, Tensor]) -> Tensor:
    """The expected noise minus the expected image."""
    u = (inputs["time"] / STEPS).view(-1, 1, 1, 1)
    mean = MEAN[inputs["classes"]].view(-1, 1, 1, 1)
    off = (inputs["images"] - (1 - u) * mean) / ((1 - u) ** 2 * SPREAD**2 + u**2)
    return u * off - mean - (1 - u) * SPREAD**2 * off


@pytest.mark.parametrize("target", ["noise", "velocity"])
def test_exact_knowledge_gives_the_data_back(target: Literal["noise", "velocity"]) -> None:
    model = knows_noise if target == "noise" else knows_velocity
    classes = torch.arange(2).repeat_interleave(50)
    images = diffuse(model, (1, 8, 8), classes, target=target, steps=200, seed=1)
    for number in range(2):
        pixels = images[classes == number]
        assert float(pixels.mean()) == pytest.approx(float(MEAN[number]), abs=0.02)
        assert float(pixels.std()) == pytest.approx(SPREAD, abs=0.02)


def test_guidance_moves_away_from_what_is_said_without_a_class() -> None:
    """With the other class in place of none, guidance goes beyond the class's own mean."""
    zeros = torch.zeros(20, dtype=torch.long)
    plain, pushed = (diffuse(knows_noise, (1, 4, 4), zeros, steps=50, guidance=g, no_class=1) for g in (1.0, 1.5))
    assert float(pushed.mean()) > float(plain.mean()) + 0.1


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="steps=0"):
        diffuse(knows_noise, (1, 2, 2), torch.zeros(1, dtype=torch.long), steps=0)
    with pytest.raises(UsageError, match="no_class"):
        diffuse(knows_noise, (1, 2, 2), torch.zeros(1, dtype=torch.long), guidance=2.0)


def test_the_signal_falls_as_in_the_paper() -> None:
    """Products of 1 - β, written out: β grows evenly from 1e-4 to 0.02 over 1,000 steps."""
    share, expected = 1.0, []
    for i in range(1000):
        share *= 1 - (1e-4 + (0.02 - 1e-4) * i / 999)
        expected.append(share)
    found = signal_share(torch.arange(1000, dtype=torch.float64))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("target", ["noise", "velocity"])
def test_what_is_asked_undoes_what_was_done(target: Literal["noise", "velocity"]) -> None:
    """The answer, taken back from the noised image, is the image."""
    images = torch.randn(6, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    pictures = Pictures(images, torch.arange(6) % 3, [""] * 6)
    batch = Diffusion(target=target, no_class=0.5).collate(pictures, 3, torch.Generator().manual_seed(1))
    time, noised = batch.inputs["time"].view(-1, 1, 1, 1), batch.inputs["images"]
    if target == "noise":
        kept = signal_share(time)
        back = (noised - (1 - kept).sqrt() * batch.labels) / kept.sqrt()
        torch.testing.assert_close(back, images, atol=1e-2, rtol=0)  # little of the image is left late
    else:
        torch.testing.assert_close(noised - time / STEPS * batch.labels, images, atol=1e-5, rtol=0)
    told = batch.inputs["classes"]
    assert bool(((told == 3) | (told == pictures.labels)).all())
    assert 0 < int((told == 3).sum()) < 6


def test_a_model_that_answers_another_shape_is_refused_before_it_is_trained() -> None:
    sizes: dict[str, Any] = {"classes": 2, "image": 8, "patch": 4, "channels": 1}
    Diffusion().fits(sublayer.recipes.dit(32, 1, 2, **sizes, learn_sigma=False))
    with pytest.raises(UsageError, match="answers 2 channels to images of 1"):
        Diffusion().fits(sublayer.recipes.dit(32, 1, 2, **sizes))


def test_a_small_dit_learns() -> None:
    """Images that are the same everywhere, black or white: noise is what differs between pixels."""
    spec = sublayer.recipes.dit(32, 1, 2, classes=2, image=8, patch=4, channels=1, learn_sigma=False)
    model, objective = spec.build(seed=0), Diffusion()
    optimizer = AdamW(rate=3e-3).build(model)
    losses: list[float] = []
    for step in range(120):
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(2, (32,), generator=generator)
        images = (2.0 * labels - 1).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
        batch = objective.collate(Pictures(images, labels, [""] * 32), 2, generator)
        losses.append(update(model, [batch], objective, optimizer).loss)
    assert losses[0] == pytest.approx(1.0, abs=0.1)  # a new DiT answers zero
    assert sum(losses[-10:]) / 10 < 0.4
