"""gpt-oss against transformers."""

import pytest
import torch
from transformers import GptOssConfig

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.rope_scaling import Yarn
from sublayer.recipes import from_hf
from sublayer.recipes.gpt_oss import ROPE, ClampedSwiGLU
from sublayer.step import Step
from tests.oracle import check_base, check_export, check_geometry, check_parity, close, oracle, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        "original_max_position_embeddings": 8}  # fmt: skip


def config(**changes: object) -> dict:
    return {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_parameters": YARN, "max_position_embeddings": 32},
        {"swiglu_limit": 0.05, "swiglu_alpha": 1.0},
        {"attention_bias": False, "tie_word_embeddings": True, "num_experts_per_tok": 3},
        {"num_hidden_layers": 3, "layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(GptOssConfig, **changes), tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(GptOssConfig, tmp_path, sliding_window=20)


def test_a_window_counts_inside_its_document(tmp_path) -> None:
    """Packed rows equal the documents alone, whose window is shorter than they are."""
    theirs = oracle(GptOssConfig, sliding_window=3)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        alone = [theirs(IDS[:1, a:b], use_cache=False).logits for a, b in ((0, 5), (5, 12))]
    close(ours(IDS[:1], Step(segment=torch.tensor([[1] * 5 + [2] * 7]))), torch.cat(alone, 1))


@pytest.mark.parametrize(
    "changes",
    [{"rope_parameters": YARN, "max_position_embeddings": 32}, {"attention_bias": False, "swiglu_limit": 2.0}],
    ids=str,
)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(GptOssConfig, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(GptOssConfig, tmp_path, IDS)


def test_inner_values_are_cut_off_at_the_limit() -> None:
    """(up + 1) · gate · sigmoid(α · gate): beyond the limit nothing changes, and a gate may be as low as it likes."""
    inner = ClampedSwiGLU(4, alpha=1.5, limit=2.0).inner
    up, gate = torch.tensor([-9.0, -1, 0, 9]), torch.tensor([9.0, 1, -9, 9])
    s = torch.sigmoid
    expected = [-1 * 2 * s(torch.tensor(3.0)), 0.0, -9 * s(torch.tensor(-13.5)), 3 * 2 * s(torch.tensor(3.0))]
    torch.testing.assert_close(inner(up, gate), torch.tensor(expected))


def test_absent_keys_mean_what_their_config_class_says() -> None:
    spec, theirs = from_hf(config())[0], GptOssConfig(num_hidden_layers=2)
    attentions = [block.sublayers[0].op for block in spec.find("decoder.blocks")]
    assert theirs.layer_types == ["sliding_attention", "full_attention"]
    assert [attention.window for attention in attentions] == [theirs.sliding_window, None]
    assert attentions[0].bias
    assert attentions[0].position == ROPE
    assert ROPE.theta == GptOssConfig.default_theta
    given = from_hf(config(rope_theta=150000, rope_scaling=dict(theirs.rope_parameters or {})))[0]
    assert isinstance(given.find("decoder.blocks.0.attn.op.position.scaling"), Yarn)
    assert given == spec
    twice = from_hf(config(experts_per_token=2, initial_context_length=4096))[0]  # as published files have it
    assert twice == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("quantization_config", {"quant_method": "mxfp4"}),
        ("hidden_act", "gelu"),
        ("experts_per_token", 4),
        ("layer_types", ["full_attention"]),
        ("num_local_experts", -1),
        ("swiglu_limit", 0.0),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match="limit must be above 0" if key == "swiglu_limit" else key) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)


def test_an_inner_layer_without_a_gate_is_refused() -> None:
    with pytest.raises(SpecError, match="its inner layer is gated"):
        ClampedSwiGLU(4, gated=False)
