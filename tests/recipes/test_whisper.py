"""Whisper against transformers."""

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import WhisperConfig, WhisperForConditionalGeneration, WhisperModel

import sublayer
from sublayer.errors import InputError, SpecError, UsageError, WeightsError
from sublayer.recipes import to_hf, whisper
from sublayer.recipes.whisper import TINY, from_hf
from sublayer.step import Step
from tests.case import rough
from tests.cases import CASES
from tests.oracle import check_parity, close, export, oracle, raised, saved

SIZES: dict[str, Any] = {
    "vocab_size": 61, "num_mel_bins": 5, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "max_source_positions": 6, "max_target_positions": 32,
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 60),
}  # fmt: skip
CONFIG = {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"} | SIZES
IDS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(1))
FRAMES = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def with_sinusoids(theirs: Any) -> Any:
    """In fp64, where they are rounded to fp32 when made: sin(pos · 10000^(−i / 15)), then the cosines."""
    angles = [[pos * 10000 ** (-i / 15) for i in range(16)] for pos in range(6)]
    table = torch.tensor([[f(a) for f in (math.sin, math.cos) for a in row] for row in angles], dtype=torch.float64)
    positions = theirs.get_encoder().embed_positions
    del positions.weight  # a parameter that never trains
    positions.register_buffer("weight", table)
    return theirs


def tiny(made: Any = WhisperForConditionalGeneration, **changes: Any) -> Any:
    return with_sinusoids(oracle(WhisperConfig, made=made, **SIZES | changes))


@pytest.mark.parametrize(
    "changes",
    [{}, {"decoder_layers": 1, "num_mel_bins": 7}, {"activation_function": "relu", "max_source_positions": 6}],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    frames = torch.randn(2, 12, changes.get("num_mel_bins", 5), generator=torch.Generator().manual_seed(3)).double()
    check_parity(tiny(**changes), tmp_path, IDS, source=frames)


def test_padded_texts_equal_theirs(tmp_path) -> None:
    read = torch.tensor([[1] * 9 + [0] * 3, [1] * 12])
    step = Step(segment=read)
    check_parity(tiny(), tmp_path, IDS, step, read.bool(), FRAMES, decoder_attention_mask=read)


class _Reader(WhisperForConditionalGeneration):
    """Theirs, with its sinusoids in fp64 again."""

    @classmethod
    def from_pretrained(cls, *args: Any, **options: Any) -> Any:
        found: Any = WhisperForConditionalGeneration.from_pretrained(*args, **options)
        return with_sinusoids(found[0]), found[1]


def test_export_is_exact_and_read_by_transformers(tmp_path) -> None:
    export(tiny(), tmp_path, IDS, FRAMES, _Reader)


def test_the_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = tiny(WhisperModel)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        features = FRAMES.transpose(1, 2)
        expected = theirs(input_features=features, decoder_input_ids=IDS, use_cache=False).last_hidden_state
    close(ours(IDS, source=FRAMES), expected)


def test_positions_that_are_no_sinusoids_are_refused(tmp_path) -> None:
    saved(tiny(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.encoder.embed_positions.weight"] += 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"embed_positions\.weight holds no sinusoids"):
        sublayer.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder_ffn_dim", 40),
        ("scale_embedding", True),
        ("apply_spec_augment", True),
        ("encoder_layerdrop", 0.1),
        ("activation_function", "mish"),
        ("tie_word_embeddings", False),
        ("rope_theta", 1e4),
        ("num_mel_bins", 0),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


def test_keys_with_biases_have_no_class_of_theirs() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(whisper(**TINY).override("decoder.blocks.*.attn.op.k_bias=true"))


# --- frames ---


@torch.no_grad()
@pytest.mark.parametrize("frames", [7, 8])
def test_a_shorter_recording_beside_a_longer_one_is_heard_as_alone(frames: int) -> None:
    model = rough(CASES["whisper"])
    heard = torch.ones(2, 12, dtype=torch.long)
    heard[0, frames:] = 0
    both = model(IDS, Step(memory_segment=heard), source=FRAMES)
    close(both[0], model(IDS[:1], source=FRAMES[:1, :frames])[0])
    close(both[1], model(IDS[1:], source=FRAMES[1:])[0])


@pytest.mark.parametrize(
    ("frames", "segment", "message"),
    [
        (torch.zeros(1, 12, 4), None, r"floating-point \[B, T, 5\]"),
        (torch.zeros(1, 12), None, r"floating-point \[B, T, 5\]"),
        (torch.zeros(1, 12, 5, dtype=torch.long), None, "floating-point"),
        (torch.zeros(1, 13, 5), None, "13 frames are more than the model's 12"),
        (torch.zeros(1, 12, 5), [0] * 2 + [1] * 10, "one recording, padded on the right"),
        (torch.zeros(1, 12, 5), [2] * 6 + [1] * 6, "one recording, padded on the right"),
    ],
)
def test_frames_that_cannot_be_meant_are_refused(frames: torch.Tensor, segment: list | None, message: str) -> None:
    step = Step(memory_segment=None if segment is None else torch.tensor([segment]))
    with pytest.raises(InputError, match=message):
        rough(CASES["whisper"])(IDS[:1], step, source=frames)


@torch.no_grad()
def test_beams_over_recordings_score_as_teacher_forced() -> None:
    model = rough(CASES["whisper"])
    sources = [FRAMES[0], FRAMES[1, :7], FRAMES[0, 3:11]]
    rows = model.generate([[60]] * 3, sources=sources, beams=3, max_tokens=6)
    for row, source in zip(rows, sources, strict=True):
        for beam in row.beams:
            read = torch.tensor([[60, *beam.ids]])
            logprobs = model(read, source=source[None])[0, :-1].log_softmax(-1)
            expected = logprobs.gather(1, torch.tensor(beam.ids)[:, None]).sum()
            torch.testing.assert_close(beam.logprob, float(expected))
    greedy = model.generate([[60]] * 2, sources=FRAMES, temperature=0.0, max_tokens=4)
    assert [len(row.ids) for row in greedy] == [4, 4]
    with pytest.raises(UsageError, match="one floating-point tensor"):
        model.generate([60], sources=[[1, 2, 3]])
