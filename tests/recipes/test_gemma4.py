"""Gemma 4, text, against transformers."""

import json
from typing import Any

import pytest
import torch
from transformers import Gemma4Config, Gemma4ForConditionalGeneration, Gemma4TextConfig

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.sublayer import Model
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.gemma4 import TINY, gemma4
from sublayer.state import State
from tests.oracle import (
    SMALL,
    check_base,
    check_export,
    check_geometry,
    check_parity,
    close,
    oracle,
    raised,
    saved,
)

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
CONFIG: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 32, "num_hidden_layers": 6,
    "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97,
}  # fmt: skip
TIED = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
PLAIN = {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "use_double_wide_mlp": False}
HALF = {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e3, "factor": 2.0}
ROPES = {"full_attention": HALF,
         "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {},
        TIED,
        PLAIN,
        PLAIN | TIED,
        {"num_kv_shared_layers": 1, "use_double_wide_mlp": False, "attention_bias": True},
        PLAIN | TIED | {"global_head_dim": 8},
        PLAIN | {"global_head_dim": 8},
        {"final_logit_softcapping": 3.0, "rms_norm_eps": 1e-2, "tie_word_embeddings": False},
        {"rope_parameters": ROPES, "hidden_activation": "silu", "vocab_size_per_layer_input": 101},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    theirs = oracle(Gemma4TextConfig, **changes)
    for i, layer in enumerate(theirs.model.layers):
        layer.layer_scalar.fill_(0.5 + 0.2 * i)
    check_parity(theirs, tmp_path, IDS)


def test_padded_and_packed_rows_equal_theirs(tmp_path) -> None:
    check_geometry(Gemma4TextConfig, tmp_path, sliding_window=12)


@pytest.mark.parametrize("changes", [{}, PLAIN | TIED, {"rope_parameters": ROPES, "num_kv_shared_layers": 1}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Gemma4TextConfig, tmp_path, **changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    check_base(Gemma4TextConfig, tmp_path, IDS)


def test_layers_that_read_keep_no_state() -> None:
    state = State.allocate(_tiny().build(), 1, 8)
    kept = {name.removeprefix("decoder.blocks.") for name in state.store.declared}
    assert kept == {f"{i}.attn.op.{leaf}" for i in (0, 1) for leaf in "kv"}


def test_global_layers_are_given_in_two_ways() -> None:
    older = CONFIG | TIED | {"global_head_dim": 16}
    newer = CONFIG | {"attention_k_eq_v": True, "per_layer_config": {"5": {"head_dim": 16, "num_key_value_heads": 1}}}
    assert from_hf(older)[0] == from_hf(newer)[0]
    assert from_hf(CONFIG | {"num_global_key_value_heads": 1})[0].find("decoder.blocks.5.attn.op.kv_heads") == 2


def test_what_the_file_does_not_say_is_what_their_config_class_says() -> None:
    spec = from_hf(CONFIG)[0]
    last = spec.find("decoder.blocks.5.attn.op")
    assert (last.head_size, last.window, last.reads) == (512, None, None)
    assert (spec.find("decoder.blocks.4.attn.op.window"), spec.find("head.softcap")) == (512, None)
    assert from_hf(CONFIG | {"num_hidden_layers": 4})[0].find("decoder.blocks.3.attn.op.window") is None


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("made_up_key", 1, "made_up_key"),
        ("enable_moe_block", True, "enable_moe_block"),
        ("num_experts", 4, "num_experts"),
        ("use_bidirectional_attention", "all", "use_bidirectional_attention"),
        ("num_kv_shared_layers", 6, "writer"),
        ("num_kv_shared_layers", 1, "writer"),
        ("layer_types", ["sliding_attention"] * 6, "layer_types"),
        ("per_layer_config", {"0": {"head_dim": 16}}, "per_layer_config"),
        ("per_layer_config", {"5": {"window": 16}}, "per_layer_config"),
        ("rope_parameters", {"rope_type": "default"}, "rope_parameters"),
        ("rope_parameters", {"full_attention": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ("rope_parameters", {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 2.0}}, "share"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


def test_of_a_model_that_sees_and_hears_the_language_model_is_read(tmp_path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 16}  # fmt: skip
    audio = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 16}
    theirs = oracle(
        Gemma4Config, made=Gemma4ForConditionalGeneration, text_config=SMALL[Gemma4TextConfig] | {"pad_token_id": 0},
        vision_config=vision, audio_config=audio,
    )  # fmt: skip
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        close(ours(IDS), theirs(IDS, use_cache=False).logits)


@pytest.mark.parametrize("changes", [{}, {"layer_size": None}, {"sharing": 0, "double": False}, {"global_kv_heads": 1}])
def test_specs_and_config_files_are_inverses(changes: dict[str, Any]) -> None:
    spec = _tiny(**changes)
    assert from_hf(json.loads(json.dumps(to_hf(spec)[0])))[0] == spec


@pytest.mark.parametrize("change", ["decoder.blocks.*.attn.op.scale=0.3", "decoder.blocks.1.layer.after=null",
                                    "decoder.blocks.3.attn.op.reads=local"])  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(_tiny().override(change))


def _tiny(**changes: Any) -> Model:
    return gemma4(**TINY | changes)
