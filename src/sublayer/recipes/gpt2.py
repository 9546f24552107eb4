"""GPT-2 (Radford et al. 2019) and the GPT-3 sizes (Brown et al. 2020, arXiv 2005.14165).

A pre-norm decoder with learned positions, biases everywhere, tanh-approximated GELU and a tied head. GPT-3 alternates
dense and banded attention in a pattern that was not published; its sizes here attend densely, which changes neither
parameters nor state.

>>> gpt2(768, 12, 12).parameters()
124439808
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import Row, rows, stacked
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.position import Learned
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, without_head


def gpt2(
    dim: int,
    layers: int,
    heads: int,
    vocab: int = 50257,
    context: int = 1024,
    *,
    hidden: int | None = None,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-5,
    dropout: float = 0.0,
    tied: bool = True,
) -> Model:
    """The architecture; hidden None is 4 · dim. Initialised as the authors' code does: 0.02 for matrices and tokens,
    0.01 for positions, residual outputs divided by the square root of the number of residual layers."""
    norm = LayerNorm(eps)
    attention = Attention(heads, bias=True, dropout=dropout)
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((pre_norm("attn", attention, norm, dropout), pre_norm("ffn", ffn, norm, dropout)))
    embed = Embed(vocab, position=Learned(context), dropout=dropout)
    return Model(
        dim,
        decoder=Trunk(embed, repeat(block, layers), norm),
        tied=tied,
        init=Init(0.02, residual="depth", position=0.01),
    )


SIZES: dict[str, dict[str, Any]] = {
    "gpt2-124m": {"dim": 768, "layers": 12, "heads": 12},
    "gpt2-355m": {"dim": 1024, "layers": 24, "heads": 16},
    "gpt2-774m": {"dim": 1280, "layers": 36, "heads": 20},
    "gpt2-1.5b": {"dim": 1600, "layers": 48, "heads": 25},
    "gpt3-175b": {"dim": 12288, "layers": 96, "heads": 96, "context": 2048},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "vocab": 97, "context": 64}
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [
    Row("transformer.wte.weight", "decoder.embed.tokens.weight"),
    Row("transformer.wpe.weight", "decoder.embed.position.weight"),
    *(
        Row(
            f"transformer.h.{{}}.attn.c_attn.{kind}",
            tuple(f"decoder.blocks.{{}}.attn.op.{name}.{kind}" for name in "qkv"),
            stacked(3, transposed=kind == "weight"),
        )
        for kind in ("weight", "bias")
    ),
    *(
        Row(f"transformer.h.{{}}.{theirs}.{kind}", f"decoder.blocks.{{}}.{ours}.{kind}", stacked(1, kind == "weight"))
        for theirs, ours in (("attn.c_proj", "attn.op.out"), ("mlp.c_fc", "ffn.op.up"), ("mlp.c_proj", "ffn.op.down"))
        for kind in ("weight", "bias")
    ),
    *rows(
        [
            ("transformer.h.{}.ln_1", "decoder.blocks.{}.attn.pre"),
            ("transformer.h.{}.ln_2", "decoder.blocks.{}.ffn.pre"),
            ("transformer.ln_f", "decoder.norm"),
        ]
    ),
    Row("lm_head.weight", "head.weight"),
]
PREFIX = "transformer."
IGNORED = ("transformer.h.{}.attn.bias", "transformer.h.{}.attn.masked_bias")  # causal masks kept as buffers


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a GPT2LMHeadModel's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    config.fix("scale_attn_weights", True)
    config.fix("scale_attn_by_inverse_layer_idx", False)
    config.fix("add_cross_attention", False)
    config.fix("is_encoder_decoder", False)
    model = gpt2(
        config.count("n_embd"),
        config.layers("n_layer"),
        config.count("n_head"),
        config.count("vocab_size"),
        config.count("n_positions"),
        hidden=config.count("n_inner", None),
        activation=config.choose("activation_function", ACTIVATIONS, "gelu_new"),
        eps=config("layer_norm_epsilon", 1e-5),
        dropout=config("resid_pdrop", 0.1),
        tied=config("tie_word_embeddings", True),
    ).override(**{
        "decoder.embed.dropout": config("embd_pdrop", 0.1),
        "decoder.blocks.*.attn.op.dropout": config("attn_pdrop", 0.1),
    })  # fmt: skip
    config.done("n_ctx", "reorder_and_upcast_attn", "summary_type", "summary_use_proj", "summary_activation",
                "summary_proj_to_labels", "summary_first_dropout", "is_decoder", "n_special",
                "predict_special_tokens")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn, embed = (model.find(f"decoder.{path}") for path in ("blocks.0.attn.op", "blocks.0.ffn.op", "embed"))
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": model.dim,
        "n_layer": len(model.find("decoder.blocks")),
        "n_head": attention.heads,
        "vocab_size": embed.vocab,
        "n_positions": embed.position.length,
        "n_inner": ffn.hidden,
        "activation_function": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "layer_norm_epsilon": model.find("decoder.norm.eps"),
        "tie_word_embeddings": model.tied,
        "resid_pdrop": model.find("decoder.blocks.0.attn.dropout"),
        "embd_pdrop": embed.dropout,
        "attn_pdrop": attention.dropout,
    }


ACTIVATIONS: dict[str, Activation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",  # the later name of one function is the one that is written
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
HF = {"GPT2LMHeadModel": from_hf, "GPT2Model": without_head(from_hf)}
