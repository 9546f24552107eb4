"""Bamba against transformers."""

from typing import Any

import pytest
import torch
from transformers import BambaConfig, PreTrainedModel

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.recipes import bamba, from_hf, to_hf
from sublayer.recipes.bamba import TINY
from sublayer.step import Step
from tests.oracle import PADDED, check_export, check_parity, close, oracle, positions, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6, "mamba_chunk_size": 5,
}  # fmt: skip


def config(**changes: object) -> dict:
    return {"architectures": ["BambaForCausalLM"], "model_type": "bamba"} | SMALL | changes


def theirs_of(base: bool = False, **changes: Any) -> PreTrainedModel:
    return oracle(BambaConfig, base=base, **SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn_layer_indices": [0, 2], "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_n_heads": 8},
        {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        {"mamba_conv_bias": False, "mamba_d_conv": 2, "tie_word_embeddings": True},
        {"rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        {"attn_layer_indices": None},
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
    "changes",
    [
        {},
        {"attn_layer_indices": [], "mamba_n_groups": 2},
        {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 5.0,
                                                         "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(BambaConfig, tmp_path, **SMALL | changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = theirs_of(base=True)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        expected = theirs(IDS, use_cache=False).last_hidden_state
    close(ours(IDS), expected)


def test_published_size_equals_theirs() -> None:
    published = {"vocab_size": 128256, "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128}
    with torch.device("meta"):
        theirs = oracle_size(BambaConfig(**published))
    spec, _ = from_hf(BambaConfig(**published).to_diff_dict() | {"architectures": ["BambaForCausalLM"]})
    assert spec.parameters() == theirs
    assert spec.find("decoder.blocks.9.attn.op.position") == Rope(10000.0, 64)


def oracle_size(config: BambaConfig) -> int:
    from transformers import BambaForCausalLM

    return sum(parameter.numel() for parameter in BambaForCausalLM(config).parameters())


@pytest.mark.parametrize(
    "changes", [{}, {"attention_layers": (0, 2), "tied": True}, {"rope": Rope(500.0), "ffn_bias": True}], ids=str
)
def test_specs_and_config_files_are_inverses(changes: dict) -> None:
    spec = bamba(**TINY | changes)
    values, module = to_hf(spec)
    assert module.HF[values["architectures"][0]](values).replace(init=spec.init) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("hidden_act", "tanh"),
        ("mamba_d_conv", 1),
        ("mamba_n_groups", 3),
        ("mamba_n_heads", 5),
        ("mamba_expand", "two"),
        ("attn_layer_indices", [3]),
        ("attn_layer_indices", "all"),
        ("attn_rotary_emb", 8),
        ("z_loss_coefficient", 0.1),
        ("time_step_limit", [0.0, 0.1]),
        ("rope_parameters", {"rope_type": "spiral"}),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"mamba_d_conv": "kernel", "mamba_n_groups": "groups", "attn_layer_indices": "attn_layer|attention_layers"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(config() | {key: value})
    assert "\n" not in str(caught.value)
