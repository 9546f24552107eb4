"""Sound to log-mel frames, as Whisper (arXiv 2212.04356, section 2.2) was trained on: plain torch, on any device.

N samples, T frames, F mel bands.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import InputError

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples from one frame to the next: 10 milliseconds."""
WINDOW = 400
"""Samples that a frame looks at: 25 milliseconds."""


def log_mel(samples: Tensor, bands: int = 80, *, seconds: float | None = 30.0) -> Tensor:
    """samples [.., N] floating, mono, 16,000 a second, from −1 to 1 → frames [.., T, F] in fp32, 100 a second.

    Recordings are cut to `seconds`, or filled with silence; None: as they are. A frame holds, for each band, the
    logarithm of its power, no more than 80 dB below the recording's loudest, scaled to around −1 … 1.
    Raises InputError for samples that are no floating-point numbers or too few.
    """
    if not samples.is_floating_point():
        raise InputError(f"samples are floating-point numbers from −1 to 1, got {samples.dtype}")
    x = samples.float()
    if seconds is not None:
        wanted = round(seconds * RATE)
        x = torch.nn.functional.pad(x[..., :wanted], (0, max(0, wanted - x.shape[-1])))
    if x.shape[-1] <= WINDOW // 2:
        raise InputError(f"{x.shape[-1]} samples are too few: a frame looks at {WINDOW}, half of them mirrored")
    rows = x.reshape(-1, x.shape[-1])
    window = torch.hann_window(WINDOW, device=x.device)
    waves = torch.stft(rows, WINDOW, HOP, window=window, return_complex=True)[..., :-1]
    power = waves.abs().square().transpose(1, 2)  # [rows, T, WINDOW / 2 + 1]
    filters = torch.tensor(mel_filters(bands), dtype=torch.float32, device=x.device)
    logs = (power @ filters).clamp(min=1e-10).log10()
    logs = torch.maximum(logs, logs.amax((1, 2), keepdim=True) - 8.0)
    return ((logs + 4.0) / 4.0).reshape(*samples.shape[:-1], -1, bands)


@lru_cache
def mel_filters(bands: int) -> list[list[float]]:
    """[WINDOW / 2 + 1][F]: how much of each frequency of a frame each band takes.

    Triangles over 0 … 8,000 Hz whose corners are evenly spaced on Slaney's mel scale, each of area 1.
    """
    corners = [_hertz(_mel(RATE / 2) * i / (bands + 1)) for i in range(bands + 2)]
    table: list[list[float]] = []
    for k in range(WINDOW // 2 + 1):
        hertz = k * RATE / WINDOW
        row: list[float] = []
        for low, middle, high in zip(corners, corners[1:], corners[2:], strict=False):
            height = max(0.0, min((hertz - low) / (middle - low), (high - hertz) / (high - middle)))
            row.append(height * 2 / (high - low))
        table.append(row)
    return table


def _mel(hertz: float) -> float:
    """Slaney's scale: linear below 1,000 Hz (15 mels), logarithmic above."""
    return 3 * hertz / 200 if hertz < 1000 else 15 + 27 * math.log(hertz / 1000) / math.log(6.4)


def _hertz(mel: float) -> float:
    return 200 * mel / 3 if mel < 15 else 1000 * math.exp(math.log(6.4) * (mel - 15) / 27)
