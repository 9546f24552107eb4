"""Recurrent encoder-decoders: Sutskever et al. 2014 (arXiv 1409.3215), and with additive attention Bahdanau, Cho and
Bengio 2015 (arXiv 1409.0473).

Without attention all that the decoder knows of the source is the state in which the encoder ended, layer by layer;
the encoder reads backward, so that the first words are the freshest. With it, the encoder reads both ways, and each
step of the decoder asks all of the source with its last hidden vector: attention lies inside the recurrence.

>>> seq2seq(1000, 4, vocab=80_000, source_vocab=160_000, kind="lstm", attention=False, bias=False).parameters()
384000000
"""

from __future__ import annotations

from typing import Any

from ..nn.additive import Additive
from ..nn.embed import Embed
from ..nn.head import Head, HeadOp
from ..nn.initialise import Init
from ..nn.op import Context
from ..nn.recurrent import Kind, Reader, Recurrent
from ..nn.sublayer import Block, Model, Sublayer, Trunk
from .alone import HF, IGNORED, NAMES, PREFIX, to_hf

__all__ = ["EXEMPT", "HF", "IGNORED", "NAMES", "PREFIX", "SIZES", "TINY", "seq2seq", "to_hf"]


def seq2seq(
    dim: int,
    layers: int = 1,
    *,
    vocab: int,
    source_vocab: int | None = None,
    kind: Kind = "gru",
    hidden: int | None = None,
    attention: bool = True,
    align: int | None = None,
    maxout: int | None = None,
    dropout: float = 0.0,
    bias: bool = True,
) -> Model:
    """The architecture; dim is the width of tokens, hidden (None: dim) that of the recurrences, each way.

    With attention the encoder's memory is 2 · hidden wide, the alignment `align` (None: hidden), and the last of the
    decoder's layers attends; `maxout` is the width of its deep output (None: no deep output).
    """
    size = hidden or dim
    widths = [dim] + [size] * (layers - 1)
    reader = Recurrent(kind, size, direction="both" if attention else "backward", bias=bias)
    mixers: list[Recurrent | Additive] = [
        Recurrent(kind, size, width, begin=i, bias=bias) for i, width in enumerate(widths)
    ]
    if attention:
        mixers[-1] = Additive(kind, size, align, 2 * size, widths[-1], layers - 1, maxout=maxout, bias=bias)
    return Model(
        dim,
        encoder=Trunk(Reader(source_vocab or vocab, dropout=dropout, layers=(reader,) * layers), ()),
        decoder=Trunk(Embed(vocab, dropout=dropout), tuple(_layer(mixer, dropout) for mixer in mixers)),
        head=WideHead(bias=bias, width=(maxout if attention else None) or size),
        init=Init("fan_in", embedding=dim**-0.5),
    )


def _layer(mixer: Recurrent | Additive, dropout: float) -> Block:
    return Block((Sublayer("mixer", mixer, skip=0.0, dropout=dropout),))


class WideHead(Head):
    """A head that reads vectors of another width than the tokens'."""

    width: int = 1
    """Width of what it reads."""

    def build(self, dim: int, context: Context) -> HeadOp:
        return super().build(self.width, context)


SIZES: dict[str, dict[str, Any]] = {
    # Section 3.4 of the paper: four layers of 1,000 cells, 384M parameters, of which 64M are the recurrences'.
    "sutskever-2014": {"dim": 1000, "layers": 4, "vocab": 80_000, "source_vocab": 160_000, "kind": "lstm",
                       "attention": False, "bias": False},
    # Sections 4.2 and A.2.3: m = 620, n = n' = 1,000, l = 500, 30,000 words on each side.
    "rnnsearch": {"dim": 620, "hidden": 1000, "align": 1000, "maxout": 500, "vocab": 30_000},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 20, "hidden": 16, "maxout": 24, "vocab": 61}
EXEMPT: dict[str, str] = {
    "kernels": "its attention is additive and inside the recurrence, so no kernel of scaled products applies"
}
