"""DeepSeek-V3 and V2 against transformers."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV2Config, DeepseekV3Config

import sublayer
from sublayer.errors import SpecError, WeightsError
from sublayer.recipes import from_hf
from tests.oracle import SMALL, check_base, check_export, check_geometry, check_parity, oracle, saved

IDS = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(1))
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "original_max_position_embeddings": 8,
        "mscale": 0.7, "mscale_all_dim": 0.9}  # fmt: skip
V3: tuple[dict[str, Any], ...] = (
    {},
    {"q_lora_rank": None, "first_k_dense_replace": 0, "n_shared_experts": 1, "tie_word_embeddings": True,
     "n_routed_experts": 6, "n_group": 3, "topk_group": 2},
    {"rope_parameters": YARN},
    {"rope_parameters": YARN | {"mscale": None}, "rope_interleave": False},
    {"attention_bias": True, "norm_topk_prob": False, "hidden_act": "gelu", "n_group": 1, "topk_group": 1},
    {"rms_norm_eps": 1e-3, "routed_scaling_factor": 1.0, "rope_parameters": {"rope_type": "linear", "factor": 3.0,
                                                                             "rope_theta": 100.0}},
)  # fmt: skip
V2: tuple[dict[str, Any], ...] = (
    {"topk_method": "greedy", "q_lora_rank": None},
    {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rope_parameters": YARN},
    {"topk_method": "greedy", "attention_bias": True, "first_k_dense_replace": 2, "num_hidden_layers": 3},
)


def config(**changes: object) -> dict:
    return (
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "routed_scaling_factor": 2.5}
        | SMALL[DeepseekV3Config]
        | changes
    )


def config_v2(**changes: object) -> dict:
    return config(architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2") | changes


@pytest.mark.parametrize("changes", V3, ids=str)
def test_v3_equals_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(DeepseekV3Config, **changes), tmp_path, IDS)


@pytest.mark.parametrize("changes", V2, ids=str)
def test_v2_equals_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(DeepseekV2Config, **changes), tmp_path, IDS)


@pytest.mark.parametrize("family", [DeepseekV3Config, DeepseekV2Config])
def test_padded_and_packed_rows_equal_theirs(family: type, tmp_path) -> None:
    check_geometry(family, tmp_path)


@pytest.mark.parametrize("changes", [V3[1], V3[2], V3[3], V3[4]], ids=str)
def test_export_of_v3_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(DeepseekV3Config, tmp_path, **changes)


@pytest.mark.parametrize("changes", V2, ids=str)
def test_export_of_v2_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(DeepseekV2Config, tmp_path, **changes)


@pytest.mark.parametrize("family", [DeepseekV3Config, DeepseekV2Config])
def test_base_class_gives_their_hidden_vectors(family: type, tmp_path) -> None:
    check_base(family, tmp_path, IDS)


def test_the_layer_that_predicts_a_second_token_is_left_out_and_no_other(tmp_path) -> None:
    file = saved(oracle(DeepseekV3Config), tmp_path) / "model.safetensors"
    tensors, ids = load_file(file), IDS
    expected = sublayer.load(tmp_path)(ids)
    last = {name.replace("layers.1.", "layers.2."): x.clone() for name, x in tensors.items() if "layers.1." in name}
    last |= {f"model.layers.2.{name}.weight": torch.ones(32) for name in ("enorm", "hnorm", "eh_proj")}
    save_file(tensors | last, file, {"format": "pt"})
    torch.testing.assert_close(sublayer.load(tmp_path)(ids), expected, rtol=0, atol=0)
    save_file(tensors | {name.replace("layers.2.", "layers.3."): x for name, x in last.items()}, file, {"format": "pt"})
    with pytest.raises(WeightsError, match=r"model\.layers\.3\..* has no place"):
        sublayer.load(tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("num_key_value_heads", 2),
        ("moe_layer_freq", 2),
        ("topk_method", "greedy"),
        ("scoring_func", "softmax"),
        ("n_shared_experts", 0),
        ("first_k_dense_replace", 3),
        ("kv_lora_rank", 0),
        ("partial_rotary_factor", 0.5),
        ("quantization_config", {"quant_method": "fp8"}),
        ("index_topk", 2048),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(config(**{key: value}))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [("norm_topk_prob", True), ("mlp_bias", True), ("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")],
)
def test_what_is_not_modelled_of_v2_is_refused_in_one_line(key: str, value: object) -> None:
    with pytest.raises(SpecError, match=key) as caught:
        from_hf(config_v2(**{key: value}))
    assert "\n" not in str(caught.value)


def test_published_files_are_read() -> None:
    """Their keys and values, but for those that say how weights are quantised."""
    rope = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
    v3 = {
        "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "ep_size": 1,
        "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168, "intermediate_size": 18432,
        "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_layer_freq": 1,
        "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
        "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid", "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        "rope_scaling": rope | {"mscale": 1.0, "mscale_all_dim": 1.0},
    }  # fmt: skip
    assert from_hf(v3)[0] == sublayer.recipes.model("deepseek-v3")
    lite = v3 | {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "seq_aux": True,
        "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_group": 1,
        "topk_method": "greedy", "vocab_size": 102400,
        "rope_scaling": rope | {"mscale": 0.707, "mscale_all_dim": 0.707},
    }  # fmt: skip
    assert from_hf(lite)[0] == sublayer.recipes.model("deepseek-v2-lite")
    v2 = lite | {
        "hidden_size": 5120, "intermediate_size": 12288, "moe_intermediate_size": 1536, "n_group": 8, "topk_group": 3,
        "n_routed_experts": 160, "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 60,
        "q_lora_rank": 1536, "routed_scaling_factor": 16.0, "topk_method": "group_limited_greedy",
    }  # fmt: skip
    assert from_hf(v2)[0] == sublayer.recipes.model("deepseek-v2")
