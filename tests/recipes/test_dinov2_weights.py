"""The published DINOv2-S/14 against onnxruntime."""

from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sublayer
from sublayer.recipes.dinov2 import SIZES, dinov2

MEAN, SPREAD = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
"""Of ImageNet's red, green and blue, by which the model was trained."""


def photographs() -> Tensor:
    """[2, 3, 224, 224]: a temple and a flower, cut from the pictures that scikit-learn brings."""
    images = import_module("sklearn.datasets").load_sample_images().images
    pixels = torch.stack([torch.tensor(image)[100:324, 200:424] for image in images]) / 255
    return ((pixels - MEAN) / SPREAD).permute(0, 3, 1, 2)


@pytest.mark.assets
@torch.no_grad()
def test_the_published_small_model_answers_as_onnxruntime_does(tmp_path: Path) -> None:
    """Its grid of 37 × 37 positions resampled to 16 × 16. In fp64 only onnxruntime's rounding is left."""
    from tests.assets import dinov2 as asset

    graph, last = asset.graph(), "/backbone/layernorm/Add_1_output_0"
    model = sublayer.load(asset.convert(tmp_path, graph))
    assert model.spec == dinov2(**SIZES["dinov2-s"], mask_token=False, start=1.0)

    onnx, images = import_module("onnx"), photographs()
    graph.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    serialised = graph.SerializeToString()
    session = import_module("onnxruntime").InferenceSession(serialised, providers=["CPUExecutionProvider"])
    expected = torch.from_numpy(session.run([last], {"input_image": images.numpy()})[0])
    assert expected.shape == (2, 257, 384)
    torch.testing.assert_close(model(images), expected, rtol=0, atol=5e-6 * float(expected.abs().max()))
    torch.testing.assert_close(model.double()(images.double()), expected.double(), rtol=0, atol=2e-5)
