"""Jamba against transformers."""

from typing import Any

import pytest
import torch
from transformers import JambaConfig, PreTrainedModel

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import from_hf, jamba, to_hf
from sublayer.recipes.jamba import TINY
from sublayer.step import Step
from tests.oracle import PADDED, check_export, check_parity, close, oracle, positions, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 4,
}  # fmt: skip


def config(**changes: object) -> dict:
    return {"architectures": ["JambaForCausalLM"], "model_type": "jamba"} | SMALL | changes


def theirs_of(base: bool = False, **changes: Any) -> PreTrainedModel:
    return oracle(JambaConfig, base=base, **SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 3, "expert_layer_offset": 0},
        {"num_experts_per_tok": 3, "mamba_dt_rank": 5, "mamba_expand": 1},
        {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2},
        {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        {"num_experts": 1, "num_experts_per_tok": 1},
        {"num_experts_per_tok": 1},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(theirs_of(**changes), tmp_path, IDS)


def test_left_padded_rows_equal_theirs(tmp_path) -> None:
    padded = {"attention_mask": PADDED, "position_ids": positions(PADDED)}
    check_parity(theirs_of(), tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), **padded)


def test_packed_documents_equal_theirs_alone(tmp_path) -> None:
    theirs = theirs_of()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    segment = torch.tensor([[1] * 2 + [2] * 10, [1] * 7 + [2] * 5])
    with raised():
        alone = [torch.cat([theirs(row[None, :cut], use_cache=False).logits, theirs(row[None, cut:]).logits], 1)
                 for row, cut in zip(IDS, (2, 7), strict=True)]  # fmt: skip
    close(ours(IDS, Step(segment=segment)), torch.cat(alone))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True, "mamba_proj_bias": True}, {"num_experts": 1}], ids=str
)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(JambaConfig, tmp_path, **SMALL | changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = theirs_of(base=True)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        expected = theirs(IDS, use_cache=False).last_hidden_state
    close(ours(IDS), expected)


def test_published_config_is_the_published_size() -> None:
    """As ai21labs/Jamba-v0.1 has it."""
    spec, _ = from_hf({
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
        "mamba_inner_layernorms": True, "mamba_proj_bias": False, "max_position_embeddings": 262144,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_mamba_kernels": True, "vocab_size": 65536,
    })  # fmt: skip
    assert spec == jamba(4096, 32, 32, 8, 14336, 65536, inner=8192, rank=256, balance_loss=0.001 / 16)


@pytest.mark.parametrize(
    "changes", [{}, {"attention": (9, 8), "tied": True}, {"moe": (4, 3)}, {"experts": 1, "rank": 4}], ids=str
)
def test_specs_and_config_files_are_inverses(changes: dict) -> None:
    spec = jamba(**TINY | changes)
    values, module = to_hf(spec)
    assert module.HF[values["architectures"][0]](values).replace(init=spec.init) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("hidden_act", "tanh"),
        ("mamba_d_conv", 1),
        ("attn_layer_offset", 3),
        ("expert_layer_period", 0),
        ("num_experts_per_tok", 5),
        ("mamba_inner_layernorms", False),
        ("mamba_expand", "two"),
        ("mamba_dt_rank", "half"),
        ("sliding_window", 5),
        ("router_aux_loss_coef", -1.0),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"mamba_d_conv": "kernel", "num_experts_per_tok": "active", "router_aux_loss_coef": "balance_loss"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(config() | {key: value})
    assert "\n" not in str(caught.value)
