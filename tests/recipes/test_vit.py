"""ViT against transformers."""

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTModel

import sublayer
from sublayer.errors import InputError, SpecError
from sublayer.recipes import to_hf
from sublayer.recipes.vit import from_hf, vit
from tests.oracle import close, oracle, saved
from tests.recipes.images import answers, check_export, check_parity, noise

CONFIG = {"architectures": ["ViTForImageClassification"], "model_type": "vit", "hidden_size": 32,
          "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "image_size": 12,
          "patch_size": 4}  # fmt: skip
SMALL: dict[str, Any] = {key: value for key, value in CONFIG.items() if key not in ("architectures", "model_type")}


def theirs(made: Any = ViTForImageClassification, **changes: Any) -> PreTrainedModel:
    sizes: dict[str, Any] = SMALL | {"num_labels": 5} | changes
    return oracle(ViTConfig, made=made, **sizes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_labels": 2},
        {"qkv_bias": False, "num_channels": 1},
        {"layer_norm_eps": 1e-2, "patch_size": [3, 6]},
        *({"hidden_act": name} for name in ("gelu_new", "relu", "silu")),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(theirs(**changes), tmp_path, noise(12, 12, changes.get("num_channels", 3)))


@pytest.mark.parametrize("sides", [(16, 16), (8, 20), (4, 4), (12, 16)])
def test_images_of_another_size_see_the_grid_resampled(sides: tuple[int, int], tmp_path) -> None:
    check_parity(theirs(), tmp_path, noise(*sides), interpolate_pos_encoding=True)


def test_the_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    ours = check_parity(theirs(lambda config: ViTModel(config, add_pooling_layer=False)), tmp_path, noise(12, 12))
    assert ours.spec.head is None


def test_a_pooler_beside_the_hidden_vectors_is_passed_over(tmp_path) -> None:
    model = theirs(ViTModel)
    ours = sublayer.load(saved(model, tmp_path), dtype=torch.float64)
    close(*answers(model, ours, noise(12, 12)))


@pytest.mark.parametrize("changes", [{}, {"num_labels": 2}, {"num_channels": 1}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(theirs(**changes), tmp_path, noise(12, 12, changes.get("num_channels", 3)))


def test_an_image_of_a_wrong_size_is_one_line() -> None:
    model = vit(32, 1, 4, 5, 12, 4).build()
    with pytest.raises(InputError, match="images of 13 × 12 pixels are no whole number of patches of 4 × 4: resize"):
        model(torch.zeros(1, 3, 13, 12))


def test_the_published_grid_gives_197_tokens() -> None:
    hidden = vit(768, 12, 12).build(device="meta")(torch.zeros(1, 3, 224, 224, device="meta"), output="hidden")
    assert hidden.shape == (1, 197, 768)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "mish"),
        ("image_size", 13),
        ("image_size", [12, 12, 12]),
        ("image_size", "12"),
        ("patch_size", 0),
        ("num_channels", 0),
        ("num_attention_heads", 5),
        ("hidden_dropout_prob", 1.5),
        ("pruned_heads", {"0": [1]}),
        ("use_mask_token", True),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    ours = {"hidden_dropout_prob": "dropout", "num_attention_heads": "heads=5", "image_size": "image"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(CONFIG | {key: value}).build(device="meta")
    assert "\n" not in str(caught.value)


def test_dropouts_and_classes_are_read_and_written() -> None:
    values = {
        "hidden_dropout_prob": 0.1,
        "attention_probs_dropout_prob": 0.2,
        "id2label": {"0": "a", "1": "b", "2": "c"},
    }
    spec = from_hf(CONFIG | values)
    paths = ("embed", "blocks.1.attn", "blocks.1.ffn", "blocks.1.attn.op")
    assert [spec.find(f"encoder.{path}.dropout") for path in paths] == [0.1, 0.1, 0.1, 0.2]
    assert spec.find("head.classes") == 3
    assert from_hf(to_hf(spec)[0]) == spec


@pytest.mark.parametrize(
    "change", ["encoder.embed.registers=2", "encoder.norm=null", "encoder.blocks.*.ffn.scale=0.5", "head.pool=mean"]
)
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(vit(32, 2, 4, 5, 12, 4).override(change))
