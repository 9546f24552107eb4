"""GPT-2 against transformers."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config

import sublayer
from sublayer.errors import InputError, SpecError
from sublayer.recipes import to_hf
from sublayer.recipes.gpt2 import from_hf, gpt2
from tests.oracle import check_base, check_export, check_geometry, check_parity, compare, oracle, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4,
          "vocab_size": 97, "n_positions": 64}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"n_inner": 40},
        {"layer_norm_epsilon": 1e-2},
        {"reorder_and_upcast_attn": False, "n_head": 1},
        *({"activation_function": name} for name in ("gelu", "relu", "silu", "gelu_pytorch_tanh")),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(GPT2Config, **changes), tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(GPT2Config, tmp_path)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "n_inner": 40}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(GPT2Config, tmp_path, **changes)


def test_checkpoints_without_the_prefix_are_the_same_model(tmp_path) -> None:
    """The published "gpt2" has names without `transformer.`, and its causal masks stored as buffers."""
    theirs = oracle(GPT2Config)
    saved(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    bare |= {f"h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril() for i in range(2)}
    bare["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(bare, tmp_path / "model.safetensors")
    compare(theirs, sublayer.load(tmp_path, dtype=torch.float64), tmp_path, IDS)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(GPT2Config, tmp_path, IDS)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scale_attn_by_inverse_layer_idx", True),
        ("scale_attn_weights", False),
        ("add_cross_attention", True),
        ("is_encoder_decoder", True),
        ("pruned_heads", {"0": [1]}),
        ("activation_function", "mish"),
        ("activation_function", ["gelu"]),
        ("quantization_config", {"bits": 4}),
        ("attention_temperature", 2),
        ("n_head", 0),
        ("n_layer", 1_000_000_000),
        ("n_embd", "32"),
        ("n_embd", 32.0),
        ("layer_norm_epsilon", "small"),
        ("resid_pdrop", 1.5),
        ("tie_word_embeddings", "yes"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    ours = {"layer_norm_epsilon": "eps", "resid_pdrop": "dropout", "tie_word_embeddings": "tied"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["n_embd", "n_layer", "n_head", "vocab_size", "n_positions"])
def test_a_missing_size_is_named(key: str) -> None:
    with pytest.raises(SpecError, match=f"has no '{key}'"):
        from_hf({k: v for k, v in CONFIG.items() if k != key})


def test_three_dropouts_are_kept_apart() -> None:
    spec = from_hf(CONFIG | {"resid_pdrop": 0.1, "embd_pdrop": 0.2, "attn_pdrop": 0.3})
    found = [
        spec.find(f"decoder.{path}.dropout") for path in ("blocks.1.attn", "blocks.1.ffn", "embed", "blocks.1.attn.op")
    ]
    assert found == [0.1, 0.1, 0.2, 0.3]
    config, _ = to_hf(spec)
    assert [config[f"{name}_pdrop"] for name in ("resid", "embd", "attn")] == [0.1, 0.2, 0.3]


def test_absent_dropouts_are_a_tenth_as_in_their_class() -> None:
    assert from_hf(CONFIG) == from_hf(CONFIG | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1))
    assert from_hf(CONFIG).find("decoder.embed.dropout") == 0.1


@pytest.mark.parametrize(
    "change",
    [
        "decoder.blocks.0.attn.op.window=4",
        "decoder.blocks.*.attn.op.softcap=30.0",
        "decoder.norm=null",
        "decoder.blocks.*.ffn.scale=0.5",
        "decoder.embed.scale=2",
        "head.bias=true",
        "decoder.blocks.1.ffn.op.hidden=40",
    ],
)
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(gpt2(32, 2, 4, 97, 64).override(change))


def test_more_tokens_than_positions_is_one_line() -> None:
    model = gpt2(32, 1, 4, 97, 8).build()
    model(IDS[:, :8])
    with pytest.raises(InputError, match="position 8 is beyond the 8 learned positions"):
        model(IDS[:, :9])


def test_json_names_of_the_config_are_read_from_a_file(tmp_path) -> None:
    """One unknown key in the file: the error names the file and the key."""
    saved(oracle(GPT2Config), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"n_embed": 32}))
    with pytest.raises(SpecError, match=r"config\.json: gpt2: config\.json sets n_embed=32"):
        sublayer.load(tmp_path)
