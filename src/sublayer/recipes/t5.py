"""T5 (Raffel et al. 2020, arXiv 1910.10683), its version 1.1 and Flan-T5 (arXiv 2210.11416), mT5 (arXiv 2010.11934).

A pre-norm encoder-decoder without biases or absolute positions: all layers of a trunk share one trained score bias by
bucket of distance, scores are not scaled, norms are RMSNorm, and both trunks read one embedding, which is the head
too (scaled by D^−1/2). Version 1.1 gates its feed-forward layers and has a head of its own.

>>> t5(512, 6, 8, hidden=2048).parameters()
60506624
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.position import T5Buckets
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import MAX_LAYERS, Config, without_head


def t5(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab: int = 32128,
    *,
    head_size: int = 64,
    decoder_layers: int | None = None,
    activation: Activation = "relu",
    gated: bool = False,
    buckets: int = 32,
    distance: int = 128,
    eps: float = 1e-6,
    dropout: float = 0.0,
    tied: bool = True,
) -> Model:
    """The architecture; decoder_layers None is as many as layers.

    Initialised as the authors' code does: matrices by their width, queries by H^−1/2 less, the embedding by 1.
    """
    norm = RMSNorm(eps)
    look, write, read = (
        Attention(heads, head_size=head_size, causal=causal, cross=cross, scale=1.0, dropout=dropout)
        for causal, cross in ((False, False), (True, False), (True, True))
    )
    ffn = pre_norm("ffn", FeedForward(hidden, activation, gated=gated, dropout=dropout), norm, dropout)
    encoder = Block((pre_norm("attn", look, norm, dropout), ffn))
    decoder = Block((pre_norm("attn", write, norm, dropout), pre_norm("cross", read, norm, dropout), ffn))

    def trunk(block: Block, layers: int, bidirectional: bool) -> Trunk:
        bias = T5Buckets(heads, bidirectional, buckets, distance)
        return Trunk(Embed(vocab, dropout=dropout), repeat(block, layers), norm, bias, dropout)

    return Model(
        dim,
        encoder=trunk(encoder, layers, bidirectional=True),
        decoder=trunk(decoder, layers if decoder_layers is None else decoder_layers, bidirectional=False),
        head=Head(scale=dim**-0.5 if tied else 1.0),
        tied=tied,
        shared=True,
        init=Init("fan_in", queries="head_size", embedding=1.0),
    )


V11: dict[str, Any] = {"activation": "gelu_tanh", "gated": True, "tied": False}
_WIDER = {
    "small": {"dim": 512, "layers": 8, "heads": 6, "hidden": 1024},
    "base": {"dim": 768, "layers": 12, "heads": 12, "hidden": 2048},
    "large": {"dim": 1024, "layers": 24, "heads": 16, "hidden": 2816},
    "xl": {"dim": 2048, "layers": 24, "heads": 32, "hidden": 5120},
    "xxl": {"dim": 4096, "layers": 24, "heads": 64, "hidden": 10240},
}
SIZES: dict[str, dict[str, Any]] = {
    "t5-small": {"dim": 512, "layers": 6, "heads": 8, "hidden": 2048},
    "t5-base": {"dim": 768, "layers": 12, "heads": 12, "hidden": 3072},
    "t5-large": {"dim": 1024, "layers": 24, "heads": 16, "hidden": 4096},
    "t5-3b": {"dim": 1024, "layers": 24, "heads": 32, "hidden": 16384, "head_size": 128},
    "t5-11b": {"dim": 1024, "layers": 24, "heads": 128, "hidden": 65536, "head_size": 128},
    **{f"t5-v1.1-{name}": sizes | V11 for name, sizes in _WIDER.items()},
    **{f"flan-t5-{name}": sizes | V11 for name, sizes in _WIDER.items()},
    **{f"mt5-{name}": sizes | V11 | {"vocab": 250112} for name, sizes in _WIDER.items()},
}
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "hidden": 48, "vocab": 61, "head_size": 8, "buckets": 8, "distance": 10,
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def NAMES(spec: Model) -> list[Row]:
    """The checkpoint table; "wi" is one matrix, or the gate and another."""
    table = f"{'decoder' if spec.decoder else 'encoder'}.embed.tokens.weight"
    gated = spec.find("encoder.blocks.0.ffn.op.gated")
    inner = [("wi_0", "gate"), ("wi_1", "up")] if gated else [("wi", "up")]
    return [
        Row("shared.weight", table),
        *_trunk("encoder", [*inner, ("wo", "down")], ("SelfAttention", "attn")),
        *_trunk("decoder", [*inner, ("wo", "down")], ("SelfAttention", "attn"), ("EncDecAttention", "cross")),
        Row("lm_head.weight", "head.weight"),
    ]


def _trunk(trunk: str, matrices: list[tuple[str, str]], *attentions: tuple[str, str]) -> list[Row]:
    """One trunk's rows, as (theirs, ours): a feed-forward layer's matrices, and a block's attentions before it."""
    block, ours = f"{trunk}.block.{{}}.layer", f"{trunk}.blocks.{{}}"
    ffn = f"{block}.{len(attentions)}"
    pairs = [(f"{ffn}.DenseReluDense.{theirs}", f"{ours}.ffn.op.{name}") for theirs, name in matrices]
    pairs += [(f"{ffn}.layer_norm", f"{ours}.ffn.pre"), (f"{trunk}.final_layer_norm", f"{trunk}.norm")]
    for i, (theirs, name) in enumerate(attentions):
        pairs += [(f"{block}.{i}.{theirs}.{key[0]}", f"{ours}.{name}.op.{key}") for key in ("q", "k", "v", "out")]
        pairs.append((f"{block}.{i}.layer_norm", f"{ours}.{name}.pre"))
    bias = f"{trunk}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return rows([*pairs, (bias, f"{trunk}.bias")], ["weight"])


PREFIX = ""
IGNORED = (
    "encoder.embed_tokens.weight",  # copies of the shared table
    "decoder.embed_tokens.weight",
    "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",  # stored by early files, never read
)


def t5_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a T5ForConditionalGeneration's config.json. Raises SpecError for a key or value not modelled."""
    config = Config(values)
    tied = config("tie_word_embeddings", True)  # version 1.1 says false, and then scales nothing
    return _read(config, "relu", tied, scaled=config("scale_decoder_outputs", tied))


def mt5_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of an MT5ForConditionalGeneration's config.json. Raises SpecError for a key or value not modelled."""
    config = Config(values)
    return _read(config, "gated-gelu", config("tie_word_embeddings", True), scaled=False)


def encoder_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a T5EncoderModel's config.json: the encoder alone, which answers hidden vectors."""
    whole = t5_from_hf(dict(values) | {"is_encoder_decoder": True})
    return whole.replace(decoder=None, shared=False, head=None, tied=False)


def _read(config: Config, form: str, tied: bool, scaled: bool) -> Model:
    """What the line's config.json files share; form: the feed-forward layers where the file does not say."""
    activation, gated, theirs = config.choose("feed_forward_proj", FORMS, form)
    config.fix("is_gated_act", gated)
    config.fix("dense_act_fn", theirs)
    config.fix("is_encoder_decoder", True)
    config.fix("is_decoder", False)
    layers = config.layers("num_layers")
    decoder_layers = config.count("num_decoder_layers", layers, most=MAX_LAYERS)
    model = t5(
        config.count("d_model"),
        layers,
        config.count("num_heads"),
        config.count("d_ff"),
        config.count("vocab_size"),
        head_size=config.count("d_kv", 64),
        decoder_layers=None if decoder_layers == layers else decoder_layers,
        activation=activation,
        gated=gated,
        buckets=config.count("relative_attention_num_buckets", 32),
        distance=config.count("relative_attention_max_distance", 128),
        eps=config("layer_norm_epsilon", 1e-6),
        dropout=config("dropout_rate", 0.1),
        tied=tied,
    )
    config.done("n_positions", "output_past", "initializer_factor", "classifier_dropout")
    return model.override(**{"head.scale": model.dim**-0.5 if scaled else 1.0})


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    trunk = "decoder" if model.decoder else "encoder"
    attention, ffn, bias = (model.find(f"{trunk}.{path}") for path in ("blocks.0.attn.op", "blocks.0.ffn.op", "bias"))
    forms = {(activation, gated): (name, theirs) for name, (activation, gated, theirs) in FORMS.items()}
    form, theirs = forms[ffn.activation, ffn.gated]
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "model_type": "t5",
        "is_encoder_decoder": True,
        "d_model": model.dim,
        "num_layers": len(model.find("encoder.blocks")),
        "num_decoder_layers": len(model.find(f"{trunk}.blocks")),
        "num_heads": attention.heads,
        "d_kv": attention.head_size or model.dim // attention.heads,
        "d_ff": ffn.hidden,
        "vocab_size": model.find(f"{trunk}.embed.vocab"),
        "feed_forward_proj": form,
        "is_gated_act": ffn.gated,
        "dense_act_fn": theirs,
        "relative_attention_num_buckets": bias.buckets,
        "relative_attention_max_distance": bias.distance,
        "layer_norm_epsilon": model.find(f"{trunk}.norm.eps"),
        "dropout_rate": ffn.dropout,
        "tie_word_embeddings": model.tied,
        "scale_decoder_outputs": model.head is not None and model.find("head.scale") != 1.0,
    }


# feed_forward_proj → (activation, gated, their name of the activation). "gated-gelu" is the tanh approximation.
FORMS: dict[str, tuple[Activation, bool, str]] = {
    "relu": ("relu", False, "relu"),
    "gelu": ("gelu", False, "gelu"),
    "gelu_new": ("gelu_tanh", False, "gelu_new"),
    "silu": ("silu", False, "silu"),
    "gated-relu": ("relu", True, "relu"),
    "gated-gelu": ("gelu_tanh", True, "gelu_new"),
    "gated-silu": ("silu", True, "silu"),
}
HF = {
    "T5ForConditionalGeneration": t5_from_hf,
    "MT5ForConditionalGeneration": mt5_from_hf,
    "T5Model": without_head(t5_from_hf),
    "MT5Model": without_head(mt5_from_hf),
    "T5EncoderModel": encoder_from_hf,
}
