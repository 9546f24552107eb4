"""OLMo 2 against transformers."""

from typing import Any

import pytest
import torch
from transformers import Olmo2Config

from sublayer.errors import SpecError
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.olmo2 import TINY, olmo2
from tests.oracle import check_base, check_export, check_geometry, check_parity, oracle

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 1, "attention_bias": True},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-2, "tie_word_embeddings": True},
        {"hidden_act": "gelu", "rope_parameters": YARN, "max_position_embeddings": 32},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Olmo2Config, **changes), tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(Olmo2Config, tmp_path)


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True, "tie_word_embeddings": True, "rope_parameters": YARN,
                                          "max_position_embeddings": 32}], ids=str)  # fmt: skip
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Olmo2Config, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(Olmo2Config, tmp_path, IDS)


def test_what_the_file_does_not_say_is_what_their_config_class_says() -> None:
    del (bare := dict(CONFIG))["num_key_value_heads"]
    assert from_hf(bare)[0].find("decoder.blocks.0.attn.op.kv_heads") == 4
    assert from_hf(bare)[0].find("decoder.norm.eps") == 1e-5


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("made_up_key", 1, "made_up_key"),
        ("head_dim", 8, "head_dim"),
        ("clip_qkv", 8.0, "clip_qkv"),
        ("sliding_window", 8, "sliding_window"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor"),
        ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("rope_scaling", {"type": "spiral"}, "spiral"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    ["decoder.blocks.*.attn.op.qk_norm_joint=false", "decoder.blocks.*.attn.op.window=4",
     "decoder.blocks.0.ffn.post=null", "decoder.norm.plus_one=true"],
)  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(olmo2(**TINY).override(change))
