"""Mamba (Gu & Dao 2023, arXiv 2312.00752), sizes of state-spaces/mamba.

One kind of layer: a pre-norm mixer that scans a state whose decay the inputs choose, after a convolution of four
tokens, and that holds the gate itself. No attention, no positions, no feed-forward layers; the head is tied. The state
of a document is as large after a million tokens as after one.

>>> mamba(768, 24).parameters()
129135360
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Row, rows, stacked
from ..nn.embed import Embed
from ..nn.feed_forward import Activation
from ..nn.initialise import Init
from ..nn.mamba import Mamba, Mamba2
from ..nn.norm import RMSNorm
from ..nn.op import Part
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, without_head


def mamba(
    dim: int,
    layers: int,
    vocab: int = 50280,
    *,
    inner: int | None = None,
    state_size: int = 16,
    rank: int | None = None,
    kernel: int = 4,
    bias: bool = False,
    conv_bias: bool = True,
    activation: Activation = "silu",
    eps: float = 1e-5,
    tied: bool = True,
) -> Model:
    """The architecture; inner None is 2 · dim, rank None dim / 16. The vocabulary of 50,277 is padded to 50,280.

    Initialised as the authors' code does: torch's own matrices, residual outputs divided by the square root of their
    number, 0.02 for tokens.
    """
    mixer = Mamba(inner or 2 * dim, state_size, rank, kernel, bias, conv_bias, activation)
    return of_mixers(mixer, dim, layers, vocab, eps, tied)


def of_mixers(mixer: Part, dim: int, layers: int, vocab: int, eps: float, tied: bool) -> Model:
    """One kind of layer, pre-norm, with Mamba-2."""
    block = Block((pre_norm("mixer", mixer, RMSNorm(eps)),))
    init = Init("torch", residual="depth", embedding=0.02)
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), RMSNorm(eps)), tied=tied, init=init)


SIZES: dict[str, dict[str, Any]] = {
    "mamba-130m": {"dim": 768, "layers": 24},
    "mamba-370m": {"dim": 1024, "layers": 48},
    "mamba-790m": {"dim": 1536, "layers": 48},
    "mamba-1.4b": {"dim": 2048, "layers": 48},
    "mamba-2.8b": {"dim": 2560, "layers": 64},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "vocab": 61, "inner": 64, "state_size": 4}
EXEMPT: dict[str, str] = {"kernels": "it has no attention, and so no attention kernels"}


def mixer_rows(theirs: str, ours: str) -> list[Row]:
    """The checkpoint table of one mixer."""
    parts = {kind: tuple(f"{ours}.{name}.{kind}" for name in ("up", "gate")) for kind in ("weight", "bias")}
    return [
        *(Row(f"{theirs}.in_proj.{kind}", names, stacked(2)) for kind, names in parts.items()),
        *(Row(f"{theirs}.{name}", f"{ours}.{name}") for name in ("A_log", "D")),
        Row(f"{theirs}.dt_proj.bias", f"{ours}.dt_bias"),
        *rows(
            [
                (f"{theirs}.conv1d", f"{ours}.conv"),
                (f"{theirs}.x_proj", f"{ours}.select"),
                (f"{theirs}.dt_proj", f"{ours}.dt"),
                (f"{theirs}.out_proj", f"{ours}.out"),
            ]
        ),
    ]


BACKBONE: list[Row] = [  # with Mamba-2
    Row("backbone.embeddings.weight", "decoder.embed.tokens.weight"),
    *rows([("backbone.layers.{}.norm", "decoder.blocks.{}.mixer.pre"), ("backbone.norm_f", "decoder.norm")]),
    Row("lm_head.weight", "head.weight"),
]
NAMES: list[Row] = [*BACKBONE, *mixer_rows("backbone.layers.{}.mixer", "decoder.blocks.{}.mixer.op")]
PREFIX = "backbone."
RENAMED = (("embeddings.weight", "embedding.weight"),)  # as the authors' code has it
IGNORED: tuple[str, ...] = ()


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a MambaForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    own = shared(config, tied=True)
    rank = None if config("time_step_rank", "auto") == "auto" else config.count("time_step_rank")
    inner = int(config.number("expand", 2) * own["dim"])
    config.fix("intermediate_size", inner)
    config.fix("ssm_cfg", {})
    model = mamba(**own, inner=inner, state_size=config.count("state_size", 16), rank=rank)
    config.done(*HARMLESS)
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    mixer = model.find("decoder.blocks.0.mixer.op")
    return {
        **written(model, mixer),
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "expand": whole(mixer.inner / model.dim),
        "intermediate_size": mixer.inner,
        "time_step_rank": mixer.rank or "auto",
    }


def written(model: Model, mixer: Mamba | Mamba2) -> dict[str, Any]:
    """The keys of config.json that both have."""
    return {
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("decoder.blocks")),
        "vocab_size": model.vocab,
        "state_size": mixer.state_size,
        "conv_kernel": mixer.kernel,
        "use_bias": mixer.bias,
        "use_conv_bias": mixer.conv_bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[mixer.activation],
        "layer_norm_epsilon": model.find("decoder.norm.eps"),
        "tie_word_embeddings": model.tied,
    }


def shared(config: Config, *, tied: bool) -> dict[str, Any]:
    """Arguments from the keys that both have; tied: where the file does not say."""
    config.fix("rms_norm", True)
    return {
        "dim": config.count("hidden_size"),
        "layers": config.layers("num_hidden_layers"),
        "vocab": config.count("vocab_size"),
        "kernel": config.count("conv_kernel", 4),
        "bias": config("use_bias", False),
        "conv_bias": config("use_conv_bias", True),
        "activation": config.choose("hidden_act", ACTIVATIONS, "silu"),
        "eps": config("layer_norm_epsilon", 1e-5),
        "tied": config("tie_word_embeddings", tied),
    }


def check_hf(model: Model) -> None:
    """Raises SpecError for an inner width that is no multiple of D: their classes take whole expansions alone."""
    for i, block in enumerate(model.find("decoder.blocks")):
        for sublayer in block.sublayers:
            match sublayer.op:
                case Mamba(inner=inner):
                    said = f"inner={inner}"
                case Mamba2(heads=heads, head_size=size):
                    inner, said = heads * size, f"head_size={size} in {heads} heads"
                case _:
                    continue
            if inner % model.dim:
                where = f"decoder.blocks.{i}.{sublayer.name}.op.{said}"
                raise SpecError(f"transformers cannot express {where}: no multiple of the width, dim={model.dim}")


def whole(ratio: float) -> float:
    """Theirs is an int where it can be."""
    return int(ratio) if ratio == int(ratio) else ratio


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",  # the later name of one function is the one that is written
}
# How new weights begin, in what precision and by which kernel theirs runs, and copies of other keys.
_HARMLESS = (
    "residual_in_fp32 rescale_prenorm_residual time_step_scale time_step_min time_step_max time_step_init_scheme "
    "time_step_floor use_mambapy use_associative_scan d_model d_inner n_layer fused_add_norm pad_vocab_size_multiple"
)
HARMLESS = frozenset(_HARMLESS.split())
HF = {"MambaForCausalLM": from_hf, "MambaModel": without_head(from_hf)}
