"""BERT, RoBERTa and XLM-RoBERTa against transformers, with every head."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.bert import modeling_bert as their_bert
from transformers.models.roberta import modeling_roberta as their_roberta
from transformers.models.xlm_roberta import modeling_xlm_roberta as their_xlm

import sublayer
from sublayer.errors import InputError, SpecError
from sublayer.nn.head import Classifier, Pooled
from sublayer.nn.sublayer import Model
from sublayer.recipes import from_hf, model, to_hf
from sublayer.recipes.bert import SIZES, TINY, bert, masked_tokens
from sublayer.step import Step
from tests.encoders import IDS, RIGHT, TYPES, answer, check_head, check_heads_export
from tests.oracle import PADDED, check_parity, close, oracle, raised, saved

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 66,
}  # fmt: skip
MODULES: dict[str, Any] = {"Bert": their_bert, "Roberta": their_roberta, "XLMRoberta": their_xlm}
SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CONFIG = SMALL | {"architectures": ["BertForSequenceClassification"], "model_type": "bert"}


def made(line: str = "Bert", suffix: str = "ForMaskedLM", **changes: Any) -> Any:
    config = getattr(MODULES[line], f"{line}Config")
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        changes = {"num_labels": 3} | changes
    return oracle(config, made=getattr(MODULES[line], line + suffix), **SMALL, **changes)


def tiny(**changes: Any) -> Model:
    return bert(**TINY | changes)


@pytest.mark.parametrize(
    "changes",
    [{}, {"layer_norm_eps": 1e-2}, {"type_vocab_size": 3}]
    + [{"hidden_act": name} for name in ("relu", "silu", "gelu_new")],
    ids=str,
)
def test_masked_tokens_equal_theirs(changes: dict[str, Any], tmp_path) -> None:
    check_parity(made(**changes), tmp_path, IDS, Step(types=TYPES), token_type_ids=TYPES)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("line", MODULES)
def test_every_head_equals_theirs(line: str, suffix: str, tmp_path) -> None:
    check_head(made(line, suffix), tmp_path / "whole")
    check_head(made(line, suffix), tmp_path / "right", segment=RIGHT)


def test_robertas_head_has_gelu_whatever_its_layers_have(tmp_path) -> None:
    check_head(made("Roberta", hidden_act="relu"), tmp_path)


def test_a_pretraining_models_masked_tokens_equal_theirs(tmp_path) -> None:
    theirs = made(suffix="ForPreTraining")
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        close(ours(IDS), theirs(IDS).prediction_logits)


def test_left_padded_rows_equal_theirs(tmp_path) -> None:
    """RoBERTa counts positions from its padding tokens, BERT is told them."""
    check_head(made("Roberta"), tmp_path / "roberta", IDS.masked_fill(PADDED == 0, 1), PADDED)
    places = (PADDED.cumsum(1) - 1).clamp(min=0)
    inputs = {"attention_mask": PADDED, "position_ids": places}
    check_parity(made(), tmp_path / "bert", IDS, Step(segment=PADDED), PADDED.bool(), **inputs)


def test_robertas_positions_begin_after_the_padding_row() -> None:
    model = tiny(context=4, offset=2, types=1).build(dtype=torch.float64).eval()
    read: list[torch.Tensor] = []
    position = model.get_submodule("encoder.embed.position")
    position.register_forward_hook(lambda module, args, result: read.append(args[0] + 2))
    ids, segment = torch.tensor([[0, 5, 6, 2, 1, 1]]), torch.tensor([[1, 1, 1, 1, 0, 0]])
    found = model(ids, Step(segment=segment))
    assert read[0][0, :4].tolist() == [2, 3, 4, 5]
    close(found[:, :4], model(ids[:, :4]), "the row without padding")
    with pytest.raises(InputError, match="position 4 is beyond the 4 learned positions"):
        model(torch.tensor([[0, 5, 6, 7, 2]]))


def test_robertas_514_rows_hold_512_tokens() -> None:
    spec = model("roberta-base")
    assert spec.context == 512
    assert spec.build(device="meta").get_parameter("encoder.embed.position.weight").shape == (514, 768)


@pytest.mark.parametrize(
    ("size", "parameters"), [("bert-base", 109_514_298), ("bert-large", 335_174_458), ("roberta-base", 124_697_433)]
)
def test_published_sizes_with_the_masked_language_models_head(size: str, parameters: int) -> None:
    assert bert(**SIZES[size], head=masked_tokens()).parameters() == parameters


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("line", ["Bert", "Roberta"])
def test_export_is_exact_and_read_by_transformers(line: str, suffix: str, tmp_path) -> None:
    check_heads_export(made(line, suffix), tmp_path)


def test_published_masked_language_models_hold_more_than_they_answer(tmp_path) -> None:
    """The next-sentence head, its pooler, the bias twice, positions as a buffer, and norms in TensorFlow's words."""
    theirs = made()
    saved(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for new, before in old.items():
        tensors = {name.replace(new, before): tensor for name, tensor in tensors.items()}
    for name, rows in (("bert.pooler.dense", 32), ("cls.seq_relationship", 2)):
        tensors |= {f"{name}.weight": torch.ones(rows, 32), f"{name}.bias": torch.ones(rows)}
    tensors |= {
        "cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"].clone(),
        "cls.predictions.decoder.bias": tensors["cls.predictions.bias"].clone(),
        "bert.embeddings.position_ids": torch.arange(66)[None],
    }
    save_file(tensors, tmp_path / "model.safetensors")
    close(sublayer.load(tmp_path, dtype=torch.float64)(IDS), answer(theirs, IDS))


def test_a_decoder_of_its_own_is_kept_apart(tmp_path) -> None:
    saved(made(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"cls.predictions.decoder.weight": torch.ones(97, 32)}, tmp_path / "model.safetensors")
    with pytest.warns(UserWarning, match="differs from bert.embeddings.word_embeddings.weight"):
        found = sublayer.load(tmp_path)
    assert not found.spec.tied
    assert torch.equal(found.get_parameter("head.weight"), torch.ones(97, 32))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("position_embedding_type", "relative_key", "position_embedding_type"),
        ("is_decoder", True, "is_decoder"),
        ("add_cross_attention", True, "add_cross_attention"),
        ("hidden_act", "mish", "hidden_act"),
        ("max_position_embeddings", 0, "max_position_embeddings"),
        ("num_labels", 0, "num_labels"),
        ("id2label", ["a", "b"], "id2label"),
        ("classifier_dropout", 1.0, "dropout"),
        ("embedding_size", 16, "embedding_size"),
        ("pruned_heads", {"0": [1]}, "pruned_heads"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object, match: str) -> None:
    with pytest.raises(SpecError, match=match) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


def test_what_a_head_cannot_be_is_refused() -> None:
    three = {"id2label": {"0": "a", "1": "b", "2": "c"}}
    with pytest.raises(SpecError, match="id2label names 3 labels; an answer has a start and an end"):
        from_hf(CONFIG | three | {"architectures": ["BertForQuestionAnswering"]})
    with pytest.raises(SpecError, match="tie_word_embeddings"):
        from_hf(CONFIG | {"architectures": ["BertForMaskedLM"], "tie_word_embeddings": False})
    with pytest.raises(SpecError, match="max_position_embeddings=2 is not a whole number from 3"):
        from_hf(CONFIG | {"architectures": ["RobertaModel"], "max_position_embeddings": 2})
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(tiny(head=Pooled("mean", normalise=True)))


def test_labels_are_counted_and_dropouts_kept_apart() -> None:
    dropouts = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "classifier_dropout": 0.3}
    spec, _ = from_hf(CONFIG | dropouts | {"id2label": {str(i): f"L{i}" for i in range(5)}})
    assert isinstance(spec.head, Classifier)
    assert (spec.head.classes, spec.head.dropout) == (5, 0.3)
    found = [spec.find(f"encoder.{path}.dropout") for path in ("embed", "blocks.1.attn", "blocks.0.attn.op")]
    assert found == [0.1, 0.1, 0.2]
    config, _ = to_hf(spec)
    assert {name: config[name] for name in dropouts} == dropouts
    assert from_hf(CONFIG)[0].find("head.classes") == 2
    assert from_hf(CONFIG)[0].find("head.dropout") == 0.1
    assert json.loads(json.dumps(config))["id2label"]["4"] == "LABEL_4"
