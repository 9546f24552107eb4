"""Mamba-2 (Dao & Gu 2024, arXiv 2405.21060), sizes of state-spaces/mamba2; Codestral Mamba.

Mamba with one decay a head instead of one a state, so that a chunk of the scan is a few matrix products, and states can
be eight times as large. The convolution filters the maps into and out of the state too, which groups of heads share,
and a norm stands before the output projection.

>>> mamba2(4096, 64, 32768, groups=8, tied=False).parameters()
7285403648
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Change, Row, cut, rows
from ..nn.feed_forward import Activation
from ..nn.mamba import Mamba2, Mamba2Op
from ..nn.norm import RMSNorm
from ..nn.sublayer import Model
from .config import Config, without_head
from .mamba import BACKBONE, EXEMPT, HARMLESS, IGNORED, PREFIX, RENAMED, check_hf, of_mixers, shared, whole, written

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "RENAMED", "SIZES", "TINY", "check_hf", "mamba2", "to_hf"]


def mamba2(
    dim: int,
    layers: int,
    vocab: int = 50288,
    *,
    heads: int | None = None,
    head_size: int = 64,
    state_size: int = 128,
    groups: int = 1,
    kernel: int = 4,
    bias: bool = False,
    conv_bias: bool = True,
    activation: Activation = "silu",
    eps: float = 1e-5,
    tied: bool = True,
) -> Model:
    """The architecture; heads None is 2 · dim / head_size. The vocabulary of 50,277 is padded to 50,288.

    Initialised as the authors' code does: torch's own matrices, residual outputs divided by the square root of their
    number, 0.02 for tokens.
    """
    mixer = Mamba2(
        heads or 2 * dim // head_size, head_size, state_size, groups, kernel, bias, conv_bias, activation,
        norm=RMSNorm(eps, groups=groups),
    )  # fmt: skip
    return of_mixers(mixer, dim, layers, vocab, eps, tied)


SIZES: dict[str, dict[str, Any]] = {
    "mamba2-130m": {"dim": 768, "layers": 24},
    "mamba2-370m": {"dim": 1024, "layers": 48},
    "mamba2-780m": {"dim": 1536, "layers": 48},
    "mamba2-1.3b": {"dim": 2048, "layers": 48},
    "mamba2-2.7b": {"dim": 2560, "layers": 64},
    "codestral-mamba-7b": {"dim": 4096, "layers": 64, "vocab": 32768, "groups": 8, "tied": False},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "vocab": 61, "heads": 4, "head_size": 16, "state_size": 5, "groups": 2}


def split(op: Mamba2Op) -> Change:
    """The input projection of theirs is gate, what is convolved, and step sizes, one above the other."""
    return cut(op.gate.out_features, op.up.out_features, op.dt.out_features)


def mixer_rows(theirs: str, ours: str) -> list[Row]:
    """The checkpoint table of one mixer."""
    parts = {kind: tuple(f"{ours}.{name}.{kind}" for name in ("gate", "up", "dt")) for kind in ("weight", "bias")}
    return [
        *(Row(f"{theirs}.in_proj.{kind}", names, sized=split) for kind, names in parts.items()),
        *(Row(f"{theirs}.{name}", f"{ours}.{name}") for name in ("A_log", "D", "dt_bias")),
        *rows(
            [
                (f"{theirs}.conv1d", f"{ours}.conv"),
                (f"{theirs}.norm", f"{ours}.norm"),
                (f"{theirs}.out_proj", f"{ours}.out"),
            ]
        ),
    ]


NAMES: list[Row] = [*BACKBONE, *mixer_rows("backbone.layers.{}.mixer", "decoder.blocks.{}.mixer.op")]


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Mamba2ForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    own, heads, head_size = shared(config, tied=False), config.count("num_heads", 128), config.count("head_dim", 64)
    expand, dim = config.number("expand", 2), own["dim"]
    if expand * dim != heads * head_size:
        raise SpecError(f"mamba2: num_heads={heads} of head_dim={head_size} are not expand={expand} times {dim}")
    config.fix("intermediate_size", heads * head_size)
    no_step_limit(config)
    model = mamba2(
        **own,
        heads=heads,
        head_size=head_size,
        state_size=config.count("state_size", 128),
        groups=config.count("n_groups", 8),
    )
    # norm_before_gate: Mamba-Codestral's file says true, but their code gates first whatever it says.
    config.done("chunk_size", "time_step_rank", "norm_before_gate", *HARMLESS)
    return model


def no_step_limit(config: Config) -> None:
    """Refuses bounds on step sizes, which no published file sets."""
    config.fix("time_step_limit", [0.0, float("inf")], [0.0, {"__float__": "Infinity"}])


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    mixer = model.find("decoder.blocks.0.mixer.op")
    return {
        **written(model, mixer),
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "expand": whole(mixer.heads * mixer.head_size / model.dim),
        "num_heads": mixer.heads,
        "head_dim": mixer.head_size,
        "n_groups": mixer.groups,
    }


HF = {"Mamba2ForCausalLM": from_hf, "Mamba2Model": without_head(from_hf)}
