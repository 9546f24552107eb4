"""DINOv2, with and without registers, against transformers."""

from typing import Any

import pytest
import torch
from transformers import (
    Dinov2Config,
    Dinov2ForImageClassification,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersForImageClassification,
    Dinov2WithRegistersModel,
    PreTrainedModel,
)

from sublayer.errors import SpecError
from sublayer.recipes import to_hf
from sublayer.recipes.dinov2 import SIZES, dinov2, from_hf
from tests.oracle import oracle
from tests.recipes.images import check_export, check_parity, noise

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "mlp_ratio": 2,
                         "image_size": 12, "patch_size": 4}  # fmt: skip
CONFIG = {"architectures": ["Dinov2ForImageClassification"], "model_type": "dinov2"} | SMALL
PLAIN = (Dinov2Config, Dinov2ForImageClassification, Dinov2Model)
REGISTERS = (Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification, Dinov2WithRegistersModel)
KINDS = pytest.mark.parametrize("kind", [PLAIN, REGISTERS], ids=["plain", "registers"])
MASK = ("dinov2.embeddings.mask_token", "dinov2_with_registers.embeddings.mask_token", "embeddings.mask_token")


def theirs(kind: tuple[Any, ...], base: bool = False, **changes: Any) -> PreTrainedModel:
    return oracle(kind[0], made=kind[1 + base], **SMALL | changes)


@KINDS
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_swiglu_ffn": True},
        {"use_swiglu_ffn": True, "mlp_ratio": 4, "qkv_bias": False},
        {"hidden_act": "relu", "layer_norm_eps": 1e-2, "num_channels": 1},
        {"patch_size": [3, 6]},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(kind: Any, changes: dict, tmp_path) -> None:
    check_parity(theirs(kind, **changes), tmp_path, noise(12, 12, changes.get("num_channels", 3)), unread=MASK)


@KINDS
@pytest.mark.parametrize("sides", [(16, 16), (8, 8), (8, 20), (4, 4), (16, 12)])
def test_images_of_another_size_see_the_grid_resampled(kind: Any, sides: tuple[int, int], tmp_path) -> None:
    check_parity(theirs(kind), tmp_path, noise(*sides), unread=MASK)


@KINDS
@pytest.mark.parametrize("sides", [(12, 12), (16, 8)])
def test_base_classes_give_their_hidden_vectors_and_hide_patches(kind: Any, sides: tuple[int, int], tmp_path) -> None:
    hidden = torch.arange(2 * sides[0] * sides[1] // 16).reshape(2, -1) % 3 == 1
    ours = check_parity(theirs(kind, base=True), tmp_path, noise(*sides), hidden)
    assert ours.spec.head is None


def test_registers_may_be_of_any_number(tmp_path) -> None:
    check_parity(theirs(REGISTERS, num_register_tokens=1), tmp_path, noise(12, 12), unread=MASK)


@KINDS
@pytest.mark.parametrize("changes", [{}, {"use_swiglu_ffn": True, "num_labels": 3}], ids=str)
@pytest.mark.parametrize("base", [False, True])
def test_export_is_exact_and_read_by_transformers(kind: Any, base: bool, changes: dict, tmp_path) -> None:
    check_export(theirs(kind, base, **changes), tmp_path, noise(12, 12))


def test_without_a_mask_token_it_is_left_out(tmp_path) -> None:
    model = theirs(PLAIN, use_mask_token=False)
    check_parity(model, tmp_path / "parity", noise(12, 12))
    check_export(model, tmp_path, noise(12, 12))


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes_count_as_their_classes_do(name: str) -> None:
    size = SIZES[name]
    kind: tuple[Any, ...] = REGISTERS if "registers" in size else PLAIN
    keys = {"dim": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads"}
    sizes = {theirs: size[ours] for ours, theirs in keys.items()} | {"image_size": 518, "patch_size": 14}
    with torch.device("meta"):
        model = kind[2](kind[0](**sizes, use_swiglu_ffn="gated" in size))
    assert dinov2(**size).parameters() == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("drop_path_rate", 0.1),
        ("hidden_act", "mish"),
        ("mlp_ratio", 0),
        ("mlp_ratio", 4.5),
        ("use_swiglu_ffn", "yes"),
        ("image_size", 13),
        ("num_register_tokens", 4),
        ("layerscale_value", "small"),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    ours = {"use_swiglu_ffn": "gated", "image_size": "image", "layerscale_value": "start"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(CONFIG | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        "encoder.blocks.*.ffn.op.hidden=65",
        "encoder.blocks.0.attn.scale=1.0",
        "encoder.embed.position.antialias=true",
        "head.first=2",
    ],
)
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(dinov2(32, 2, 4, 12, 4, classes=5).override(change))


def test_layer_scale_begins_small() -> None:
    model = dinov2(32, 1, 4, 12, 4).build()
    assert (model.get_parameter("encoder.blocks.0.attn.scale.weight") == 1e-5).all()
