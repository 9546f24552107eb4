"""DiT against diffusers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.dit_transformer_2d import DiTTransformer2DModel
from torch import Tensor
from torch.testing import assert_close

import sublayer
from sublayer.errors import InputError, SpecError, WeightsError
from sublayer.names import expand
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import to_hf
from sublayer.recipes.dit import NAMES, dit, from_hf
from tests.oracle import close, raised

SMALL: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 3, "in_channels": 2,
                         "out_channels": 4, "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 5}  # fmt: skip
CONFIG = {"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.42.1"} | SMALL


def oracle(**changes: Any) -> Any:
    """A tiny fp64 model of theirs, drawn; its layers' copies of what makes the condition are equal."""
    with raised():
        model = DiTTransformer2DModel(**SMALL | changes).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.2)
            if ".emb." in name:
                parameter.copy_(model.get_parameter(first(name)))
    return model


def first(name: str) -> str:
    """The name of the first layer's copy."""
    return "transformer_blocks.0." + name.split(".", 2)[2]


def inputs(side: int = 8, channels: int = 2) -> dict[str, Tensor]:
    images = torch.randn(3, channels, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return {"images": images, "time": torch.tensor([0, 999, 37]), "classes": torch.tensor([4, 0, 5])}


def answers(theirs: DiTTransformer2DModel, ours: ModelOp, given: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    with raised():
        expected = theirs(given["images"], given["time"], given["classes"]).sample
    return ours(given), expected


def check_parity(theirs: DiTTransformer2DModel, folder: Path, given: dict[str, Tensor]) -> ModelOp:
    """Saves theirs, loads it, and compares the answer, a loss and every gradient; copies' gradients are added up."""
    theirs.save_pretrained(folder)
    ours = sublayer.load(folder, dtype=torch.float64)
    found, expected = answers(theirs, ours, given)
    close(found, expected, "answer")
    losses = [answer.square().mean() + answer[:, 0].mean() for answer in (found, expected)]
    close(losses[0], losses[1], "loss")
    for loss in losses:
        loss.backward()
    wanted: dict[str, Tensor] = {}
    for name, parameter in theirs.named_parameters():
        key = first(name) if ".emb." in name else name
        if parameter.grad is not None:
            wanted[key] = wanted.get(key, torch.zeros_like(parameter)) + parameter.grad
    own = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    gradients: dict[str, Tensor] = {}
    for row in expand(NAMES(ours.spec), ours):
        back = row.change.back([own[name] for name in row.our_names])
        gradients |= dict(zip(row.their_names, back, strict=True))
    assert {first(name) if ".emb." in name else name for name in gradients} == wanted.keys()
    for name, gradient in wanted.items():
        if "to_k.bias" in name:  # scores know no positions, so a key's bias moves nothing
            assert gradients[name].abs().max() < 1e-14
        else:
            close(gradients[name], gradient, f"gradient of {name}")
    return ours


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"out_channels": None},
        {"patch_size": 4, "num_layers": 1},
        {"attention_bias": False, "norm_eps": 1e-2},
        {"num_embeds_ada_norm": 7, "in_channels": 1, "out_channels": 2},
    ],
    ids=str,
)
def test_answer_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(**changes), tmp_path, inputs(channels=changes.get("in_channels", 2)))


@pytest.mark.parametrize("side", [4, 12])
def test_images_of_another_size_lie_in_the_range_of_the_trained_one(side: int, tmp_path) -> None:
    check_parity(oracle(), tmp_path, inputs(side))


def test_the_authors_time_has_other_waves(tmp_path) -> None:
    """Theirs count to half, not half - 1; what differs from diffusers is that alone."""
    theirs = oracle()
    theirs.save_pretrained(tmp_path)
    loaded = sublayer.load(tmp_path, dtype=torch.float64)
    ours = loaded.spec.override(**{"encoder.embed.reached": False}).build(dtype=torch.float64).eval()
    ours.load_state_dict(loaded.state_dict())
    assert not torch.allclose(*answers(theirs, ours, inputs()))
    for block in theirs.transformer_blocks:
        block.norm1.emb.time_proj.downscale_freq_shift = 0
    close(*answers(theirs, ours, inputs()))


@torch.no_grad()
def test_export_is_exact_and_read_by_diffusers(tmp_path) -> None:
    theirs = oracle()
    theirs.save_pretrained(tmp_path / "theirs")
    ours = sublayer.load(tmp_path / "theirs", dtype=torch.float64)
    sublayer.save(ours, tmp_path / "ours", layout="hf")
    again = sublayer.load(tmp_path / "ours", dtype=torch.float64)
    assert again.spec == ours.spec
    others = dict(again.named_parameters())
    assert all(torch.equal(parameter, others[name]) for name, parameter in ours.named_parameters())
    loading: Any = DiTTransformer2DModel.from_pretrained
    with raised():
        back, report = loading(tmp_path / "ours", torch_dtype=torch.float64, output_loading_info=True)
    assert not any(report.values()), report
    close(*answers(back.double().eval(), ours, inputs()))


def test_layers_that_make_their_conditions_differently_are_refused(tmp_path) -> None:
    theirs = oracle()
    with torch.no_grad():
        theirs.transformer_blocks[1].norm1.emb.class_embedder.embedding_table.weight[0, 0] += 1
    theirs.save_pretrained(tmp_path)
    with pytest.raises(WeightsError, match="make their conditions differently"):
        sublayer.load(tmp_path)


# --- what ours does beyond theirs ---


def test_a_new_model_answers_nothing_and_passes_its_input_through() -> None:
    model = dit(32, 2, 4, 8, channels=2, classes=5).build()
    given = inputs() | {"images": inputs()["images"].float()}
    assert not model(given).any()
    hidden = model(given, output="hidden")
    x, _ = model.get_submodule("encoder.embed.patches")(given["images"], sublayer.Step())
    assert torch.equal(hidden, torch.nn.functional.layer_norm(x, (32,), eps=1e-6))


@torch.no_grad()
def test_without_classes_none_is_meant_and_wide_images_keep_their_shape() -> None:
    spec = dit(32, 1, 4, (4, 8), channels=2, classes=5, learn_sigma=False)
    model = spec.build(dtype=torch.float64).eval()
    for parameter in model.parameters():
        parameter.normal_(0, 0.2)
    given = {"images": inputs()["images"][:, :, :4], "time": torch.tensor([0.5, 1.25, 3.0])}
    found = model(given)
    assert found.shape == (3, 2, 4, 8)
    assert torch.equal(found, model(given | {"classes": torch.full((3,), 5)}))
    assert not torch.allclose(found, model(given | {"classes": torch.full((3,), 4)}))
    # A pixel of the answer belongs to the patch at its place.
    changed = given | {"images": given["images"].clone()}
    model.get_parameter("encoder.blocks.0.attn.scale.gate.weight").zero_()
    model.get_parameter("encoder.blocks.0.attn.scale.gate.bias").zero_()
    before = model(given)
    changed["images"][:, :, 2:4, 4:6] += 1
    moved = (model(changed) - before).abs().amax((0, 1)) > 0
    wanted = torch.zeros(4, 8, dtype=torch.bool)
    wanted[2:4, 4:6] = True
    assert torch.equal(moved, wanted)
    with pytest.raises(InputError, match="6 patches are neither a square nor the trained"):
        model(given | {"images": torch.zeros(3, 2, 4, 6, dtype=torch.float64)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"time": torch.tensor([1, 2])}, r"time is one number an image, \[3\], got \[2\]"),
        ({"classes": torch.zeros(3, 1).long()}, r"classes is one number an image, \[3\], got \[3, 1\]"),
        ({"classes": torch.zeros(3)}, "classes are whole numbers, got torch.float32"),
        ({"classes": torch.tensor([0, 6, 1])}, "class 6 is none of 0 … 5"),
        ({"classes": torch.tensor([0, -1, 1])}, "class -1 is none of 0 … 5"),
        ({"labels": torch.zeros(3)}, 'takes {"images": …, "time": …, "classes": …}'),
    ],
)
def test_what_does_not_fit_is_one_line(change: dict, message: str) -> None:
    model = dit(32, 1, 4, 8, channels=2, classes=5).build(dtype=torch.float64)
    with pytest.raises(InputError, match=message):
        model(inputs() | change)
    with pytest.raises(InputError, match="a diffusion model takes"):
        model(inputs()["images"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("norm_type", "layer_norm"),
        ("norm_elementwise_affine", True),
        ("activation_fn", "geglu"),
        ("dropout", 0.1),
        ("out_channels", 3),
        ("sample_size", 9),
        ("num_layers", 0),
        ("cross_attention_dim", 8),
    ],
)
def test_what_is_not_modelled_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(SpecError, match={"sample_size": "image"}.get(key, key)):
        from_hf(CONFIG | {key: value})


@pytest.mark.parametrize("change", ["encoder.embed.reached=false", "encoder.norm.eps=1e-3", "encoder.embed.waves=64"])
def test_a_model_that_no_class_of_theirs_has_is_not_exported(change: str) -> None:
    with pytest.raises(SpecError, match="no Hugging Face architecture expresses this model"):
        to_hf(from_hf(CONFIG).override(change))


@pytest.mark.parametrize(("depth", "width", "heads"), [(12, 384, 6), (28, 1152, 16)])
def test_published_sizes_count_as_the_authors_code_does(depth: int, width: int, heads: int) -> None:
    """Sizes of table 1. Their code counts the fixed positions [256, D] too, and prints 675,129,632 for XL/2."""
    layer = 4 * (width**2 + width) + 8 * width**2 + 5 * width + 6 * (width**2 + width)
    time, classes, patches = 256 * width + width + width**2 + width, 1001 * width, 16 * width + width
    last = 2 * (width**2 + width) + 32 * width + 32
    count = depth * layer + time + classes + patches + last
    assert dit(width, depth, heads).parameters() == count
    if width == 1152:
        assert count + 256 * width == 675_129_632


def test_time_is_waves_of_falling_frequency() -> None:
    front = from_hf(CONFIG).find("encoder.embed")
    frequencies = torch.tensor(front.frequencies, dtype=torch.float64)
    wanted = 10000 ** (-torch.arange(128, dtype=torch.float64) / 127)
    assert_close(frequencies, wanted, rtol=1e-12, atol=0)
