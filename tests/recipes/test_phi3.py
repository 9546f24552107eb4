"""Phi-3 against transformers."""

from typing import Any, cast

import pytest
import torch
from transformers import Phi3Config

from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.nn.rope_scaling import Linear, LongRope
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.phi3 import TINY, phi3
from sublayer.recipes.phi3 import to_hf as own_to_hf
from tests.oracle import check_base, check_export, check_geometry, check_parity, oracle

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97,
}  # fmt: skip


def long(trained: int, **more: Any) -> dict[str, Any]:
    """A model of 40 positions that was trained with so many."""
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [1.0, 3.0, 5.0, 9.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4} | factors | more
    return {"rope_parameters": rope, "original_max_position_embeddings": trained, "max_position_embeddings": 40}


PART = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0],
                            "long_factor": [1.0, 3.0, 5.0], "partial_rotary_factor": 0.75},
        "original_max_position_embeddings": 10, "max_position_embeddings": 40}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "rms_norm_eps": 1e-2},
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        {"sliding_window": 5},
        long(11),
        long(12),
        long(8, attention_factor=1.3),
        PART,
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(Phi3Config, **changes), tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(Phi3Config, tmp_path)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 5, "tie_word_embeddings": True}, PART], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Phi3Config, tmp_path, resid_pdrop=0.1, **changes)
    assert '"model_type": "phi3"' in (tmp_path / "ours" / "config.json").read_text(encoding="utf-8")


def test_what_is_llama_but_for_names_is_exported_as_llama() -> None:
    """A spec does not know where it came from; both classes compute it."""
    assert to_hf(phi3(**TINY))[0]["model_type"] == "llama"
    assert to_hf(phi3(**TINY, dropout=0.1))[0]["model_type"] == "phi3"


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(Phi3Config, tmp_path, IDS)


@pytest.mark.parametrize("name", ["su", "longrope"])
def test_the_older_spelling_is_the_same_spec(name: str) -> None:
    newer = long(8)
    rope = {key: value for key, value in newer.pop("rope_parameters").items() if not key.startswith("rope_")}
    older = {"rope_scaling": {"type": name} | rope, "rope_theta": 1e4}
    assert from_hf(CONFIG | newer | older)[0] == from_hf(CONFIG | long(8))[0]


def test_of_two_trained_lengths_the_one_beside_the_table_counts() -> None:
    def values() -> dict[str, Any]:  # theirs changes what it is given
        return CONFIG | long(11, original_max_position_embeddings=30) | {"pad_token_id": 0}

    spec, made = from_hf(values())[0], cast(Any, Phi3Config)
    theirs = made(**values())
    assert theirs.rope_parameters["original_max_position_embeddings"] == 11
    assert spec.find("decoder.blocks.0.attn.op.position.scaling.trained_length") == 11


def test_phi4_mini_is_read_from_its_published_keys() -> None:
    """A quarter of each head is not rotated; the divisors here are not the published ones."""
    published = {
        "hidden_size": 3072, "num_hidden_layers": 32, "num_attention_heads": 24, "num_key_value_heads": 8,
        "intermediate_size": 8192, "vocab_size": 200064, "tie_word_embeddings": True, "sliding_window": 262144,
        "partial_rotary_factor": 0.75, "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48},
        "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False, "mlp_bias": False, "embd_pdrop": 0.0,
    }  # fmt: skip
    spec = from_hf(CONFIG | published)[0]
    assert spec.find("decoder.blocks.0.attn.op.position.size") == 96
    assert spec.parameters() == 3_836_021_760


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("made_up_key", 1, "made_up_key"),
        ("hidden_act", "gelu", "hidden_act"),
        ("embd_pdrop", 0.1, "embd_pdrop"),
        ("attention_bias", True, "attention_bias"),
        ("partial_rotary_factor", 0, "partial_rotary_factor"),
        ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_type"),
        ("rope_scaling", {"type": "yarn", "short_factor": [1.0], "long_factor": [1.0]}, "short_factor"),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0] * 4}, "long_factor"),
        ("rope_scaling", {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "divisors"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        from_hf(CONFIG | {key: value})[0].build(device="meta")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("scaling", [None, LongRope((1.0, 1.5, 2.0, 2.5), (2.0,) * 4, 16, 4.0)])
def test_specs_and_config_files_are_inverses(scaling: LongRope | None) -> None:
    spec = phi3(**TINY, rope=Rope(500.0, scaling=scaling), window=5, dropout=0.1)
    assert from_hf(own_to_hf(spec))[0] == spec


def test_a_scaling_that_their_class_refuses_is_not_exported() -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(phi3(**TINY, rope=Rope(scaling=Linear(2.0)), dropout=0.1))
