"""T5's shape (arXiv 1910.10683): an encoder-decoder whose positions are one score bias for all layers."""

from sublayer.nn.attention import Attention
from sublayer.nn.embed import Embed
from sublayer.nn.feed_forward import FeedForward
from sublayer.nn.head import Head
from sublayer.nn.initialise import Init
from sublayer.nn.norm import RMSNorm
from sublayer.nn.position import T5Buckets
from sublayer.nn.sublayer import Block, Model, Trunk, pre_norm, repeat


def t5_like(dim: int, layers: int, heads: int, hidden: int, vocab: int, buckets: int, distance: int) -> Model:
    norm, ffn, embed = RMSNorm(), pre_norm("ffn", FeedForward(hidden, "relu"), RMSNorm()), Embed(vocab)
    look = pre_norm("attn", Attention(heads, causal=False, scale=1.0), norm)
    write = pre_norm("attn", Attention(heads, scale=1.0), norm)
    read = pre_norm("cross", Attention(heads, cross=True, scale=1.0), norm)

    def bias(bidirectional: bool) -> T5Buckets:
        return T5Buckets(heads, bidirectional, buckets, distance)

    return Model(
        dim,
        encoder=Trunk(embed, repeat(Block((look, ffn)), layers), norm, bias(bidirectional=True)),
        decoder=Trunk(embed, repeat(Block((write, read, ffn)), layers), norm, bias(bidirectional=False)),
        head=Head(scale=dim**-0.5),
        tied=True,
        init=Init("fan_in", embedding=1.0),
    )


TINY = {"dim": 32, "layers": 2, "heads": 4, "hidden": 48, "vocab": 61, "buckets": 8, "distance": 10}
EXEMPT: dict[str, str] = {}
