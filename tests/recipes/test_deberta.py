"""DeBERTa v1, v2 and v3 against transformers, with every head."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.deberta import modeling_deberta as first
from transformers.models.deberta_v2 import modeling_deberta_v2 as second
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.sublayer import Model
from sublayer.recipes import from_hf, model, to_hf
from sublayer.recipes.deberta import TINY, V1, Disentangled, deberta
from sublayer.step import Step
from tests.case import roughen
from tests.encoders import IDS, RIGHT, TYPES, answer, check_head, check_heads_export
from tests.nn.allocated import Allocated
from tests.oracle import PADDED, check_parity, close, oracle, saved

SMALL: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16, "relative_attention": True, "pos_att_type": ["p2c", "c2p"],
}  # fmt: skip
V2 = {"position_biased_input": False, "position_buckets": 4, "max_relative_positions": 9}
V3 = V2 | {"norm_rel_ebd": "layer_norm", "share_att_key": True}
LINES: dict[str, tuple[Any, dict[str, Any]]] = {
    "Deberta": (first, {"position_biased_input": False, "max_relative_positions": 5}),
    "DebertaV2": (second, V3),
}
SUFFIXES = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")
CONFIG = SMALL | V3 | {"architectures": ["DebertaV2ForSequenceClassification"], "model_type": "deberta-v2"}


def made(line: str = "DebertaV2", suffix: str = "ForMaskedLM", **changes: Any) -> Any:
    module, defaults = LINES[line]
    if suffix in ("ForSequenceClassification", "ForTokenClassification"):
        changes = {"num_labels": 3} | changes
    return oracle(getattr(module, f"{line}Config"), made=getattr(module, line + suffix), **SMALL | defaults | changes)


def tiny(**changes: Any) -> Model:
    return deberta(**TINY | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"share_att_key": False, "norm_rel_ebd": "none"},
        {"share_att_key": False, "pos_att_type": ["c2p"]},
        {"share_att_key": False, "pos_att_type": ["p2c"]},
        {"pos_att_type": "p2c"},
        {"position_buckets": -1},
        {"position_buckets": -1, "max_relative_positions": -1},
        {"position_buckets": 6, "max_relative_positions": 8},
        {"layer_norm_eps": 1e-2, "hidden_act": "relu"},
        {"conv_kernel_size": 3},
        {"conv_kernel_size": 5, "conv_act": "gelu"},
    ],
    ids=str,
)
def test_masked_tokens_of_v2_and_v3_equal_theirs(changes: dict[str, Any], tmp_path) -> None:
    check_parity(made(**changes), tmp_path, IDS)


@pytest.mark.parametrize(
    "changes",
    [{}, {"max_relative_positions": -1}, {"pos_att_type": ["c2p"]}, {"pos_att_type": ["p2c"]}],
    ids=str,
)
def test_masked_tokens_of_v1_equal_theirs(changes: dict[str, Any], tmp_path) -> None:
    check_parity(made("Deberta", **changes), tmp_path, IDS)


@pytest.mark.parametrize("line", LINES)
def test_absolute_positions_and_types_besides_equal_theirs(line: str, tmp_path) -> None:
    theirs = made(line, position_biased_input=True, type_vocab_size=2)
    check_parity(theirs, tmp_path, IDS, Step(types=TYPES), token_type_ids=TYPES)


def test_left_padded_rows_equal_theirs(tmp_path) -> None:
    for name, kernel in (("plain", 0), ("convolved", 3)):
        theirs = made(conv_kernel_size=kernel)
        check_parity(theirs, tmp_path / name, IDS, Step(segment=PADDED), PADDED.bool(), attention_mask=PADDED)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("line", LINES)
def test_every_head_equals_theirs(line: str, suffix: str, tmp_path) -> None:
    check_head(made(line, suffix), tmp_path / "whole")
    check_head(made(line, suffix), tmp_path / "right", segment=RIGHT)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("line", LINES)
def test_export_is_exact_and_read_by_transformers(line: str, suffix: str, tmp_path) -> None:
    conv = {"conv_kernel_size": 3} if line == "DebertaV2" else {}
    check_heads_export(made(line, suffix, pooler_dropout=0.2, cls_dropout=0.3, **conv), tmp_path)


@pytest.mark.parametrize(("buckets", "distance"), [(256, 512), (4, 9), (6, 8), (2, 30)])
def test_buckets_of_far_distances_are_theirs(buckets: int, distance: int) -> None:
    """Also in single precision, in which the published models were trained."""
    op = Disentangled(1, causal=False, distance=distance, buckets=buckets)
    away = torch.arange(-3 * distance, 3 * distance)
    theirs = make_log_bucket_position(away, buckets, distance).long()
    assert torch.equal(op.row(away), (theirs + buckets).clamp(0, 2 * buckets - 1))


def test_the_other_name_of_the_head_is_read(tmp_path) -> None:
    """The published v3 files: "legacy": false has lm_predictions.lm_head in place of cls.predictions."""
    theirs = made(legacy=False)
    saved(theirs, tmp_path)
    assert any(name.startswith("lm_predictions.lm_head") for name in load_file(tmp_path / "model.safetensors"))
    close(sublayer.load(tmp_path, dtype=torch.float64)(IDS), answer(theirs, IDS))


def test_what_published_files_hold_besides_is_passed_over(tmp_path) -> None:
    theirs = made(suffix="Model")
    saved(theirs, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"embeddings.position_embeddings.weight": torch.ones(16, 32)}, tmp_path / "model.safetensors")
    close(sublayer.load(tmp_path, dtype=torch.float64)(IDS), answer(theirs, IDS))


def test_dropouts_are_kept_apart() -> None:
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob", "pooler_dropout", "cls_dropout")
    spec, _ = from_hf(CONFIG | {name: 0.1 * (i + 1) for i, name in enumerate(names)})
    attention = spec.find("encoder.blocks.0.attn.op")
    found = (attention.position_dropout, attention.dropout, spec.find("head.before.dropout"), spec.find("head.dropout"))
    assert found == (0.1, 0.2, 0.1 * 3, 0.4)
    assert [to_hf(spec)[0][name] for name in names] == list(found)


def test_training_drops_distances_too() -> None:
    spec = tiny().override("encoder.blocks.*.attn.op.position_dropout=0.5")
    built = spec.build(dtype=torch.float64).train()
    assert not torch.equal(built(IDS), built(IDS))


@pytest.mark.parametrize(
    ("key", "value", "match"),
    [
        ("relative_attention", False, "relative_attention"),
        ("pos_att_type", ["p2p"], "pos_att_type"),
        ("pos_att_type", [], "pos_att_type"),
        ("norm_rel_ebd", "batch_norm", "norm_rel_ebd"),
        ("conv_kernel_size", 2, "kernel=2 has no middle"),
        ("conv_act", "mish", "conv_act"),
        ("conv_groups", 2, "conv_groups"),
        ("embedding_size", 16, "embedding_size"),
        ("pooler_hidden_size", 16, "pooler_hidden_size"),
        ("pooler_hidden_act", "mish", "pooler_hidden_act"),
        ("position_buckets", 5, "buckets=5"),
        ("position_buckets", 400, "buckets=400"),
        ("max_relative_positions", "far", "wrong type"),
        ("talking_head", True, "talking_head"),
        ("attention_head_size", 4, "attention_head_size"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object, match: str) -> None:
    with pytest.raises(SpecError, match=match) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"causal": True}, "sees both ways"),
        ({"terms": ("c2p", "c2p")}, "name one twice"),
        ({"distance": 1, "buckets": None}, "distance must be above 1"),
        ({"buckets": 3}, "must be even"),
    ],
)
def test_attention_that_makes_no_sense_is_refused(changes: dict[str, Any], match: str) -> None:
    options: dict[str, Any] = {"causal": False} | changes
    with pytest.raises(SpecError, match=match):
        Disentangled(4, **options)


def test_what_no_class_of_theirs_has_is_not_exported() -> None:
    assert to_hf(tiny())[0]["architectures"] == ["DebertaV2ForMaskedLM"]
    assert to_hf(tiny(**V1 | {"vocab": 97}))[0]["architectures"] == ["DebertaForMaskedLM"]
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(tiny().override("encoder.blocks.1.attn.op.window=4"))


def test_the_table_is_counted_once() -> None:
    assert model("deberta-v3-base").build(device="meta").get_parameter("encoder.embed.relative.weight").shape == (
        512,
        768,
    )


def test_padding_inside_a_document_is_as_if_it_were_not_there() -> None:
    built = tiny(kernel=5).build(dtype=torch.float64).eval()
    roughen(built)
    segment = torch.tensor([[1] * 4 + [0] * 3 + [1] * 5, [0] + [1] * 5 + [2] * 2 + [0] + [2] * 3])
    found = built(IDS, Step(segment=segment))
    for row, ids, number in zip(found, IDS, segment, strict=True):
        for document in number[number != 0].unique():
            close(row[number == document], built(ids[number == document][None])[0])


def test_packed_documents_have_no_scores_for_tokens_of_others() -> None:
    built = deberta(8, 1, 1, vocab=97, hidden=8, distance=12, buckets=6).build().eval()
    ids, segment = torch.arange(2048)[None] % 97, torch.arange(2048)[None] // 64 + 1
    with Allocated() as made:
        built(ids, Step(segment=segment))
    assert made.largest <= 2048 * 64
