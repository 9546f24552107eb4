"""The linear transformer (Katharopoulos et al. 2020, arXiv 2006.16236), as a language model.

A decoder of the 2017 kind, norms after the sums, whose attention weights are φ(q) · φ(k) with φ(x) = elu(x) + 1. A sum
over past keys and values is all it remembers, so a token costs the same at every position. Performer (arXiv
2009.14794) is the same with random features.

>>> linear_transformer(256, 8, 8, vocab=256).parameters()
6449664
"""

from __future__ import annotations

from typing import Any, Literal

from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.linear_attention import LinearAttention, RandomFeatures
from ..nn.norm import LayerNorm
from ..nn.position import Sinusoidal
from ..nn.sublayer import Block, Model, Trunk, post_norm, repeat
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "linear_transformer", "to_hf"]


def linear_transformer(
    dim: int,
    layers: int,
    heads: int,
    vocab: int,
    *,
    hidden: int | None = None,
    features: Literal["elu", "relu"] | RandomFeatures = "elu",
    activation: Activation = "gelu",
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; hidden None is 4 · dim. Sinusoidal positions and a last norm, as in the authors' code."""
    norm = LayerNorm()
    attention = LinearAttention(heads, features=features, bias=True)
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((post_norm("attn", attention, norm, dropout), post_norm("ffn", ffn, norm, dropout)))
    embed = Embed(vocab, position=Sinusoidal(), dropout=dropout)
    return Model(dim, decoder=Trunk(embed, repeat(block, layers), norm), tied=tied, init=Init("fan_in"))


# The paper's models of images, one token a pixel (section 4.2); they answer a mixture of 10 logistics, these the
# logits of 256 intensities.
SIZES: dict[str, dict[str, Any]] = {
    "linear-transformer-mnist": {"dim": 256, "layers": 8, "heads": 8, "vocab": 256},
    "linear-transformer-cifar10": {"dim": 256, "layers": 16, "heads": 8, "vocab": 256},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "vocab": 97}
EXEMPT: dict[str, str] = {"kernels": "it has no softmax attention, so no kernel computes it"}
