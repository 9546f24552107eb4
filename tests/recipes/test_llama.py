"""Llama, Mistral, Qwen2, Qwen3 and SmolLM3 against transformers."""

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import DynamicNtk, Linear, Llama3, LongRope, Scaling, Yarn
from sublayer.recipes import from_hf, to_hf
from sublayer.step import Step
from tests.oracle import check_base, check_export, check_geometry, check_parity, close, compare, oracle, raised, saved
from tests.tiny import tiny

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
HALF = 4  # pairs of rotated dims in a head of 8

ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "llama3": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8},
    "yarn, all keys": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 8.0, "beta_slow": 0.5,
                       "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False},
    "yarn, attention_factor": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "attention_factor": 1.25,
                               "original_max_position_embeddings": 8},
    "longrope, beyond": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5],
                         "long_factor": [1.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": 10},
    "longrope, within": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 2.5],
                         "long_factor": [1.0, 3.0, 5.0, 9.0], "original_max_position_embeddings": 12},
}  # fmt: skip
LENGTHS = {"dynamic": 8, "longrope, beyond": 40, "longrope, within": 48}


def config(family: str = "Llama", **changes: object) -> dict:
    return {
        "architectures": [f"{family}ForCausalLM"], "model_type": family.lower(), "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1},
        {"attention_bias": True},
        {"mlp_bias": True},
        {"head_dim": 12},
        {"tie_word_embeddings": True},
        {"rms_norm_eps": 1e-2},
        *({"hidden_act": name} for name in ("gelu", "relu", "gelu_new", "gelu_pytorch_tanh")),
    ],
    ids=str,
)
def test_llama_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(LlamaConfig, **changes), tmp_path, IDS)


@pytest.mark.parametrize("name", ROPES)
def test_rope_scalings_equal_theirs(name: str, tmp_path) -> None:
    length = LENGTHS.get(name, 64)
    ours = check_parity(oracle(LlamaConfig, rope_parameters=ROPES[name], max_position_embeddings=length), tmp_path, IDS)
    plain = ours.spec.override("decoder.blocks.*.attn.op.position.scaling=null").empty(dtype=torch.float64)
    plain.load_state_dict(ours.state_dict())
    if name != "default":  # the scaling is no idle word at this length
        assert (plain(IDS) - ours(IDS)).abs().max() > 1e-4


def test_dynamic_rope_is_plain_within_the_trained_length_even_after_a_long_input(tmp_path) -> None:
    theirs = oracle(LlamaConfig, rope_parameters=ROPES["dynamic"], max_position_embeddings=8)
    ours = check_parity(theirs, tmp_path, IDS)
    compare(theirs, ours, tmp_path, IDS[:, :6])


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_the_older_spelling_is_the_same_spec(name: str) -> None:
    length = LENGTHS.get(name, 64)
    newer, _ = from_hf(config(rope_parameters=ROPES[name], max_position_embeddings=length))
    older = {key: value for key, value in ROPES[name].items() if key not in ("rope_theta", "rope_type")}
    kind, theta = ROPES[name]["rope_type"], ROPES[name]["rope_theta"]
    for key in ("type", "rope_type"):
        spelled = config(rope_scaling={key: kind} | older, rope_theta=theta, max_position_embeddings=length)
        assert from_hf(spelled)[0] == newer
    assert (
        from_hf(config(rope_theta=500.0, rope_scaling=None))[0] == from_hf(config(rope_parameters=ROPES["default"]))[0]
    )


@pytest.mark.parametrize("window", [2, 11, 12, None])
def test_mistral_windows_equal_theirs(window: int | None, tmp_path) -> None:
    ours = check_parity(oracle(MistralConfig, sliding_window=window), tmp_path, IDS)
    assert {block.sublayers[0].op.window for block in ours.spec.find("decoder.blocks")} == {window}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"sliding_window": 4, "max_window_layers": 2},  # named and not used
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 2},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 0},
        {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": True, "layer_types": [
            "sliding_attention", "full_attention", "sliding_attention", "full_attention"]},
    ],
    ids=str,
)  # fmt: skip
def test_qwen2_windows_on_some_layers_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Qwen2Config, num_hidden_layers=4, **changes), tmp_path, IDS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 12, "attention_bias": True, "tie_word_embeddings": True},
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "rms_norm_eps": 1e-2},
        {"rope_parameters": ROPES["yarn"], "max_position_embeddings": 64},
    ],
    ids=str,
)
def test_qwen3_norms_of_queries_and_keys_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Qwen3Config, **changes), tmp_path, IDS)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
        {"no_rope_layers": [0, 1, 1, 0, 1], "rope_parameters": ROPES["yarn"], "max_position_embeddings": 64},
        {"use_sliding_window": True, "sliding_window": 3},
    ],
    ids=str,
)
def test_smollm3_layers_without_positions_equal_theirs(changes: dict, tmp_path) -> None:
    ours = check_parity(oracle(SmolLM3Config, **changes), tmp_path, IDS)
    assert None in [block.sublayers[0].op.position for block in ours.spec.find("decoder.blocks")]


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"rope_parameters": ROPES["yarn"], "max_position_embeddings": 64}),
        (MistralConfig, {"sliding_window": 20}),
        (Qwen2Config, {}),
        (Qwen3Config, {}),
        (SmolLM3Config, {}),
    ],
)
def test_padded_and_packed_rows_equal_theirs(family: type, changes: dict, tmp_path) -> None:
    check_geometry(family, tmp_path, **changes)


def test_a_window_counts_inside_its_document(tmp_path) -> None:
    """Packed Mistral rows equal the documents alone, whose window is shorter than they are."""
    theirs = oracle(MistralConfig, sliding_window=3)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    segment = torch.tensor([[1] * 5 + [2] * 7])
    with raised():
        alone = [theirs(IDS[:1, a:b], use_cache=False).logits for a, b in ((0, 5), (5, 12))]
    close(ours(IDS[:1], Step(segment=segment)), torch.cat(alone, 1))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (LlamaConfig, {}),
        (LlamaConfig, {"head_dim": 12, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
        *((LlamaConfig, {"rope_parameters": ROPES[name], "max_position_embeddings": LENGTHS.get(name, 64)})
          for name in ROPES),
        (MistralConfig, {"sliding_window": 4}),
        (Qwen2Config, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        (Qwen2Config, {"tie_word_embeddings": True}),
        (Qwen3Config, {"attention_bias": True}),
        (Qwen3Config, {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1}),
        (SmolLM3Config, {}),
        (SmolLM3Config, {"no_rope_layers": [0, 1, 1, 0, 1], "use_sliding_window": True, "sliding_window": 3}),
    ],
)  # fmt: skip
def test_export_is_exact_and_read_by_transformers(family: type, changes: dict, tmp_path) -> None:
    check_export(family, tmp_path, **changes)


@pytest.mark.parametrize("family", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, SmolLM3Config])
def test_base_class_gives_their_hidden_vectors(family: type, tmp_path) -> None:
    check_base(family, tmp_path, IDS)


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("Llama", "made_up_key", 1),
        ("Llama", "hidden_act", "swish_beta"),
        ("Llama", "partial_rotary_factor", 0.5),
        ("Llama", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        ("Llama", "rope_parameters", {"rope_type": "spiral"}),
        ("Llama", "rope_parameters", {"rope_type": "linear", "factor": 2.0, "beta_fast": 3}),
        ("Llama", "rope_parameters", {"rope_type": "linear"}),
        ("Llama", "rope_parameters", [1]),
        ("Llama", "rope_scaling", "linear"),
        ("Mistral", "sliding_window", [4]),
        ("Qwen2", "max_window_layers", "all"),
        ("Qwen2", "layer_types", "full_attention"),
        ("Qwen2", "layer_types", [["full_attention"], "full_attention"]),
        ("Llama", "rope_interleaved", True),
        ("Llama", "quantization_config", {"quant_method": "fp8"}),
        ("Llama", "sliding_window", 5),
        ("Mistral", "sliding_window", 0),
        ("Mistral", "layer_types", ["full_attention"] * 2),
        ("Mistral", "attention_bias", True),
        ("Qwen2", "layer_types", ["full_attention"]),
        ("Qwen2", "layer_types", ["full_attention", "chunked_attention"]),
        ("Qwen2", "mlp_bias", True),
        ("Qwen3", "layer_types", ["full_attention"]),
        ("Qwen3", "mlp_bias", True),
        ("SmolLM3", "no_rope_layers", [1]),
        ("SmolLM3", "no_rope_layers", [1, 2]),
        ("SmolLM3", "no_rope_layers", 4),
        ("SmolLM3", "no_rope_layer_interval", 0),
        ("Llama", "num_key_value_heads", 3),
        ("Llama", "num_attention_heads", 0),
        ("Llama", "num_attention_heads", 1 << 400),
        ("Llama", "num_hidden_layers", -1),
        ("Llama", "hidden_size", None),
        ("Llama", "attention_bias", "no"),
        ("Llama", "rms_norm_eps", float("nan")),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(family: str, key: str, value: object) -> None:
    ours = {"partial_rotary_factor": "rotary", "rope_parameters": "rope_parameters|rotary|type", "rms_norm_eps": "eps",
            "sliding_window": "window", "num_key_value_heads": "kv_heads", "attention_bias": "bias"}  # fmt: skip
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(config(family) | {key: value})
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_absent_keys_mean_what_their_config_classes_say() -> None:
    """A file that names no window has Mistral's; one that says null has none."""
    bare = {
        key: value for key, value in config("Mistral", num_attention_heads=8).items() if key != "num_key_value_heads"
    }
    attention = from_hf(bare)[0].find("decoder.blocks.0.attn.op")
    assert (attention.window, attention.kv_heads) == (4096, 8)
    assert from_hf(bare | {"sliding_window": None})[0].find("decoder.blocks.0.attn.op.window") is None
    qwen: dict[str, Any] = config(
        "Qwen2", num_hidden_layers=30, use_sliding_window=True, num_attention_heads=32, hidden_size=64
    )
    windows = [block.sublayers[0].op.window for block in from_hf(qwen)[0].find("decoder.blocks")]
    assert windows == [None] * 28 + [4096] * 2
    unused = {
        "use_sliding_window": False,
        "sliding_window": 32768,
        "max_window_layers": 0,
    }  # as published files have it
    assert {block.sublayers[0].op.window for block in from_hf(qwen | unused)[0].find("decoder.blocks")} == {None}
    del qwen["num_key_value_heads"]
    assert from_hf(qwen)[0].find("decoder.blocks.0.attn.op.kv_heads") == 32
    assert from_hf(config(num_key_value_heads=None))[0].find("decoder.blocks.0.attn.op.kv_heads") == 4
    assert from_hf(config("Qwen3"))[0].find("decoder.blocks.0.attn.op.head_size") == 128


def test_keys_of_smollm_that_change_nothing_are_known() -> None:
    js = {"dtype": "q4", "kv_cache_dtype": {"fp16": "float16"}}
    smol = config(is_llama_config=True, rope_interleaved=False) | {"transformers.js_config": js}
    assert from_hf(smol)[0] == from_hf(config())[0]


@pytest.mark.parametrize("scaling", [None, Linear(2.0), DynamicNtk(2.0, 16), Yarn(4.0, 16), Llama3(8.0, 1.0, 4.0, 16),
                                     LongRope((1.0,) * HALF, (2.0,) * HALF, 16, 4.0)], ids=repr)  # fmt: skip
@pytest.mark.parametrize("window", [None, 5, (None, 5)])
def test_specs_and_config_files_are_inverses(scaling: Scaling | None, window: int | tuple | None) -> None:
    bias = isinstance(window, tuple)
    spec = tiny(rope=Rope(100.0, scaling=scaling), window=window, qkv_bias=bias)
    values, module = to_hf(spec)
    assert from_hf(values) == (spec, module)


@pytest.mark.parametrize("change", ["kv_heads=null", "head_size=8", "out_bias=false"])
def test_a_size_that_is_left_to_follow_another_is_exported_too(change: str) -> None:
    spec = tiny(kv_heads=4).override(f"decoder.blocks.*.attn.op.{change}")
    values, _ = to_hf(spec)
    assert from_hf(values)[0] == tiny(kv_heads=4)


@pytest.mark.parametrize(
    "change",
    ["decoder.blocks.*.attn.op.position.pairing=interleaved",
     "decoder.blocks.0.attn.op.window=4", "decoder.blocks.*.attn.op.keep_first=4",
     "decoder.blocks.*.attn.op.qk_norm={\"spec\": \"RMSNorm\"}", "decoder.blocks.*.ffn.op.gated=false",
     "decoder.norm.plus_one=true", "decoder.blocks.*.attn.pre.eps=1e-3"],
)  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(tiny().override(change))
