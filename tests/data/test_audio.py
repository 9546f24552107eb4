"""Log-mel frames against transformers' feature extractor."""

import pytest
import torch
from transformers import WhisperFeatureExtractor

from sublayer.data.audio import log_mel, mel_filters
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
