"""Recurrent language models: Elman 1990, long short-term memory (Hochreiter and Schmidhuber 1997), gated recurrent
units (Cho et al. 2014, arXiv 1406.1078); the LSTM's sizes are Zaremba et al.'s (2014, arXiv 1409.2329).

Each layer reads the one below and takes its place: there is no residual, no norm and no position. What a token sees
of the past is one vector a layer, so decoding keeps the same few bytes however long the text grows, and the steps of
training follow one another. Dropout falls between layers, never between steps.

>>> rnn(650, 2, vocab=10000).parameters()
19780400
"""

from __future__ import annotations

from typing import Any

from ..names import Row
from ..nn.embed import Embed
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.recurrent import Kind, Recurrent
from ..nn.sublayer import Block, Model, Sublayer, Trunk, repeat
from .alone import HF, IGNORED, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "rnn", "to_hf"]


def rnn(
    dim: int,
    layers: int,
    kind: Kind = "lstm",
    vocab: int = 10000,
    *,
    dropout: float = 0.0,
    tied: bool = False,
    bias: bool = True,
) -> Model:
    """The architecture; dim is the width of tokens and of hidden vectors. `bias` is of the recurrences and the head."""
    block = Block((Sublayer("mixer", Recurrent(kind, bias=bias), skip=0.0, dropout=dropout),))
    return Model(
        dim,
        decoder=Trunk(Embed(vocab, dropout=dropout), repeat(block, layers)),
        head=Head(bias=bias),
        tied=tied,
        init=Init("fan_in", embedding=dim**-0.5),
    )


SIZES: dict[str, dict[str, Any]] = {
    # A vocabulary of 10,000 words, the Penn Treebank's; the layers and dropout of Zaremba et al., section 4.1.
    "lstm-medium": {"dim": 650, "layers": 2, "dropout": 0.5},
    "lstm-large": {"dim": 1500, "layers": 2, "dropout": 0.65},
}
TINY: dict[str, Any] = {"dim": 24, "layers": 2, "vocab": 61}
EXEMPT: dict[str, str] = {"kernels": "it has no attention"}

# The names that a model of torch.nn's Embedding, LSTM (RNN, GRU) and Linear has, one recurrence a layer.
NAMES: list[Row] = [
    Row("encoder.weight", "decoder.embed.tokens.weight"),
    Row("rnn.{}.weight_ih_l0", "decoder.blocks.{}.mixer.op.cell.input"),
    Row("rnn.{}.weight_hh_l0", "decoder.blocks.{}.mixer.op.cell.recurrent"),
    Row("rnn.{}.bias_ih_l0", "decoder.blocks.{}.mixer.op.cell.input_bias"),
    Row("rnn.{}.bias_hh_l0", "decoder.blocks.{}.mixer.op.cell.recurrent_bias"),
    Row("decoder.weight", "head.weight"),
    Row("decoder.bias", "head.bias"),
]
