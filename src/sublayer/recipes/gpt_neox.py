"""GPT-NeoX (Black et al. 2022, arXiv 2204.06745) and Pythia (Biderman et al. 2023, arXiv 2304.01373).

A decoder whose attention and feed-forward read the same input, each through its own LayerNorm, and are added
together (RedPajama-INCITE's take them in sequence); a quarter of each head's dims is rotated. Biases everywhere, an
untied head; queries, keys and values are stored as one matrix, head by head.

>>> gpt_neox(512, 6, 8, 2048, vocab=50304).parameters()
70426624
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..names import Change, Row, interleaved, rows
from ..nn.attention import Attention, AttentionOp
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import LayerNorm
from ..nn.rope import Rope, rope_from_hf, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, without_head


def gpt_neox(
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocab: int = 50432,
    rope: Rope | None = None,
    *,
    parallel: bool = True,
    bias: bool = True,
    activation: Activation = "gelu",
    eps: float = 1e-5,
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; rope None rotates a quarter of each head. bias: of attention, the feed-forward always has one.

    Initialised as the authors' configurations say: sqrt(2 / 5D) for matrices and tables (small_init), and
    2 / (layers · sqrt(D)) for matrices that write into the residual stream (wang_init).
    """
    norm = LayerNorm(eps)
    rope = Rope(size=dim // heads // 4) if rope is None else rope
    attention = Attention(heads, position=rope, bias=bias, dropout=attention_dropout)
    ffn = FeedForward(hidden, activation, bias=True)
    sublayers = (pre_norm("attn", attention, norm, dropout), pre_norm("ffn", ffn, norm, dropout))
    block = Block(sublayers, parallel=parallel)
    trunk = Trunk(Embed(vocab, dropout=dropout), repeat(block, layers), norm)
    init = Init((2 / (5 * dim)) ** 0.5, residual=2 / (layers * dim**0.5))
    return Model(dim, decoder=trunk, tied=tied, init=init)


SIZES: dict[str, dict[str, Any]] = {
    "pythia-70m": {"dim": 512, "layers": 6, "heads": 8, "hidden": 2048, "vocab": 50304},
    "pythia-160m": {"dim": 768, "layers": 12, "heads": 12, "hidden": 3072, "vocab": 50304},
    "pythia-410m": {"dim": 1024, "layers": 24, "heads": 16, "hidden": 4096, "vocab": 50304},
    "pythia-1b": {"dim": 2048, "layers": 16, "heads": 8, "hidden": 8192, "vocab": 50304},
    "pythia-1.4b": {"dim": 2048, "layers": 24, "heads": 16, "hidden": 8192, "vocab": 50304},
    "pythia-2.8b": {"dim": 2560, "layers": 32, "heads": 32, "hidden": 10240, "vocab": 50304},
    "pythia-6.9b": {"dim": 4096, "layers": 32, "heads": 32, "hidden": 16384},
    "pythia-12b": {"dim": 5120, "layers": 36, "heads": 40, "hidden": 20480, "vocab": 50688},
    "gpt-neox-20b": {"dim": 6144, "layers": 44, "heads": 64, "hidden": 24576, "activation": "gelu_tanh"},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 2, "hidden": 48, "vocab": 97}
EXEMPT: dict[str, str] = {}


def _by_head(attention: AttentionOp) -> Change:
    return interleaved(3, attention.head_size)


NAMES: list[Row] = [
    Row("gpt_neox.embed_in.weight", "decoder.embed.tokens.weight"),
    *(
        Row(
            f"gpt_neox.layers.{{}}.attention.query_key_value.{kind}",
            tuple(f"decoder.blocks.{{}}.attn.op.{name}.{kind}" for name in "qkv"),
            sized=_by_head,
        )
        for kind in ("weight", "bias")
    ),
    *rows(
        [
            ("gpt_neox.layers.{}.attention.dense", "decoder.blocks.{}.attn.op.out"),
            ("gpt_neox.layers.{}.input_layernorm", "decoder.blocks.{}.attn.pre"),
            ("gpt_neox.layers.{}.post_attention_layernorm", "decoder.blocks.{}.ffn.pre"),
            ("gpt_neox.layers.{}.mlp.dense_h_to_4h", "decoder.blocks.{}.ffn.op.up"),
            ("gpt_neox.layers.{}.mlp.dense_4h_to_h", "decoder.blocks.{}.ffn.op.down"),
            ("gpt_neox.final_layer_norm", "decoder.norm"),
        ]
    ),
    Row("embed_out.weight", "head.weight"),
]
PREFIX = "gpt_neox."
IGNORED = tuple(f"gpt_neox.layers.{{}}.attention.{name}" for name in ("bias", "masked_bias", "rotary_emb.inv_freq"))


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a GPTNeoXForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    dim, heads = config.count("hidden_size"), config.count("num_attention_heads")
    rotary = {
        "rope_theta": config("rotary_emb_base", 10000),
        "partial_rotary_factor": config.number("rotary_pct", 0.25, most=1),
        "rope_parameters": config.table("rope_parameters"),
        "rope_scaling": config.table("rope_scaling"),
        "max_position_embeddings": config.count("max_position_embeddings", 2048),
    }
    for key in ("hidden_dropout_prob", "attention_probs_dropout_prob"):  # in one published file, read by no class
        config.fix(key, 0)
    model = gpt_neox(
        dim,
        config.layers("num_hidden_layers"),
        heads,
        config.count("intermediate_size"),
        config.count("vocab_size"),
        rope_from_hf(rotary, dim // heads),
        parallel=config("use_parallel_residual", True),
        bias=config("attention_bias", True),
        activation=config.choose("hidden_act", ACTIVATIONS, "gelu"),
        eps=config("layer_norm_eps", 1e-5),
        dropout=config("hidden_dropout", 0.0),
        attention_dropout=config("attention_dropout", 0.0),
        tied=config("tie_word_embeddings", False),
    )
    config.done("classifier_dropout", "is_decoder")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    block, embed = model.find("decoder.blocks.0"), model.find("decoder.embed")
    attention, ffn = (sublayer.op for sublayer in block.sublayers)
    rotary = rope_to_hf(attention.position, model.dim // attention.heads)
    rotary["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # left out, it would be a quarter
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("decoder.blocks")),
        "num_attention_heads": attention.heads,
        "intermediate_size": ffn.hidden,
        "vocab_size": embed.vocab,
        "use_parallel_residual": block.parallel,
        "attention_bias": attention.bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "layer_norm_eps": model.find("decoder.norm.eps"),
        "hidden_dropout": embed.dropout,
        "attention_dropout": attention.dropout,
        "tie_word_embeddings": model.tied,
        **rotary,
    }


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_fast": "gelu_tanh",
    "gelu_new": "gelu_tanh",  # the later name of one function is the one that is written
    "relu": "relu",
    "silu": "silu",
}
HF = {"GPTNeoXForCausalLM": from_hf, "GPTNeoXModel": without_head(from_hf)}
