"""Qwen3-MoE against transformers."""

import pytest
import torch
from transformers import Qwen3MoeConfig

from sublayer.errors import SpecError
from sublayer.recipes import from_hf, qwen3_moe
from sublayer.recipes.qwen3_moe import TINY
from tests.oracle import check_base, check_export, check_geometry, check_parity, oracle

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
DENSE = {"num_hidden_layers": 3, "mlp_only_layers": [1], "norm_topk_prob": True}


def config(**changes: object) -> dict:
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "moe_intermediate_size": 16, "num_experts": 6, "num_experts_per_tok": 3,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": True},
        {"attention_bias": True, "tie_word_embeddings": True, "hidden_act": "gelu"},
        {"num_hidden_layers": 4, "decoder_sparse_step": 2},
        DENSE,
        {"use_sliding_window": True, "sliding_window": 4, "rope_parameters": {"rope_type": "default",
                                                                           "rope_theta": 500.0}},
    ],
    ids=str,
)  # fmt: skip
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Qwen3MoeConfig, **changes), tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(Qwen3MoeConfig, tmp_path, **DENSE)


@pytest.mark.parametrize(
    "changes", [{}, DENSE, {"use_sliding_window": True, "sliding_window": 4, "attention_bias": True}], ids=str
)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Qwen3MoeConfig, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(Qwen3MoeConfig, tmp_path, IDS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("mlp_only_layers", "all"),
        ("mlp_only_layers", [0.5]),
        ("decoder_sparse_step", 0),
        ("num_experts", 0),
        ("moe_intermediate_size", 0),
        ("shared_expert_intermediate_size", 16),
        ("layer_types", ["full_attention"] * 2),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)


def test_a_window_in_some_layers_is_refused_and_one_that_is_not_used_is_known() -> None:
    unused = {
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": 48,
    }  # as published files have it
    assert from_hf(config(**unused))[0] == from_hf(config())[0]
    with pytest.raises(SpecError, match="max_window_layers"):
        from_hf(config(use_sliding_window=True, sliding_window=4, max_window_layers=1))


def test_a_dense_layer_needs_its_width() -> None:
    with pytest.raises(SpecError, match="layer 1 is dense; give dense_hidden"):
        qwen3_moe(**{key: value for key, value in TINY.items() if key != "dense_hidden"})
