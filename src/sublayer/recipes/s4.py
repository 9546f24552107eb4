"""S4 (Gu et al. 2022, arXiv 2111.00396) and its diagonal form S4D (arXiv 2206.11893), as language models.

A pre-norm decoder without attention: each channel is a linear state space that begins as HiPPO-LegS, a memory of all
the past in Legendre polynomials. Trained as one long convolution, run as a recurrence; a GLU mixes the channels.

>>> s4(1024, 16, vocab=267735, repeats=2).parameters()
484189184
"""

from __future__ import annotations

from typing import Any, Literal

from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.s4 import S4
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "s4", "to_hf"]


def s4(
    dim: int,
    layers: int,
    vocab: int,
    *,
    size: int = 64,
    repeats: int = 1,
    hidden: int | None = None,
    structure: Literal["dplr", "diagonal"] = "dplr",
    discretisation: Literal["bilinear", "zoh"] = "bilinear",
    start: Literal["legs", "lin", "inv"] = "legs",
    activation: Activation = "gelu",
    dropout: float = 0.0,
    tied: bool = True,
) -> Model:
    """The architecture; hidden None is 4 · dim. repeats: how many S4 layers stand before each feed-forward layer."""
    norm = LayerNorm()
    mixer = S4(size, structure, discretisation, start)
    mixers = tuple(pre_norm(f"s4_{i}", mixer, norm, dropout) for i in range(repeats))
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((*mixers, pre_norm("ffn", ffn, norm, dropout)))
    return Model(dim, decoder=Trunk(Embed(vocab), repeat(block, layers), norm), tied=tied, init=Init("fan_in"))


# The paper's model of WikiText-103 has adaptive embeddings, in which rare words have fewer dimensions: 249M in all, of
# which 210M are these layers. Here every word has all of them.
SIZES: dict[str, dict[str, Any]] = {
    "s4-wikitext103": {"dim": 1024, "layers": 16, "vocab": 267735, "repeats": 2},
}
TINY: dict[str, Any] = {"dim": 24, "layers": 2, "vocab": 61, "size": 8}
EXEMPT: dict[str, str] = {"kernels": "it has no attention, so no kernel computes it"}
