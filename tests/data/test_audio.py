"""Log-mel frames against transformers' feature extractor; WAV files against scipy; rates against tones."""

import math
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from scipy.io import wavfile
from transformers import WhisperFeatureExtractor

from sublayer.data.audio import log_mel, mel_filters, read_audio, resample
from sublayer.errors import InputError


def recording(seconds: float, seed: int = 0) -> torch.Tensor:
    """A rising tone in noise."""
    time = torch.arange(round(seconds * 16_000)) / 16_000
    noise = torch.randn(time.shape, generator=torch.Generator().manual_seed(seed))
    return 0.5 * torch.sin(2 * torch.pi * (200 + 300 * time) * time) + 0.01 * noise


@pytest.mark.parametrize("bands", [80, 128])
@pytest.mark.parametrize("seconds", [0.5, 3.3, 31.0])
def test_frames_equal_theirs(bands: int, seconds: float) -> None:
    samples = recording(seconds)
    theirs = WhisperFeatureExtractor(feature_size=bands)(samples.numpy(), sampling_rate=16_000, return_tensors="pt")
    frames = log_mel(samples, bands)
    assert frames.shape == (3000, bands)
    torch.testing.assert_close(frames, theirs["input_features"][0].T, atol=1e-4, rtol=0)


def test_filters_equal_theirs() -> None:
    theirs = torch.tensor(WhisperFeatureExtractor().mel_filters, dtype=torch.float64)
    torch.testing.assert_close(torch.tensor(mel_filters(80), dtype=torch.float64), theirs, atol=1e-12, rtol=0)


def test_each_recording_of_a_batch_is_scaled_by_its_own_loudest() -> None:
    batch = torch.stack([recording(1.0, 1), 0.001 * recording(1.0, 2)])
    frames = log_mel(batch, seconds=None)
    assert frames.shape == (2, 100, 80)
    for row, samples in zip(frames, batch, strict=True):
        torch.testing.assert_close(row, log_mel(samples, seconds=None))
        assert row.max() - row.min() <= 2.0001


@pytest.mark.parametrize(
    ("samples", "message"), [(torch.zeros(400, dtype=torch.int16), "floating-point"), (torch.zeros(200), "too few")]
)
def test_samples_that_cannot_be_meant_are_refused(samples: torch.Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        log_mel(samples, seconds=None)


# --- files ---


def write(path: Path, samples: np.ndarray, width: int, rate: int = 16_000) -> Path:
    """samples [N, channels] of whole numbers, in `width` bytes each."""
    with wave.open(str(path), "wb") as file:
        file.setparams((samples.shape[1], width, rate, 0, "NONE", ""))
        wide = samples.astype("<i4").view(np.uint8).reshape(*samples.shape, 4)[..., :width]
        file.writeframes((wide ^ 0x80 if width == 1 else wide).tobytes())
    return path


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_samples_of_a_wav_file_are_scipys(width: int, channels: int, tmp_path: Path) -> None:
    limit = 1 << (8 * width - 1)
    values = np.random.default_rng(0).integers(-limit, limit, (1000, channels))
    values[:2] = [[-limit], [limit - 1]]
    path = write(tmp_path / "a.wav", values, width)
    _, theirs = wavfile.read(path)
    theirs = theirs.reshape(1000, channels).astype(np.float64)
    whole = {1: 128, 2: 2**15, 3: 2**31, 4: 2**31}[width]  # scipy puts three bytes into the upper of four
    expected = ((theirs - 128) if width == 1 else theirs) / whole
    found = read_audio(path)
    torch.testing.assert_close(found.double(), torch.from_numpy(expected).mean(1), rtol=0, atol=1e-6)
    assert float(found[0]) == -1.0


def test_a_file_of_another_rate_is_read_at_ours(tmp_path: Path) -> None:
    values = (np.sin(np.arange(44_100) * 2 * np.pi * 1000 / 44_100) * 30_000).astype(np.int64)[:, None]
    found = read_audio(write(tmp_path / "a.wav", values, 2, 44_100))
    assert len(found) == 16_000
    tone = torch.sin(torch.arange(16_000) * 2 * torch.pi * 1000 / 16_000) * 30_000 / 2**15
    torch.testing.assert_close(found[400:-400], tone[400:-400], rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "no WAV of whole numbers"),
        (b"ID3 is an MP3", "no WAV of whole numbers .*; for other formats: pip install 'sublayer.audio.'"),
        (None, "cut short: 100 samples are announced, and 90 are there"),
    ],
)
def test_a_file_that_is_none_is_refused(
    data: bytes | None, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    path = write(tmp_path / "a.wav", np.zeros((100, 1), dtype=np.int64), 2)
    path.write_bytes(path.read_bytes()[:-20] if data is None else data)
    with pytest.raises(InputError, match="a.wav: " + reason):
        read_audio(path)


def test_other_formats_are_read_by_the_library(tmp_path: Path) -> None:
    samples = recording(0.1).numpy()
    soundfile.write(tmp_path / "a.flac", np.stack([samples, -samples / 2], 1), 16_000)
    found = read_audio(tmp_path / "a.flac")
    torch.testing.assert_close(found, torch.from_numpy(samples) / 4, rtol=0, atol=1e-4)
    soundfile.write(tmp_path / "a.wav", samples, 16_000, "FLOAT")
    torch.testing.assert_close(read_audio(tmp_path / "a.wav"), torch.from_numpy(samples))
    (tmp_path / "a.flac").write_bytes(b"fLaC and no more")
    with pytest.raises(InputError, match="a.flac: no recording: "):
        read_audio(tmp_path / "a.flac")


def test_a_length_that_was_not_known_is_no_fault(tmp_path: Path) -> None:
    """As a program writes it that sends a recording through a pipe."""
    path = write(tmp_path / "a.wav", np.ones((100, 1), dtype=np.int64), 2)
    data = bytearray(path.read_bytes())
    data[40:44] = b"\xff\xff\xff\x7f"
    path.write_bytes(data)
    assert len(read_audio(path)) == 100


@pytest.mark.parametrize("rate", [8000, 11_025, 16_000, 22_050, 44_100, 48_000, 96_000])
def test_a_tone_at_another_rate_is_the_tone_sampled_at_ours(rate: int) -> None:
    """Below 0.9 of half the lower rate it stays; above that half it is gone."""
    half = min(rate, 16_000) / 2

    def tone(hertz: float, rate: int) -> torch.Tensor:
        return torch.sin(torch.arange(rate, dtype=torch.float64) * 2 * torch.pi * hertz / rate).float()

    for share in (0.01, 0.3, 0.9):
        found = resample(tone(share * half, rate), rate)
        assert len(found) == 16_000
        torch.testing.assert_close(found[800:-800], tone(share * half, 16_000)[800:-800], rtol=0, atol=2e-3)
    if rate > 16_000:
        for share in (1.02, 1.3):
            assert float(resample(tone(share * half, rate), rate)[800:-800].abs().max()) < 1e-2


def test_rows_are_resampled_alone() -> None:
    rows = torch.stack([recording(0.5, 1), recording(0.5, 2)])
    torch.testing.assert_close(resample(rows, 44_100)[1], resample(rows[1], 44_100))
    assert resample(rows, 44_100).shape == (2, math.ceil(8000 * 160 / 441))


def test_a_rate_with_little_in_common_is_refused() -> None:
    with pytest.raises(InputError, match="44101 samples a second have too little in common with 16000"):
        resample(torch.zeros(10), 44_101)
