"""Weights of four and eight bits with scales beside them, held to transformers' own dequantisation."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, GptOssConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import sublayer
from sublayer.errors import SpecError, WeightsError
from tests.oracle import compare, oracle, saved

IDS = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def rewrite(folder: Path, about: dict[str, object], **changes: Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": about}))


def four_bits(folder: Path) -> dict[str, Tensor]:
    """A tiny gpt-oss whose experts are as published, and answers as with what transformers makes of them."""
    theirs = oracle(GptOssConfig, intermediate_size=32, hidden_size=64)
    plain = saved(theirs, folder / "plain")
    saved(theirs, folder)
    draw = torch.Generator().manual_seed(2)
    changes: dict[str, Tensor | None] = {}
    wanted: dict[str, Tensor] = {}
    for layer in range(2):
        for name, rows, width in (("gate_up_proj", 64, 64), ("down_proj", 64, 32)):
            stem = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = torch.randint(256, (4, rows, width // 32, 16), dtype=torch.uint8, generator=draw)
            scales = torch.randint(118, 124, (4, rows, width // 32), dtype=torch.uint8, generator=draw)
            changes |= {stem: None, f"{stem}_blocks": blocks, f"{stem}_scales": scales}
            wanted[stem] = convert_moe_packed_tensors(blocks, scales)
    rewrite(folder, MXFP4, **changes)
    with torch.no_grad():
        for name, value in wanted.items():
            theirs.get_parameter(name).copy_(value)
    compare(theirs, sublayer.load(folder, dtype=torch.float64), plain, IDS)
    return wanted


def test_gpt_oss_is_read_as_it_is_published(tmp_path: Path) -> None:
    assert len(four_bits(tmp_path)) == 4


def eight_bits(folder: Path) -> None:
    theirs = oracle(DeepseekV3Config, intermediate_size=200, hidden_size=160)
    saved(theirs, folder)
    tensors = load_file(folder / "model.safetensors")
    draw = torch.Generator().manual_seed(3)
    changes: dict[str, Tensor | None] = {}
    whole: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if "mlp" in name and value.dim() == 2 and "gate.weight" not in name:
            scales = torch.rand([-(-size // 128) for size in value.shape], generator=draw) / 100 + 0.01
            weight = torch.randn(value.shape, generator=draw).to(torch.float8_e4m3fn)
            changes |= {name: weight, name.replace("weight", "weight_scale_inv"): scales}
            padded = torch.zeros([128 * size for size in scales.shape]).to(torch.float8_e4m3fn)
            padded[: len(weight), : weight.shape[1]] = weight
            made = Fp8Dequantize(None)._dequantize_one(padded, scales, torch.float32)
            whole[name] = made[: len(weight), : weight.shape[1]]
    rewrite(folder, FP8, **changes)
    assert len(whole) > 20
    plain = folder / "plain"
    plain.mkdir()
    save_file(tensors | {name: value.contiguous() for name, value in whole.items()}, plain / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))


def test_deepseek_is_read_as_it_is_published(tmp_path: Path) -> None:
    """Sizes that no block divides, too, whose last scales stand for fewer rows and columns."""
    eight_bits(tmp_path)
    found, wanted = sublayer.load(tmp_path), sublayer.load(tmp_path / "plain")
    assert found.spec == wanted.spec
    for (name, one), (other, value) in zip(found.named_parameters(), wanted.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(one, value), name


STEM = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({f"{STEM}_blocks": None}, f"{STEM}_scales are scales of {STEM}_blocks, which is missing"),
        ({f"{STEM}_scales": None}, f"tensor {STEM} missing from the checkpoint"),
        ({f"{STEM}_scales": torch.ones(4, 64, 2, dtype=torch.uint8)}, r"the scales of .*down_proj are \[4, 64, 2\]"),
        ({f"{STEM}_blocks": torch.ones(4, 64, 1, 15, dtype=torch.uint8)}, r"which do not fit \[4, 64, 1, 15\]"),
        ({f"{STEM}_blocks": torch.ones(64, dtype=torch.uint8)}, "which do not fit"),
        ({f"{STEM}_blocks": torch.ones(4, 64, 1, 16)}, "down_proj holds F32 with scales in U8: not read"),
    ],
)
def test_scales_that_do_not_fit_are_refused(changes, error: str, tmp_path: Path) -> None:
    four_bits(tmp_path)
    rewrite(tmp_path, MXFP4, **changes)
    with pytest.raises(WeightsError, match=error):
        sublayer.load(tmp_path)


@pytest.mark.parametrize(
    ("about", "error"),
    [
        (FP8 | {"weight_block_size": None}, "of fp8, only e4m3 in weight_block_size"),
        (FP8 | {"fmt": "e5m2"}, "of fp8, only e4m3"),
        ({"quant_method": "bitsandbytes"}, "config.json sets quantization_config"),
        ({"quant_method": ["mxfp4"]}, "config.json sets quantization_config"),
        ([], "config.json sets quantization_config"),
    ],
)
def test_other_methods_are_refused(about, error: str, tmp_path: Path) -> None:
    saved(oracle(GptOssConfig), tmp_path)
    rewrite(tmp_path, about)
    with pytest.raises(SpecError, match=error):
        sublayer.load(tmp_path)
