"""Images from noise, with a model trained by the objective "diffusion".

B images, C channels, H and W height and width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import UsageError
from ..nn.sublayer import ModelOp

STEPS = 1000  # of noising; the model's time is told on this scale


def diffuse(
    model: ModelOp | Callable[[dict[str, Tensor]], Tensor],
    shape: Sequence[int],
    classes: Tensor,
    *,
    target: Literal["noise", "velocity"] = "noise",
    steps: int = 50,
    guidance: float = 1.0,
    no_class: int | None = None,
    seed: int = 0,
) -> Tensor:
    """[B, C, H, W] float32: an image for each of classes [B] int64, begun as noise of shape (C, H, W).

    "noise": deterministic DDIM steps (arXiv 2010.02502, eq. 12, η = 0); "velocity": Euler steps along the flow. Above
    1, guidance moves away from what is answered without a class, whose number is no_class (arXiv 2207.12598, eq. 6).
    Raises UsageError for numbers that mean nothing.
    """
    if steps < 1 or steps > STEPS:
        raise UsageError(f"steps={steps}: from 1 to {STEPS}")
    if guidance != 1.0 and no_class is None:
        raise UsageError("guidance needs no_class, the number that stands for no class (how many classes there are)")
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(len(classes), *shape, generator=generator).to(classes.device)

    def answer(x: Tensor, time: float) -> Tensor:
        times = torch.full((len(x),), time, device=x.device)
        if guidance == 1.0:
            return _ask(model, x, times, classes)
        both = torch.cat([classes, torch.full_like(classes, no_class or 0)])
        told, untold = _ask(model, torch.cat([x, x]), times.repeat(2), both).chunk(2)
        return untold + guidance * (told - untold)

    with torch.inference_mode():
        if target == "velocity":
            for i in range(steps, 0, -1):
                x = x - answer(x, STEPS * i / steps) / steps
            return x
        times = torch.linspace(STEPS - 1, 0, steps, dtype=torch.float64).round()
        shares = [*signal_share(times).tolist(), 1.0]
        for time, share, later in zip(times.tolist(), shares[:-1], shares[1:], strict=True):
            noise = answer(x, time)
            image = (x - (1 - share) ** 0.5 * noise) / share**0.5
            x = later**0.5 * image + (1 - later) ** 0.5 * noise
        return x


def _ask(model: Any, x: Tensor, times: Tensor, classes: Tensor) -> Tensor:
    found = model({"images": x, "time": times, "classes": classes})
    return found[0] if isinstance(found, tuple) else found


def signal_share(time: Tensor) -> Tensor:
    """The share of an image's variance that is left after `time` steps of noising, the first being number 0.

    Each of 1,000 steps adds a variance that grows evenly from 1e-4 to 0.02 (DDPM, arXiv 2006.11239, section 4).
    """
    variances = torch.linspace(1e-4, 0.02, STEPS, dtype=torch.float64)
    return (1 - variances).log().cumsum(0).exp().to(time.device)[time.long()].to(time.dtype)
