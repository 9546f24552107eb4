"""Sound: recordings read from files, and log-mel frames as Whisper (arXiv 2212.04356, section 2.2) was trained on.

N samples, T frames, F mel bands.
"""

from __future__ import annotations

import math
import wave
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from ..errors import InputError

RATE = 16_000
"""Samples a second."""
HOP = 160
"""Samples from one frame to the next: 10 milliseconds."""
WINDOW = 400
"""Samples that a frame looks at: 25 milliseconds."""

ENDLESS = 0x7FFFFFFF - 4096
"""Bytes that a WAV announces at least whose length was not known when its head was written."""


def read_audio(path: Path | str) -> Tensor:
    """The recording in a file → samples [N] in fp32, mono, RATE a second, from −1 to 1; channels are averaged.

    WAV files of whole numbers are read as they are; others (FLAC, MP3, Ogg, …) by the library soundfile, an extra.
    Raises InputError for what is no recording, or is cut short.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            samples, rate = _read_wav(file, path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    except (wave.Error, EOFError) as error:
        samples, rate = _read_other(path, str(error) or "it ends at once")
    try:
        return resample(samples.mean(1), rate)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None


def resample(samples: Tensor, rate: int, to: int = RATE) -> Tensor:
    """samples [.., N], `rate` a second → [.., ceil(N · to / rate)] in fp32: what lies above half the lower rate goes.

    A sinc of 48 zeros a side under a squared cosine, flat up to 0.9 of that half. Raises InputError for rates that have
    too little in common.
    """
    common = math.gcd(rate, to)
    up, down = to // common, rate // common  # `up` samples stand where `down` stood
    if up * down > 1 << 22:
        raise InputError(f"{rate} samples a second have too little in common with {to}: resample them first")
    if up == down:
        return samples.float()
    cutoff = 0.95 * min(1.0, up / down)
    half = 48 / cutoff
    width = math.ceil(half)
    # The kernel of each of the `up` phases, over the samples around those that it lies between.
    t = torch.arange(-width, width + down).double() - torch.arange(up).double()[:, None] * down / up
    window = torch.cos(torch.pi / 2 * (t / half).clamp(-1, 1)).square()
    kernel = (cutoff * torch.sinc(cutoff * t) * window).to(samples.device, torch.float32)
    rows = torch.nn.functional.pad(samples.float().reshape(-1, 1, samples.shape[-1]), (width, width + down))
    found = torch.nn.functional.conv1d(rows, kernel[:, None], stride=down)
    length = -(-samples.shape[-1] * up // down)
    return found.transpose(1, 2).reshape(*samples.shape[:-1], -1)[..., :length]


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


def _read_wav(file: BinaryIO, path: Path) -> tuple[Tensor, int]:
    """(samples [N, channels], how many a second). Raises wave.Error for what is no WAV of whole numbers."""
    with wave.open(file) as sound:
        width, channels, rate = sound.getsampwidth(), sound.getnchannels(), sound.getframerate()
        announced, here = sound.getnframes(), path.stat().st_size // (width * channels)
        data = sound.readframes(min(announced, here))
    count = len(data) // (width * channels)
    if not count or (count < announced and announced * width * channels < ENDLESS):
        raise InputError(f"{path}: cut short: {announced:,} samples are announced, and {count:,} are there")
    parts = torch.frombuffer(bytearray(data), dtype=torch.uint8).reshape(count, channels, width)
    if width == 1:  # the one width without a sign
        return (parts[..., 0].float() - 128) / 128, rate
    wide = torch.zeros(count, channels, 4, dtype=torch.uint8)
    wide[..., 4 - width :] = parts
    return wide.view(torch.int32)[..., 0].float() / 2**31, rate


def _read_other(path: Path, reason: str) -> tuple[Tensor, int]:
    try:
        import soundfile
    except ImportError:
        raise InputError(
            f"{path}: no WAV of whole numbers ({reason}); for other formats: pip install 'sublayer[audio]'"
        ) from None
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise InputError(f"{path}: no recording: {error}") from None
    return torch.from_numpy(samples), rate


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
