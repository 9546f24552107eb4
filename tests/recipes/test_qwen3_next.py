"""Qwen3-Next against transformers."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3NextConfig

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import from_hf, qwen3_next, to_hf
from sublayer.recipes.qwen3_next import TINY
from sublayer.step import Step
from tests.oracle import (
    PACKED,
    PADDED,
    check_base,
    check_export,
    check_parity,
    close,
    compare,
    oracle,
    positions,
    raised,
    saved,
)

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
DELTA, ATTENTION = "linear_attention", "full_attention"


def config(**changes: object) -> dict:
    return {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layer_types": [DELTA, DELTA, ATTENTION, DELTA], "num_hidden_layers": 4, "mlp_only_layers": [1]},
        {"decoder_sparse_step": 2, "norm_topk_prob": False, "tie_word_embeddings": True},
        {"num_experts": 0, "attention_bias": True, "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "rope_parameters": {
            "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}},
    ],
    ids=str,
)  # fmt: skip
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Qwen3NextConfig, **changes), tmp_path, IDS)


def test_longer_than_a_chunk_it_is_theirs(tmp_path) -> None:
    ids = torch.randint(97, (1, 150), generator=torch.Generator().manual_seed(4))
    check_parity(oracle(Qwen3NextConfig), tmp_path, ids)


def test_each_fourth_layer_attends_where_the_file_does_not_say() -> None:
    spec, _ = from_hf(config(num_hidden_layers=8))
    names = [block.sublayers[0].name for block in spec.find("decoder.blocks")]
    assert names == ["delta", "delta", "delta", "attn"] * 2
    assert spec.find("decoder.blocks.3.attn.op.position.size") == 64
    other, _ = from_hf(config(num_hidden_layers=8, full_attention_interval=2))
    assert [block.sublayers[0].name for block in other.find("decoder.blocks")] == ["delta", "attn"] * 4


def test_padded_rows_equal_theirs_and_packed_ones_their_documents(tmp_path) -> None:
    """Theirs cannot be told in plain torch where packed documents start."""
    theirs = oracle(Qwen3NextConfig)
    padded = {"attention_mask": PADDED, "position_ids": positions(PADDED)}
    ours = check_parity(theirs, tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), **padded)
    found = ours(IDS, Step(segment=PACKED))
    for row, segment in enumerate(PACKED):
        for number in segment.unique():
            with raised():
                expected = theirs(IDS[row, segment == number][None], use_cache=False).logits[0]
            close(found[row, segment == number], expected)


@pytest.mark.parametrize(
    "changes", [{}, {"mlp_only_layers": [0], "tie_word_embeddings": True}, {"num_experts": 0}], ids=str
)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Qwen3NextConfig, tmp_path, **changes)


def test_their_predictor_of_further_tokens_is_left_out(tmp_path) -> None:
    theirs = oracle(Qwen3NextConfig)
    saved(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    first = "model.layers.1."  # the one that attends
    tensors |= {name.replace(first, "mtp.layers.0."): tensor for name, tensor in tensors.items() if first in name}
    tensors |= dict.fromkeys(("mtp.fc.weight", "mtp.norm.weight", "mtp.pre_fc_norm_hidden.weight"), torch.ones(1))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    compare(theirs, sublayer.load(tmp_path, dtype=torch.float64), tmp_path, IDS)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(Qwen3NextConfig, tmp_path, IDS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("layer_types", [DELTA]),
        ("layer_types", [DELTA, "sliding_attention"]),
        ("layer_types", [[DELTA], DELTA]),
        ("mlp_only_layers", "all"),
        ("mlp_only_layers", [0.5]),
        ("linear_num_key_heads", 3),
        ("num_experts", -1),
        ("num_experts_per_tok", 600),
        ("hidden_act", "swish_beta"),
        ("decoder_sparse_step", 0),
        ("rope_parameters", {"rope_type": "spiral"}),
        ("attention_bias", "no"),
        ("num_key_value_heads", 3),
        ("rms_norm_eps", float("nan")),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"linear_num_key_heads": "key_heads", "num_experts_per_tok": "active", "attention_bias": "bias",
            "num_key_value_heads": "kv_heads", "rms_norm_eps": "eps"}  # fmt: skip
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    ["decoder.blocks.1.attn.op.window=4", "decoder.blocks.1.attn.op.gated=false", "decoder.blocks.0.delta.op.eps=0.5"],
)
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(qwen3_next(**TINY).override(change))


def test_layers_that_do_not_add_up_are_refused() -> None:
    changed: dict[str, Any] = TINY | {"attends": (True,)}
    with pytest.raises(SpecError, match="attends has 1 and ffn 2 entries for 2 layers"):
        qwen3_next(**changed)
