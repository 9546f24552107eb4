"""Gated convolutions in place of attention: a language model (Dauphin et al. 2017, arXiv 1612.08083; dilated as
ByteNet's, arXiv 1610.10099) and an encoder-decoder (ConvS2S, Gehring et al. 2017, arXiv 1705.03122).

A token sees a fixed number of neighbours, and through the layers ever more; decoding keeps those few inputs a layer.
Residual sums are scaled by sqrt(.5), so that their variance stays. In the encoder-decoder each layer attends to the
encoder with one head: here through projections of the encoder's output and with a residual of its own, where ConvS2S
takes the output and its sum with the source's embeddings as they are, adds the target's embedding to the query, and
lays the convolution's residual around both.

>>> convolution(512, 20, vocab=40_000, encoder_layers=20, context=1024).parameters()
146496576
"""

from __future__ import annotations

from typing import Any

from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.gated_convolution import GatedConvolution
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.op import Part
from ..nn.position import Learned
from ..nn.sublayer import Block, Model, Sublayer, Trunk
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "convolution", "to_hf"]

HALF = 0.5**0.5


def convolution(
    dim: int,
    layers: int,
    kernel: int = 3,
    vocab: int = 40_000,
    *,
    encoder_layers: int = 0,
    dilations: tuple[int, ...] = (1,),
    context: int | None = None,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; encoder_layers=0 is the language model. Layer i has dilation i of `dilations`, which repeat;
    context is the number of learned positions, None for none, which is how language models had it."""
    embed = Embed(vocab, position=Learned(context) if context else None, dropout=dropout)
    look = Sublayer("cross", Attention(1, cross=True, scale=1.0, bias=True), scale=HALF, skip=HALF)

    def trunk(count: int, *, causal: bool, cross: bool) -> Trunk:
        found = [GatedConvolution(kernel, dilations[i % len(dilations)], causal, dropout=dropout) for i in range(count)]
        return Trunk(embed, tuple(Block((_half(op), look) if cross else (_half(op),)) for op in found))

    return Model(
        dim,
        encoder=trunk(encoder_layers, causal=False, cross=False) if encoder_layers else None,
        decoder=trunk(layers, causal=True, cross=encoder_layers > 0),
        head=Head(bias=True),
        tied=tied,
        init=Init("fan_in", embedding=0.1),
    )


def _half(op: Part) -> Sublayer:
    return Sublayer("mixer", op, scale=HALF, skip=HALF)


SIZES: dict[str, dict[str, Any]] = {
    # WMT 2016 English to Romanian, section 4.2: 20 layers of 512 units on either side, kernels of 3, 40,000 types;
    # the count is that of this form of attention.
    "convs2s-en-ro": {"dim": 512, "layers": 20, "encoder_layers": 20, "context": 1024},
}
TINY: dict[str, Any] = {"dim": 24, "layers": 3, "vocab": 61, "dilations": (1, 2, 3)}
EXEMPT: dict[str, str] = {"kernels": "the language model has no attention"}
