"""Whisper (Radford et al. 2022, arXiv 2212.04356): speech in, text out.

A pre-norm encoder-decoder whose encoder reads log-mel frames (sublayer.data.audio) through two convolutions that halve
their number, and adds sinusoids that are computed: transformers stores them and counts 1500 · D parameters more. The
decoder has learned positions and a tied head; all projections but the keys' have biases.

>>> whisper(384, 4, 6).parameters()
37184640
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import WeightsError
from ..names import Change, Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.frames import Frames, FramesOp
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.position import Learned
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import MAX_LAYERS, Config, without_head


def whisper(
    dim: int,
    layers: int,
    heads: int,
    vocab: int = 51865,
    *,
    decoder_layers: int | None = None,
    hidden: int | None = None,
    features: int = 80,
    length: int = 1500,
    context: int = 448,
    activation: Activation = "gelu",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    activation_dropout: float = 0.0,
) -> Model:
    """The architecture; decoder_layers None is as many as layers, hidden None is 4 · dim.

    length: half of the frames of the longest recording; 1,500 for 30 seconds of 100 frames each.
    """
    norm = LayerNorm()
    look, write, read = (
        Attention(heads, causal=causal, cross=cross, bias=True, k_bias=False, dropout=attention_dropout)
        for causal, cross in ((False, False), (True, False), (True, True))
    )
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True, dropout=activation_dropout)
    last = pre_norm("ffn", ffn, norm, dropout)
    encoder = Block((pre_norm("attn", look, norm, dropout), last))
    decoder = Block((pre_norm("attn", write, norm, dropout), pre_norm("cross", read, norm, dropout), last))
    embed = Embed(vocab, position=Learned(context), dropout=dropout)
    return Model(
        dim,
        encoder=Trunk(Frames(features, length, dropout=dropout), repeat(encoder, layers), norm),
        decoder=Trunk(embed, repeat(decoder, layers if decoder_layers is None else decoder_layers), norm),
        tied=True,
        init=Init(0.02),
    )


SIZES: dict[str, dict[str, Any]] = {
    "whisper-tiny": {"dim": 384, "layers": 4, "heads": 6},
    "whisper-tiny.en": {"dim": 384, "layers": 4, "heads": 6, "vocab": 51864},
    "whisper-base": {"dim": 512, "layers": 6, "heads": 8},
    "whisper-base.en": {"dim": 512, "layers": 6, "heads": 8, "vocab": 51864},
    "whisper-small": {"dim": 768, "layers": 12, "heads": 12},
    "whisper-small.en": {"dim": 768, "layers": 12, "heads": 12, "vocab": 51864},
    "whisper-medium": {"dim": 1024, "layers": 24, "heads": 16},
    "whisper-medium.en": {"dim": 1024, "layers": 24, "heads": 16, "vocab": 51864},
    "whisper-large": {"dim": 1280, "layers": 32, "heads": 20},
    "whisper-large-v3": {"dim": 1280, "layers": 32, "heads": 20, "vocab": 51866, "features": 128},
    "whisper-large-v3-turbo": {"dim": 1280, "layers": 32, "heads": 20, "vocab": 51866, "features": 128,
                               "decoder_layers": 4},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "vocab": 61, "hidden": 48, "features": 5, "length": 6, "context": 32,
}  # fmt: skip
EXEMPT: dict[str, str] = {
    "packing": "a row of frames is one recording of up to 30 seconds, over which convolutions run: none shares a row",
}


def _stored(front: FramesOp) -> Change:
    """Theirs keeps the encoder's sinusoids beside the convolutions; ours computes them."""

    def table(like: Tensor) -> Tensor:
        pos = torch.arange(front.spec.length, device=like.device)
        return front.spec.position.table(pos, front.dim, like.dtype)

    def into(theirs: list[Tensor]) -> list[Tensor]:
        stored, *weights = theirs
        if stored.shape != (front.spec.length, front.dim):
            raise ValueError("another number of positions")
        if not stored.is_meta and not torch.allclose(stored.float(), table(stored).float(), atol=5e-3):
            raise WeightsError("model.encoder.embed_positions.weight holds no sinusoids, which this recipe computes")
        return weights

    return Change(into, lambda ours: [table(ours[0]), *ours], whole_rows=False)


def _layers(trunk: str, *attentions: tuple[str, str]) -> list[Row]:
    layer, ours = f"model.{trunk}.layers.{{}}", f"{trunk}.blocks.{{}}"
    pairs = [("fc1", "ffn.op.up"), ("fc2", "ffn.op.down"), ("final_layer_norm", "ffn.pre")]
    for theirs, name in attentions:
        pairs += [(f"{theirs}.{key}_proj", f"{name}.op.{key}") for key in ("q", "k", "v", "out")]
        pairs.append((f"{theirs}_layer_norm", f"{name}.pre"))
    return rows([(f"{layer}.{theirs}", f"{ours}.{name}") for theirs, name in pairs])


NAMES: list[Row] = [
    Row(
        ("model.encoder.embed_positions.weight", "model.encoder.conv1.weight", "model.encoder.conv2.weight"),
        ("encoder.embed.first.weight", "encoder.embed.second.weight"),
        sized=lambda module: _stored(module),
    ),
    Row("model.encoder.conv1.bias", "encoder.embed.first.bias"),
    Row("model.encoder.conv2.bias", "encoder.embed.second.bias"),
    *rows([("model.encoder.layer_norm", "encoder.norm")]),
    *_layers("encoder", ("self_attn", "attn")),
    Row("model.decoder.embed_tokens.weight", "decoder.embed.tokens.weight"),
    Row("model.decoder.embed_positions.weight", "decoder.embed.position.weight"),
    *_layers("decoder", ("self_attn", "attn"), ("encoder_attn", "cross")),
    *rows([("model.decoder.layer_norm", "decoder.norm")]),
    Row("proj_out.weight", "head.weight"),
]
PREFIX = "model."
IGNORED: tuple[str, ...] = ()


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a WhisperForConditionalGeneration's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    dim, layers = config.count("d_model"), config.layers("encoder_layers")
    decoder_layers = config.count("decoder_layers", most=MAX_LAYERS)
    heads, hidden = config.count("encoder_attention_heads"), config.count("encoder_ffn_dim")
    config.fix("decoder_attention_heads", heads, absent=6)
    config.fix("decoder_ffn_dim", hidden, absent=1536)
    config.fix("is_encoder_decoder", True)
    config.fix("tie_word_embeddings", True)
    for key in ("encoder_layerdrop", "decoder_layerdrop"):
        config.fix(key, 0, 0.0)
    for key in ("scale_embedding", "apply_spec_augment", "use_weighted_layer_sum"):
        config.fix(key, False)
    model = whisper(
        dim,
        layers,
        heads,
        config.count("vocab_size"),
        decoder_layers=None if decoder_layers == layers else decoder_layers,
        hidden=hidden,
        features=config.count("num_mel_bins", 80),
        length=config.count("max_source_positions", 1500),
        context=config.count("max_target_positions", 448),
        activation=config.choose("activation_function", ACTIVATIONS, "gelu"),
        dropout=config("dropout", 0.0),
        attention_dropout=config("attention_dropout", 0.0),
        activation_dropout=config("activation_dropout", 0.0),
    )
    config.done("init_std", "num_hidden_layers", "classifier_proj_size", "median_filter_width", "forced_decoder_ids",
                "mask_time_prob", "mask_time_length", "mask_time_min_masks", "mask_feature_prob",
                "mask_feature_length", "mask_feature_min_masks")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    attention, ffn = model.find("decoder.blocks.0.attn.op"), model.find("decoder.blocks.0.ffn.op")
    embed, front = model.find("decoder.embed"), model.find("encoder.embed")
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "d_model": model.dim,
        "encoder_layers": len(model.find("encoder.blocks")),
        "decoder_layers": len(model.find("decoder.blocks")),
        **{f"{trunk}_attention_heads": attention.heads for trunk in ("encoder", "decoder")},
        **{f"{trunk}_ffn_dim": ffn.hidden for trunk in ("encoder", "decoder")},
        "vocab_size": embed.vocab,
        "num_mel_bins": front.features,
        "max_source_positions": front.length,
        "max_target_positions": embed.position.length,
        "activation_function": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "dropout": embed.dropout,
        "attention_dropout": attention.dropout,
        "activation_dropout": ffn.dropout,
        # Their class wants ids inside the vocabulary; the published ones where it is as large.
        **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), min(50256, embed.vocab - 1)),
        "decoder_start_token_id": min(50257, embed.vocab - 1),
    }


ACTIVATIONS: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "gelu_new": "gelu_tanh", "silu": "silu"}
HF = {"WhisperForConditionalGeneration": from_hf, "WhisperModel": without_head(from_hf)}
