"""AntiBERTy (Ruffolo et al. 2021, arXiv 2112.07782): from its pickle to a folder as transformers has it."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests import assets

OWN = ("cls.species", "cls.chain", "cls.graft")
"""Heads of its own, beside the one for masked tokens."""


def convert(folder: Path) -> Path:
    """Writes config.json, model.safetensors and vocab.txt; the model is a BERT with the head for masked tokens."""
    package = assets.pypi("antiberty", "0.1.3") / "antiberty" / "trained_models"
    weights = package / "AntiBERTy_md_smooth"
    config = json.loads((weights / "config.json").read_text()) | {"architectures": ["BertForMaskedLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "vocab.txt").write_text((package / "vocab.txt").read_text())
    pickled = torch.load(weights / "pytorch_model.bin", weights_only=True, map_location="cpu")
    tensors = {name: tensor.clone() for name, tensor in pickled.items() if not name.startswith(OWN)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
