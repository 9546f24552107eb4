"""Gemma 1, 2 and 3 and EmbeddingGemma against transformers."""

import copy
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, GemmaConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.sublayer import Model
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.gemma import TINY, gemma
from sublayer.step import Step
from tests.oracle import (
    PADDED,
    SMALL,
    agree,
    check_base,
    check_export,
    check_geometry,
    check_parity,
    close,
    oracle,
    positions,
    raised,
    saved,
)

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
OTHER = {"sliding_window": 4, "query_pre_attn_scalar": 20, "num_hidden_layers": 3, "rms_norm_eps": 1e-2}
STRETCHED = {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e5},
             "sliding_attention": {"rope_type": "default", "rope_theta": 1e3}}  # fmt: skip


CLASSES = {"gemma": "GemmaForCausalLM", "gemma2": "Gemma2ForCausalLM", "gemma3_text": "Gemma3ForCausalLM"}


def config(family: str, **changes: object) -> dict[str, Any]:
    return {
        "architectures": [CLASSES[family]],
        "model_type": family, "hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 8,
        "num_key_value_heads": 2, "intermediate_size": 48, "vocab_size": 97,
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (GemmaConfig, {}),
        (GemmaConfig, {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": False}),
        (GemmaConfig, {"hidden_act": "relu", "head_dim": 12, "rms_norm_eps": 1e-2}),
        (Gemma2Config, {}),
        (Gemma2Config, OTHER | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}),
        (Gemma2Config, {"attn_logit_softcapping": None, "final_logit_softcapping": None, "attention_bias": True}),
        (Gemma3TextConfig, {}),
        (Gemma3TextConfig, OTHER | {"final_logit_softcapping": 3.0, "hidden_activation": "gelu"}),
        (Gemma3TextConfig, OTHER | {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
        (Gemma3TextConfig, {"rope_parameters": STRETCHED, "sliding_window": 5}),
    ],
    ids=str,
)  # fmt: skip
def test_logits_loss_and_gradients_equal_theirs(family: type, changes: dict, tmp_path) -> None:
    check_parity(oracle(family, **changes), tmp_path, IDS)


@pytest.mark.parametrize(
    ("family", "changes"),
    # A mask that says which documents are seen replaces their window: here it is wider than the row.
    [(GemmaConfig, {}), (Gemma2Config, {"sliding_window": 12}), (Gemma3TextConfig, {"sliding_window": 12})],
)
def test_padded_and_packed_rows_equal_theirs(family: type, changes: dict, tmp_path) -> None:
    check_geometry(family, tmp_path, **changes)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        (GemmaConfig, {"num_key_value_heads": 1}),
        (Gemma2Config, OTHER),
        (Gemma2Config, {"attn_logit_softcapping": None, "tie_word_embeddings": False}),
        (Gemma3TextConfig, OTHER | {"rope_parameters": STRETCHED, "attention_bias": True}),
        (Gemma3TextConfig, {"layer_types": ["full_attention"] * 2}),
        (Gemma3TextConfig, {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}),
    ],
    ids=str,
)
def test_export_is_exact_and_read_by_transformers(family: type, changes: dict, tmp_path) -> None:
    check_export(family, tmp_path, **changes)


@pytest.mark.parametrize("family", [GemmaConfig, Gemma2Config, Gemma3TextConfig])
def test_base_class_gives_their_hidden_vectors(family: type, tmp_path) -> None:
    check_base(family, tmp_path, IDS)


def test_of_a_model_that_sees_images_the_language_model_is_read(tmp_path) -> None:
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14, "vision_use_head": False}  # fmt: skip
    theirs = oracle(
        Gemma3Config, made=Gemma3ForConditionalGeneration, text_config=SMALL[Gemma3TextConfig], vision_config=vision,
        mm_tokens_per_image=4,
    )  # fmt: skip
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        close(ours(IDS), theirs(IDS, use_cache=False).logits)


def test_the_published_file_of_one_that_sees_leaves_sizes_to_its_class() -> None:
    """Gemma 3 4B's: its 4,300,079,472 parameters less those of the part that sees, 419,816,304 of them."""
    text: dict[str, Any] = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    file = {"architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
            "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3", "text_config": text,
            "vision_config": {"hidden_size": 1152}}  # fmt: skip
    spec, _ = from_hf(file)
    assert spec.parameters() == 4300079472 - 419816304
    made = Gemma3TextConfig(**copy.deepcopy(text))
    assert spec == from_hf(made.to_dict() | {"architectures": ["Gemma3ForCausalLM"]})[0]
    with pytest.raises(SpecError, match="final_logit_softcapping=30.0 is not modelled"):
        from_hf(file | {"text_config": text | {"final_logit_softcapping": 30.0}})


@pytest.mark.parametrize("window", [6, 7, 40])
def test_the_bidirectional_form_equals_theirs(window: int, tmp_path) -> None:
    """EmbeddingGemma's transformer: a window counts both sides; padding is not seen."""
    theirs = oracle(Gemma3TextConfig, base=True, use_bidirectional_attention=True, sliding_window=window)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    assert ours.spec.find("encoder.blocks.0.attn.op.window") == window // 2 + 1
    with raised():
        expected = theirs(IDS, attention_mask=PADDED, position_ids=positions(PADDED), use_cache=False).last_hidden_state
    real = PADDED.bool()
    agree(theirs, ours, tmp_path, ours(IDS, Step(segment=PADDED))[real], expected[real])


def test_the_bidirectional_form_is_exported_to_the_class_it_came_from(tmp_path) -> None:
    theirs = oracle(Gemma3TextConfig, base=True, use_bidirectional_attention=True, sliding_window=6)
    ours = sublayer.load(saved(theirs, tmp_path / "theirs"), dtype=torch.float64)
    sublayer.save(ours, tmp_path / "ours", layout="hf")
    with raised():
        again = Gemma3TextModel.from_pretrained(tmp_path / "ours", dtype=torch.float64, attn_implementation="eager")
        close(again.double()(IDS).last_hidden_state, theirs(IDS).last_hidden_state)


def test_spellings_of_published_files_are_the_same_spec() -> None:
    """The first Gemma named the exact GELU and meant its approximation; Gemma 3's ropes had keys of their own."""
    older = config("gemma", hidden_act="gelu", hidden_activation=None, rope_theta=10000.0, rope_scaling=None)
    assert from_hf(older)[0] == from_hf(config("gemma"))[0]
    older = config("gemma3_text", rope_theta=1e5, rope_local_base_freq=1e3, sliding_window_pattern=3,
                   cache_implementation="hybrid", rope_scaling={"rope_type": "linear", "factor": 8.0})  # fmt: skip
    kinds = ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert from_hf(older)[0] == from_hf(config("gemma3_text", rope_parameters=STRETCHED, layer_types=kinds))[0]


def test_what_the_file_does_not_say_is_what_their_config_class_says() -> None:
    spec = from_hf(config("gemma2"))[0]
    assert [spec.find(f"decoder.blocks.{i}.attn.op.window") for i in range(4)] == [4096, None, 4096, None]
    assert (spec.find("decoder.blocks.0.attn.op.softcap"), spec.find("head.softcap")) == (50.0, 30.0)
    assert from_hf(config("gemma2", head_dim=256))[0].find("decoder.blocks.0.attn.op.scale") is None
    assert from_hf(config("gemma3_text"))[0].find("head.softcap") is None


@pytest.mark.parametrize(
    ("family", "key", "value", "said"),
    [
        ("gemma", "made_up_key", 1, "made_up_key"),
        ("gemma", "use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("gemma", "hidden_activation", "relu", "hidden_activation"),
        ("gemma", "sliding_window", 4, "sliding_window"),
        ("gemma", "rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("gemma2", "layer_types", ["full_attention"], "layer_types"),
        ("gemma2", "layer_types", [["full_attention"]] * 6, "layer_types"),
        ("gemma2", "query_pre_attn_scalar", 0, "query_pre_attn_scalar"),
        ("gemma2", "sliding_window", 0, "sliding_window"),
        ("gemma2", "attn_logit_softcapping", -1.0, "softcap"),
        ("gemma3_text", "attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        ("gemma3_text", "use_bidirectional_attention", True, "use_bidirectional_attention"),
        ("gemma3_text", "rope_parameters", {"rope_type": "default"}, "rope_parameters"),
        ("gemma3_text", "rope_parameters", {"full_attention": 3}, "rope_parameters"),
        ("gemma3_text", "rope_parameters", {"full_attention": {"rope_type": "spiral"}}, "spiral"),
        ("gemma3_text", "vision_config", {}, "vision_config"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(family: str, key: str, value: object, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        from_hf(config(family) | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    ["decoder.blocks.0.attn.op.window=4", "decoder.blocks.*.attn.op.softcap=4.0", "decoder.embed.scale=2.0",
     "decoder.blocks.*.attn.op.scale=0.3", "decoder.norm.plus_one=false", "decoder.blocks.1.ffn.post=null"],
)  # fmt: skip
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(_tiny(layers=3, local=(True, False, True)).override(change))


def test_local_layers_are_said_of_each_layer_and_have_a_window() -> None:
    with pytest.raises(SpecError, match="local says of 1 layers"):
        _tiny(local=(True,))
    with pytest.raises(SpecError, match="need a window"):
        _tiny(window=None)


def _tiny(**changes: Any) -> Model:
    return gemma(**TINY | changes)
