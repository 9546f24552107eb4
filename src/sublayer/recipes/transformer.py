"""The Transformer (Vaswani et al. 2017, arXiv 1706.03762), as Marian's translation models have it too.

A post-norm encoder-decoder: LayerNorm after each sum, sinusoids added to tokens that are scaled by sqrt(D), biases
everywhere, and one table for source, target and head. The paper counts no biases; here, as in its code and in
Marian's, attention and feed-forward layers have them. Marian puts all sines before all cosines.

>>> transformer(512, 6, 8, hidden=2048, vocab=37000).parameters()
63082496
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from ..names import Change, Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.position import Sinusoidal
from ..nn.sublayer import Block, Model, Sublayer, Trunk, post_norm, pre_norm, repeat
from .config import MAX_LAYERS, Config, without_head


def transformer(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab: int = 37000,
    *,
    decoder_layers: int | None = None,
    source_vocab: int | None = None,
    norm_first: bool = False,
    sinusoids: Literal["interleaved", "half"] = "interleaved",
    activation: Activation = "relu",
    scaled: bool = True,
    tied: bool = True,
    head_bias: bool = False,
    eps: float = 1e-5,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
) -> Model:
    """The architecture; decoder_layers None is as many as layers, source_vocab None one table for both languages.

    norm_first: the pre-norm form that trains without care, with a last norm in each trunk. scaled: whether tokens are
    multiplied by sqrt(D). Matrices begin by their width and the embedding by D^−1/2, so that scaled tokens are near 1.
    """
    norm = LayerNorm(eps)
    ffn = FeedForward(hidden, activation, bias=True, dropout=activation_dropout)

    def sublayer(name: str, op: Attention | FeedForward) -> Sublayer:
        return (pre_norm if norm_first else post_norm)(name, op, norm, dropout)

    def attention(causal: bool, cross: bool = False) -> Attention:
        return Attention(heads, causal=causal, cross=cross, bias=True, dropout=attention_dropout)

    def trunk(vocab: int, layers: int, *sublayers: Sublayer) -> Trunk:
        scale = dim**0.5 if scaled else 1.0
        embed = Embed(vocab, scale, Sinusoidal(layout=sinusoids), dropout=dropout)
        block = Block((*sublayers, sublayer("ffn", ffn)))
        return Trunk(embed, repeat(block, layers), norm if norm_first else None)

    look, write = sublayer("attn", attention(causal=False)), sublayer("attn", attention(causal=True))
    read = sublayer("cross", attention(causal=True, cross=True))
    return Model(
        dim,
        encoder=trunk(vocab if source_vocab is None else source_vocab, layers, look),
        decoder=trunk(vocab, layers if decoder_layers is None else decoder_layers, write, read),
        head=Head(bias=head_bias),
        tied=tied,
        shared=source_vocab is None,
        init=Init("fan_in", embedding=dim**-0.5),
    )


SIZES: dict[str, dict[str, Any]] = {
    "transformer-base": {"dim": 512, "layers": 6, "heads": 8, "hidden": 2048},
    "transformer-big": {"dim": 1024, "layers": 6, "heads": 16, "hidden": 4096},
    "opus-mt-en-de": {"dim": 512, "layers": 6, "heads": 8, "hidden": 2048, "vocab": 58101, "sinusoids": "half",
                      "activation": "silu", "head_bias": True},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "hidden": 48, "vocab": 61, "sinusoids": "half", "head_bias": True,
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def NAMES(spec: Model) -> list[Row]:
    """The checkpoint table; one table of tokens is stored once."""
    tables = ["decoder"] if spec.shared else ["encoder", "decoder"]
    theirs = {name: "model.shared" if spec.shared else f"model.{name}.embed_tokens" for name in tables}
    return [
        *rows([(theirs[name], f"{name}.embed.tokens") for name in tables], ["weight"]),
        *_trunk("encoder", ("self_attn", "attn")),
        *_trunk("decoder", ("self_attn", "attn"), ("encoder_attn", "cross")),
        Row("lm_head.weight", "head.weight"),
        Row("final_logits_bias", "head.bias", ROW),
    ]


def _trunk(trunk: str, *attentions: tuple[str, str]) -> list[Row]:
    layer, ours = f"model.{trunk}.layers.{{}}", f"{trunk}.blocks.{{}}"
    pairs = [("fc1", "ffn.op.up"), ("fc2", "ffn.op.down"), ("final_layer_norm", "ffn.after")]
    for theirs, name in attentions:
        pairs += [(f"{theirs}.{key}_proj", f"{name}.op.{key}") for key in ("q", "k", "v", "out")]
        pairs.append((f"{theirs}_layer_norm", f"{name}.after"))
    return rows([(f"{layer}.{theirs}", f"{ours}.{name}") for theirs, name in pairs])


ROW = Change(lambda theirs: [theirs[0][0]], lambda ours: [ours[0][None]])  # [1, V], a matrix of one row
PREFIX = "model."
IGNORED = (
    "model.encoder.embed_positions.weight",  # sinusoids, computed
    "model.decoder.embed_positions.weight",
    "model.encoder.embed_tokens.weight",  # copies of the shared table
    "model.decoder.embed_tokens.weight",
)


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a MarianMTModel's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    layers = config.layers("encoder_layers")
    decoder_layers = config.count("decoder_layers", most=MAX_LAYERS)
    heads, hidden = config.count("encoder_attention_heads"), config.count("encoder_ffn_dim")
    config.fix("decoder_attention_heads", heads, absent=16)
    config.fix("decoder_ffn_dim", hidden, absent=4096)
    config.fix("is_encoder_decoder", True)
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        config.fix(key, 0, 0.0)
    for key in ("normalize_before", "normalize_embedding", "add_final_layer_norm", "is_decoder"):
        config.fix(key, False)
    config.fix("static_position_embeddings", True)
    vocab, shared = config.count("vocab_size"), config("share_encoder_decoder_embeddings", True)
    target_vocab = config.count("decoder_vocab_size", vocab)
    if shared:
        config.fix("decoder_vocab_size", vocab)
        config.fix("tie_word_embeddings", True)  # their class then has three tables
    model = transformer(
        config.count("d_model"),
        layers,
        heads,
        hidden,
        target_vocab,
        decoder_layers=None if decoder_layers == layers else decoder_layers,
        source_vocab=None if shared else vocab,
        sinusoids="half",
        activation=config.choose("activation_function", ACTIVATIONS, "gelu"),
        scaled=config("scale_embedding", False),
        tied=config("tie_word_embeddings", True),
        head_bias=True,
        dropout=config("dropout", 0.1),
        attention_dropout=config("attention_dropout", 0.0),
        activation_dropout=config("activation_dropout", 0.0),
    )
    config.done("init_std", "max_position_embeddings", "num_hidden_layers", "classif_dropout", "classifier_dropout",
                "add_bias_logits", "extra_pos_embeddings", "force_bos_token_to_be_generated")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = model.find("decoder.blocks.0.attn.op"), model.find("decoder.blocks.0.ffn.op")
    embed = model.find("decoder.embed")
    last = min(embed.vocab, model.find("encoder.embed.vocab")) - 1  # where Marian's tokenizers have their padding
    return {
        "architectures": ["MarianMTModel"],
        "model_type": "marian",
        "is_encoder_decoder": True,
        "d_model": model.dim,
        "encoder_layers": len(model.find("encoder.blocks")),
        "decoder_layers": len(model.find("decoder.blocks")),
        **{f"{trunk}_attention_heads": attention.heads for trunk in ("encoder", "decoder")},
        **{f"{trunk}_ffn_dim": ffn.hidden for trunk in ("encoder", "decoder")},
        "vocab_size": model.find("encoder.embed.vocab"),
        "decoder_vocab_size": embed.vocab,
        "share_encoder_decoder_embeddings": model.shared,
        "activation_function": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "scale_embedding": embed.scale != 1.0,
        "tie_word_embeddings": model.tied,
        "dropout": embed.dropout,
        "attention_dropout": attention.dropout,
        "activation_dropout": ffn.dropout,
        "pad_token_id": last,
        "decoder_start_token_id": last,
    }


ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",  # the later name of one function is the one that is written
}
HF = {"MarianMTModel": from_hf, "MarianModel": without_head(from_hf)}
