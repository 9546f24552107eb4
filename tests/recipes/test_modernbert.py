"""ModernBERT against transformers, with every head."""

from typing import Any

import pytest
import torch
from transformers import ModernBertConfig
from transformers.models.modernbert import modeling_modernbert as modelling

from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.nn.sublayer import Model
from sublayer.recipes import from_hf, to_hf
from sublayer.recipes.modernbert import SIZES, TINY, modernbert
from sublayer.step import Step
from tests.encoders import IDS, RIGHT, check_head, check_heads_export
from tests.oracle import PADDED, check_parity, oracle

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "local_attention": 6, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "cls_token_id": 1, "sep_token_id": 1,
}  # fmt: skip
SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CONFIG = SMALL | {"architectures": ["ModernBertForSequenceClassification"], "model_type": "modernbert"}


def made(suffix: str = "ForMaskedLM", **changes: Any) -> Any:
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        changes = {"num_labels": 3} | changes
    return oracle(ModernBertConfig, made=getattr(modelling, f"ModernBert{suffix}"), **SMALL | changes)


def tiny(**changes: Any) -> Model:
    return modernbert(**TINY | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"local_attention": 2},
        {"local_attention": 128},
        {"norm_eps": 1e-2, "norm_bias": True, "attention_bias": True, "mlp_bias": True},
        {"decoder_bias": False, "classifier_bias": True, "classifier_activation": "relu", "hidden_activation": "silu"},
        {"layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 500.0},
                             "sliding_attention": {"rope_type": "linear", "rope_theta": 50.0, "factor": 2.0}}},
    ],
    ids=str,
)  # fmt: skip
def test_masked_tokens_equal_theirs(changes: dict[str, Any], tmp_path) -> None:
    check_parity(made(**changes), tmp_path, IDS)


def test_left_padded_rows_equal_theirs(tmp_path) -> None:
    check_parity(made(), tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), attention_mask=PADDED)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_head_equals_theirs(suffix: str, pooling: str, tmp_path) -> None:
    check_head(made(suffix, classifier_pooling=pooling), tmp_path / "whole")
    check_head(made(suffix, classifier_pooling=pooling), tmp_path / "right", segment=RIGHT)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_export_is_exact_and_read_by_transformers(suffix: str, tmp_path) -> None:
    check_heads_export(made(suffix, classifier_bias=True, classifier_activation="silu"), tmp_path)


def test_the_first_layer_has_no_norm_before_its_attention() -> None:
    blocks = modernbert(**TINY).find("encoder.blocks")
    assert [block.sublayers[0].pre is None for block in blocks] == [True, False, False]
    assert [block.sublayers[0].op.window for block in blocks] == [None, 3, None]
    assert blocks[0].sublayers[0].op.position == Rope(160000.0)


@pytest.mark.parametrize(("size", "parameters"), [("modernbert-base", 149_014_272), ("modernbert-large", 394_781_696)])
def test_published_sizes_without_a_head(size: str, parameters: int) -> None:
    assert modernbert(**SIZES[size], head=None).parameters() == parameters


def test_the_published_spelling_is_the_same_spec() -> None:
    """What stands on the hub: every third layer, two thetas at the top, in place of layer_types and rope_parameters."""
    old = {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0,
           "classifier_pooling": "mean", "cls_token_id": 1, "reference_compile": False}  # fmt: skip
    spec, _ = from_hf(CONFIG | old)
    new, _ = to_hf(spec)
    assert new["layer_types"] == ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert from_hf(new)[0].replace(init=spec.init) == spec


def test_five_dropouts_are_kept_apart() -> None:
    names = ("attention", "embedding", "mlp", "classifier")
    spec, _ = from_hf(CONFIG | {f"{name}_dropout": 0.1 * (i + 1) for i, name in enumerate(names)})
    paths = ("encoder.blocks.1.attn.op", "encoder.blocks.1.attn", "encoder.embed", "encoder.blocks.1.ffn.op", "head")
    assert [spec.find(f"{path}.dropout") for path in paths] == [0.1, 0.1, 0.2, 0.1 * 3, 0.4]
    config, _ = to_hf(spec)
    assert [config[f"{name}_dropout"] for name in names] == [0.1, 0.2, 0.1 * 3, 0.4]


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("hidden_activation", "mish", "hidden_activation"),
        ("classifier_pooling", "max", "classifier_pooling"),
        ("layer_types", ["full_attention"], "layer_types"),
        ("layer_types", ["chunked_attention"] * 4, "layer_types"),
        ("rope_parameters", {"full_attention": {"rope_type": "spiral"}}, "rope_type"),
        ("local_attention", 0, "local_attention"),
        ("global_attn_every_n_layers", 0, "global_attn_every_n_layers"),
        ("attention_sinks", True, "attention_sinks"),
        ("norm_bias", "yes", "bias"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object, match: str) -> None:
    with pytest.raises(SpecError, match=match) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


def test_what_a_spec_cannot_be_is_refused() -> None:
    with pytest.raises(SpecError, match="names 2 layers of 3"):
        tiny(full=(True, False))
    three = {"id2label": {"0": "a", "1": "b", "2": "c"}, "architectures": ["ModernBertForQuestionAnswering"]}
    with pytest.raises(SpecError, match="id2label names 3 labels"):
        from_hf(CONFIG | three)
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(modernbert(**TINY).override("encoder.blocks.1.attn.op.keep_first=1"))


def test_a_local_layer_sees_so_far_and_no_further() -> None:
    model = tiny(layers=1, full=(False,), head=None).build(dtype=torch.float64).eval()
    changed = IDS[:1].clone()
    changed[0, 6] = 96 - changed[0, 6]
    moved = (model(changed) != model(IDS[:1])).any(-1)[0]
    assert moved.nonzero()[:, 0].tolist() == [4, 5, 6, 7, 8]
