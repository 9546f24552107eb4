"""Qwen3.5 (Qwen team 2026), dense and with experts: its language model.

Qwen3-Next's architecture, three layers of the gated delta rule and one of gated attention, with a larger vocabulary
and another layout of checkpoints. The published ones see images too: the parts for that are left unread, and rotary
positions, which tell time from place in an image, are plain ones of text.

>>> qwen3_5(**SIZES["qwen3.5-9b"]).parameters()
8953803264
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Change, Row, cut
from ..nn.delta import GatedDelta, GatedDeltaOp
from ..nn.feed_forward import FeedForward
from ..nn.rope import Rope
from ..nn.sublayer import Model
from .config import Config, of_text, without_head
from .qwen3_next import (
    DELTA,
    FFN,
    IRRELEVANT,
    SHARED_NAMES,
    activation,
    experts,
    of_delta,
    qwen3_next,
    read,
    read_experts,
    write,
)
from .qwen3_next import IGNORED as IGNORED_BY_BOTH

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "PREFIXES", "SIZES", "TINY", "qwen3_5", "to_hf"]

qwen3_5 = qwen3_next

SIZES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {"dim": 1024, "layers": 24, "heads": 8, "kv_heads": 2, "vocab": 248320, "tied": True,
                     "ffn": FeedForward(3584, "silu", gated=True), "delta": GatedDelta(16, 16)},
    "qwen3.5-9b": {"dim": 4096, "layers": 32, "heads": 16, "kv_heads": 4, "vocab": 248320,
                   "ffn": FeedForward(12288, "silu", gated=True)},
    "qwen3.5-27b": {"dim": 5120, "layers": 64, "heads": 24, "kv_heads": 4, "vocab": 248320,
                    "ffn": FeedForward(17408, "silu", gated=True), "delta": GatedDelta(16, 48)},
    "qwen3.5-35b-a3b": {"dim": 2048, "layers": 40, "heads": 16, "kv_heads": 2, "vocab": 248320,
                        "ffn": experts(256, 8, 512, 512)},
    "qwen3.5-122b-a10b": {"dim": 3072, "layers": 48, "heads": 32, "kv_heads": 2, "vocab": 248320,
                          "ffn": experts(256, 8, 1024, 1024), "delta": GatedDelta(16, 64)},
    "qwen3.5-397b-a17b": {"dim": 4096, "layers": 60, "heads": 32, "kv_heads": 2, "vocab": 248320,
                          "ffn": experts(512, 10, 1024, 1024), "delta": GatedDelta(16, 64)},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": FeedForward(24, "silu", gated=True), "vocab": 97,
    "rope": Rope(size=4), "head_size": 8, "delta": GatedDelta(2, 4, 6, 5), "attends": (False, True),
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def _heights(delta: GatedDeltaOp) -> Change:
    return cut(*(len(projection.weight) for projection in (delta.q, delta.k, delta.v)))


NAMES: list[Row] = [
    *SHARED_NAMES,
    Row(f"{DELTA}.in_proj_qkv.weight", of_delta("q", "k", "v"), sized=_heights),
    Row(f"{DELTA}.in_proj_z.weight", of_delta("gate")),
    Row(f"{DELTA}.in_proj_b.weight", of_delta("beta")),
    Row(f"{DELTA}.in_proj_a.weight", of_delta("decay")),
]
PREFIX = "model."
PREFIXES = ("model.language_model.",)  # in checkpoints that see images too
IGNORED = (*IGNORED_BY_BOTH, "model.visual.*")


def dense_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen3_5ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    ffn = FeedForward(config.count("intermediate_size", 12288), activation(config), gated=True)
    return _read(config, ffn)


def moe_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen3_5MoeForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    return _read(config, read_experts(config, config.layers("num_hidden_layers"), 256, 8))


def _read(config: Config, ffn: FFN) -> Model:
    config.fix("attn_output_gate", True)
    config.fix("mlp_only_layers", [])
    model = read(config, _of_text(config.values), ffn)
    config.done(*IRRELEVANT, "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype")
    return model


def _of_text(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without the keys that share pairs of rotated dims between time, height and width: of text all three are one."""
    found = dict(values)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(found.get(key), dict):
            found[key] = {k: v for k, v in found[key].items() if k not in ("mrope_section", "mrope_interleaved")}
    return found


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec. A model with
    experts is written as Qwen3-Next, which is the same function."""
    config, ffns = write(model)
    if not all(isinstance(ffn, FeedForward) for ffn in ffns):
        raise SpecError("qwen3_5: a model with experts is written as Qwen3-Next")
    family = {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}
    return family | config | {"intermediate_size": ffns[0].hidden}


# Keys of the classes that see images too.
_SEES = ("hidden_size", "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id",
         "language_model_only")  # fmt: skip
HF = {
    "Qwen3_5ForCausalLM": dense_from_hf,
    "Qwen3_5MoeForCausalLM": moe_from_hf,
    "Qwen3_5ForConditionalGeneration": of_text(dense_from_hf, *_SEES),
    "Qwen3_5MoeForConditionalGeneration": of_text(moe_from_hf, *_SEES),
    "Qwen3_5TextModel": without_head(dense_from_hf),
    "Qwen3_5MoeTextModel": without_head(moe_from_hf),
}
