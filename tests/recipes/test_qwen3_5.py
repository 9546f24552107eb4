"""Qwen3.5's language models against transformers."""

from typing import Any

import pytest
import torch
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForConditionalGeneration
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForConditionalGeneration

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import from_hf, qwen3_5, to_hf
from sublayer.recipes.qwen3_5 import TINY
from sublayer.recipes.qwen3_next import experts
from sublayer.step import Step
from tests.oracle import PADDED, SMALL, check_base, check_export, check_parity, close, oracle, positions, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
DENSE, MOE = Qwen3_5TextConfig, Qwen3_5MoeTextConfig
MROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0],
         "mrope_interleaved": True}  # fmt: skip


def config(**changes: object) -> dict:
    return {
        "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (DENSE, {}),
        (DENSE, {"linear_num_key_heads": 4, "tie_word_embeddings": True, "attention_bias": True}),
        (DENSE, {"rope_parameters": MROPE}),
        (MOE, {}),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(family: type, changes: dict, tmp_path) -> None:
    check_parity(oracle(family, **changes), tmp_path, IDS)


def test_padded_rows_equal_theirs(tmp_path) -> None:
    padded = {"attention_mask": PADDED, "position_ids": positions(PADDED)}
    check_parity(oracle(DENSE), tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), **padded)


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_export_is_exact_and_read_by_transformers(family: type, tmp_path) -> None:
    check_export(family, tmp_path)


@pytest.mark.parametrize("family", [DENSE, MOE])
def test_base_class_gives_their_hidden_vectors(family: type, tmp_path) -> None:
    check_base(family, tmp_path, IDS)


@pytest.mark.parametrize(
    ("whole", "made", "text"),
    [
        (Qwen3_5Config, Qwen3_5ForConditionalGeneration, DENSE),
        (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration, MOE),
    ],
)
def test_of_a_model_that_sees_images_the_language_model_is_read(whole: Any, made: Any, text: type, tmp_path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
              "num_position_embeddings": 16}  # fmt: skip
    theirs = oracle(whole, made=made, text_config=SMALL[text] | {"rope_parameters": MROPE}, vision_config=vision)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        close(ours(IDS), theirs(IDS, use_cache=False).logits)


def test_a_model_with_experts_is_written_as_qwen3_next() -> None:
    assert to_hf(qwen3_5(**TINY))[0]["architectures"] == ["Qwen3_5ForCausalLM"]
    sizes: dict[str, Any] = TINY | {"ffn": experts(4, 2, 12, 16)}
    assert to_hf(qwen3_5(**sizes))[0]["architectures"] == ["Qwen3NextForCausalLM"]


def test_published_keys_that_change_no_answer_to_text_are_read() -> None:
    spec, _ = from_hf(config(rope_parameters=MROPE))
    text = config(rope_parameters=MROPE, attn_output_gate=True, mtp_num_hidden_layers=1, mamba_ssm_dtype="float32",
                  mlp_only_layers=[], partial_rotary_factor=0.5, full_attention_interval=4)  # fmt: skip
    assert from_hf(text)[0] == spec
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": text,
             "vision_config": {"depth": 12}, "tie_word_embeddings": True, "image_token_id": 90}  # fmt: skip
    assert from_hf(whole)[0] == spec.replace(tied=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("attn_output_gate", False),
        ("num_experts", 4),
        ("layer_types", ["linear_attention"]),
        ("vision_config", {"depth": 2}),
        ("intermediate_size", 0),
        ("mlp_only_layers", [1]),
        ("output_gate_type", "swish"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)
