"""Transcription: recordings of people by a published Whisper, and the way around it on a tiny one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.io import wavfile
from scipy.signal import resample_poly
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

import sublayer
from sublayer.data.audio import RATE, log_mel, read_audio
from sublayer.decoding import read_speech, transcribe
from sublayer.decoding.transcribe import Speech, windows
from sublayer.errors import InputError, UsageError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import gpt2, whisper
from sublayer.recipes.gpt2 import TINY as GPT2_TINY
from sublayer.recipes.whisper import TINY
from sublayer.text import Bytes, load_tokenizer
from tests import assets
from tests.assets.whisper import convert
from tests.decoding.models import tiny

MARKS = ("<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>",
         "<|notimestamps|>")  # fmt: skip
END, START, EN, DE, TRANSLATE, TRANSCRIBE, NO_TIMES = range(256, 263)
TOKENIZER = Bytes(MARKS)


# --- a published model ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(tmp_path_factory.mktemp("whisper"))


@pytest.mark.assets
def test_two_recordings_are_written_down_as_transformers_does(folder: Path) -> None:
    """Theirs reads the recordings with scipy, makes its own frames, and searches for itself."""
    sounds = assets.debian("alsa-utils") / "usr/share/sounds/alsa"
    paths = [sounds / "Front_Center.wav", sounds / "Rear_Left.wav"]
    model, tokenizer, recordings = sublayer.load(folder), load_tokenizer(folder), [*map(read_audio, paths)]
    texts = transcribe(model, tokenizer, recordings, read_speech(folder))
    assert texts == ["Front, center.", "rear left."]

    theirs: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    stored = [wavfile.read(path) for path in paths]
    heard = [resample_poly(samples / 2**15, RATE, rate) for rate, samples in stored]
    features = WhisperFeatureExtractor()(heard, sampling_rate=RATE, return_tensors="pt")["input_features"]
    said = theirs.generate(features, num_beams=1, do_sample=False)
    assert [tokenizer.decode(ids.tolist()).strip() for ids in said] == texts

    same = WhisperFeatureExtractor()([*map(torch.Tensor.numpy, recordings)], sampling_rate=RATE, return_tensors="pt")
    frames = torch.stack([*map(log_mel, recordings)])
    torch.testing.assert_close(frames, same["input_features"].transpose(1, 2), rtol=0, atol=1e-4)
    with torch.no_grad():
        # Theirs stores the encoder's sinusoids, here in fp16; ours computes them.
        front: Any = model.spec.find("encoder.embed")
        positions = front.position.table(torch.arange(1500), 384, torch.float32)
        theirs.get_encoder().embed_positions.weight.copy_(positions)
        read = torch.cat([torch.tensor([[50257, 50362]] * 2), said], 1)
        found = model(read, source=frames)
        expected = theirs(input_features=frames.transpose(1, 2), decoder_input_ids=read).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


# --- the way around it ---


@pytest.fixture(scope="module")
def model() -> ModelOp:
    """Hears 0.12 seconds; 263 to 271 would be times."""
    return tiny(whisper(**{**TINY, "vocab": 272}), torch.float32, 12.0)


def recording(seconds: float, seed: int = 0) -> torch.Tensor:
    return torch.randn(round(seconds * RATE), generator=torch.Generator().manual_seed(seed)) / 4


def expected(model: ModelOp, prompt: list[int], part: torch.Tensor, **options: Any) -> str:
    [row] = model.generate(
        [prompt], tokenizer=TOKENIZER, sources=log_mel(part, 5, seconds=0.12)[None], max_tokens=224, **options
    )
    return (row.text or "").strip()


@pytest.mark.parametrize("way", [{"temperature": 0.0}, {"beams": 3}], ids=str)
def test_windows_are_answered_one_after_another_without_times_and_suppressed_tokens(model: ModelOp, way: dict) -> None:
    speech = Speech(False, (1, 97), (65,))
    samples, short = recording(0.2), recording(0.05, 1)
    parts = windows(samples, 1920)
    assert [len(part) for part in parts] == [960, 960, 1280]
    left_out = {"suppress": (1, 97, *range(263, 272)), "suppress_first": (65,), "stop_ids": END}
    alone = [expected(model, [START, NO_TIMES], part, **left_out, **way) for part in parts]
    done: list[tuple[int, int, float]] = []
    texts = transcribe(
        model, TOKENIZER, [samples, recording(0), short], speech, beams=way.get("beams", 1),
        progress=lambda *seen: done.append(seen),
    )  # fmt: skip
    assert len({*alone}) == 3
    assert texts[:2] == [" ".join(filter(None, alone)), ""]
    assert texts[2] == expected(model, [START, NO_TIMES], short, **left_out, **way)
    assert done == [(i, 4, i / 4) for i in range(1, 5)]


@torch.no_grad()
def test_language_and_task_stand_before_the_answer(model: ModelOp) -> None:
    samples, speech = recording(0.1), Speech(True)
    options: dict[str, Any] = {"temperature": 0.0, "suppress": range(263, 272), "stop_ids": END}

    def text(prompt: list[int]) -> str:
        return expected(model, prompt, samples, **options | {"suppress": tuple(options["suppress"])})

    [german] = transcribe(model, TOKENIZER, [samples], speech, language="de", task="translate")
    assert german == text([START, DE, TRANSLATE, NO_TIMES])
    first = model(torch.tensor([[START]]), source=log_mel(samples, 5, seconds=0.12)[None])[0, -1]
    spoken = EN if first[EN] > first[DE] else DE
    [found] = transcribe(model, TOKENIZER, [samples], speech)
    assert found == text([START, spoken, TRANSCRIBE, NO_TIMES])
    assert len({text([START, one, task, NO_TIMES]) for one in (EN, DE) for task in (TRANSLATE, TRANSCRIBE)}) == 4


def test_longer_recordings_are_cut_where_they_are_quietest() -> None:
    samples = recording(70.0)
    samples[27 * RATE : 27 * RATE + 4000] *= 0.01
    samples[50 * RATE : 50 * RATE + 4000] *= 0.01
    first, second, last = windows(samples, 30 * RATE)
    assert abs(len(first) - 27 * RATE - 2000) < 1000
    assert 25 * RATE < len(second) <= 30 * RATE  # 50 s is within the last five of no window
    torch.testing.assert_close(torch.cat([first, second, last]), samples)


def test_windows_without_sound_are_left_out() -> None:
    samples = recording(70.0)
    samples[28 * RATE :] *= 1e-4
    assert [len(part) <= 30 * RATE for part in windows(samples, 30 * RATE)] == [True]
    assert windows(torch.zeros(RATE), 30 * RATE) == []


@pytest.mark.parametrize(
    ("config", "generation", "speech"),
    [
        ({"vocab_size": 51864}, None, Speech(False)),
        ({"vocab_size": 51865, "suppress_tokens": [1, 2], "begin_suppress_tokens": None}, None, Speech(True, (1, 2))),
        ({"suppress_tokens": [1]}, {"suppress_tokens": [3], "begin_suppress_tokens": [4], "is_multilingual": False},
         Speech(False, (3,), (4,))),
    ],
)  # fmt: skip
def test_what_a_checkpoint_says_of_its_answers(config: dict, generation: dict | None, speech: Speech, tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_speech(tmp_path) == speech


def test_suppressed_tokens_that_are_no_ids_are_refused(tmp_path) -> None:
    (tmp_path / "generation_config.json").write_text('{"suppress_tokens": "-1"}')
    with pytest.raises(InputError, match="suppress_tokens and begin_suppress_tokens are lists of ids"):
        read_speech(tmp_path)


def test_what_cannot_be_meant_is_refused(model: ModelOp) -> None:
    with pytest.raises(UsageError, match="hears no sound"):
        transcribe(gpt2(**GPT2_TINY).build(), TOKENIZER, [recording(0.1)], Speech())
    with pytest.raises(UsageError, match="English only"):
        transcribe(model, TOKENIZER, [recording(0.1)], Speech(), language="de")
    for language in ("xx", "translate"):
        with pytest.raises(UsageError, match=f"language '{language}' is none"):
            transcribe(model, TOKENIZER, [recording(0.1)], Speech(True), language=language)
    with pytest.raises(UsageError, match="task 'sing'"):
        transcribe(model, TOKENIZER, [recording(0.1)], Speech(True), task="sing")
    with pytest.raises(UsageError, match=r"no special token '<\|startoftranscript\|>'"):
        transcribe(model, Bytes(), [recording(0.1)], Speech())
    with pytest.raises(InputError, match="one row of samples"):
        transcribe(model, TOKENIZER, [torch.zeros(2, 100)], Speech())
