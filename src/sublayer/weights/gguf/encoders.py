"""bert (its vectors, for GGUF keeps no head of it) and t5."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...errors import SpecError
from ...names import Row, rows
from ...nn.embed import Embed
from ...nn.head import Pooled
from ...nn.position import Learned
from ...nn.sublayer import Model, ModelOp, Trunk
from ...recipes.bert import POOLER
from .llama import HIDDEN
from .table import Architecture, Config, Entry, Source, constant, fixed, head_size, key, layers, tying, vocabulary

POSITIONS = "encoder.embed.position.weight"
WIDTH = key("embedding_length", "hidden_size")


def _rows_of(tensor: str, ours: str) -> Entry:
    return Entry(lambda source: {ours: source.rows(tensor)}, lambda config: {})


def bare(model: ModelOp) -> ModelOp:
    """An encoder as GGUF has it, which is its vectors: without a head that only pools them, and without the rows of a
    table of positions that stand before position 0 (RoBERTa's). Other models as they are."""
    if not _vectors(model.spec):
        return model
    model = model.with_head(None)
    before = model.spec.find("encoder.embed.position.offset")
    if not before:
        return model
    cut = model.spec.override(**{"encoder.embed.position.offset": 0}).empty(device="meta")
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        rows = parameter.detach()[before:] if name == POSITIONS else parameter.detach()
        setattr(cut.get_submodule(module), kind, nn.Parameter(rows, requires_grad=False))
    return cut.eval()


def dressed(spec: Model) -> Model:
    """The spec of a bare encoder with the head that its class of Hugging Face's has, which GGUF leaves out."""
    return spec.replace(head=POOLER) if _vectors(spec) else spec


def _vectors(spec: Model) -> bool:
    """Whether it is an encoder of BERT's line that answers vectors, of tokens or of texts."""
    encoder = spec.encoder if spec.decoder is None else None
    embed = encoder.embed if isinstance(encoder, Trunk) else None
    learned = isinstance(embed, Embed) and isinstance(embed.position, Learned)
    return learned and (spec.head is None or isinstance(spec.head, Pooled))


BERT = Architecture(
    "bert", "BertModel", "bert",
    (WIDTH, key("block_count", "num_hidden_layers"), vocabulary(), HIDDEN,
     key("attention.head_count", "num_attention_heads"), key("attention.layer_norm_epsilon", "layer_norm_eps"),
     key("context_length", "max_position_embeddings"), _rows_of("token_types.weight", "type_vocab_size"),
     constant("attention.causal", False), fixed(hidden_act="gelu")),
    lambda config: [
        *rows(
            [("embeddings.word_embeddings", "token_embd"), ("embeddings.position_embeddings", "position_embd"),
             ("embeddings.token_type_embeddings", "token_types"), ("embeddings.LayerNorm", "token_embd_norm")]
        ),
        *layers(
            "encoder.layer", "blk", ("attention.self.query", "attn_q"), ("attention.self.key", "attn_k"),
            ("attention.self.value", "attn_v"), ("attention.output.dense", "attn_output"),
            ("attention.output.LayerNorm", "attn_output_norm"), ("intermediate.dense", "ffn_up"),
            ("output.dense", "ffn_down"), ("output.LayerNorm", "layer_output_norm"),
        ),
    ],
    irrelevant=frozenset({"attention.head_count_kv", "classifier.output_labels"}),
    headless=True,
)  # fmt: skip


def _eps() -> Entry:
    """Said twice, for the norm is RMSNorm, and their class calls it a layer norm."""
    names = ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon")

    def read(source: Source) -> dict[str, Any]:
        one, other = source(names[0], source(names[1], 1e-6)), source(names[1], source(names[0], 1e-6))
        if one != other:
            raise SpecError(f"{source.name}.{names[0]} and .{names[1]} differ")
        return {"layer_norm_epsilon": one}

    return Entry(read, lambda config: dict.fromkeys(names, config["layer_norm_epsilon"]))


def _form() -> Entry:
    """Gated layers are version 1.1's, tanh-GELU; the others ReLU."""

    def read(source: Source) -> dict[str, Any]:
        return {"feed_forward_proj": "gated-gelu" if source.has("enc.blk.0.ffn_gate.weight") else "relu"}

    def write(config: Config) -> dict[str, Any]:
        form = config["feed_forward_proj"]
        if form not in ("gated-gelu", "relu"):
            raise SpecError(f"GGUF cannot say feed_forward_proj={form!r}, only 'gated-gelu' and 'relu'")
        return {}

    return Entry(read, write)


def _trunk(theirs: str, ours: str, *attentions: tuple[str, str]) -> list[Row]:
    block = f"{theirs}.block.{{}}.layer"
    pairs = [(f"{len(attentions)}.layer_norm", "ffn_norm")]
    pairs += [
        (f"{len(attentions)}.DenseReluDense.{one}", f"ffn_{other}")
        for one, other in (("wi", "up"), ("wi_0", "gate"), ("wi_1", "up"), ("wo", "down"))
    ]
    for i, (name, short) in enumerate(attentions):
        pairs += [(f"{i}.{name}.{letter}", f"{short}_{letter}") for letter in "qkvo"]
        pairs.append((f"{i}.layer_norm", f"{short}_norm"))
    bias = f"{theirs}.block.0.layer.0.SelfAttention.relative_attention_bias"
    return rows(
        [
            *((f"{block}.{one}", f"{ours}.blk.{{}}.{other}") for one, other in pairs),
            (bias, f"{ours}.blk.0.attn_rel_b"),
            (f"{theirs}.final_layer_norm", f"{ours}.output_norm"),
        ],
        ["weight"],
    )


def _t5(config: Config) -> list[Row]:
    gated = config["feed_forward_proj"] == "gated-gelu"
    unused = ".wi." if gated else ".wi_"  # one name of GGUF's stands for either
    return [
        Row("shared.weight", "token_embd.weight"),
        *(
            row
            for row in (
                *_trunk("encoder", "enc", ("SelfAttention", "attn")),
                *_trunk("decoder", "dec", ("SelfAttention", "attn"), ("EncDecAttention", "cross_attn")),
            )
            if unused not in row.their_names[0]
        ),
        Row("lm_head.weight", "output.weight"),
    ]


T5 = Architecture(
    "t5", "T5ForConditionalGeneration", "t5",
    (key("embedding_length", "d_model"), key("block_count", "num_layers"), vocabulary(), tying(), _eps(), _form(),
     key("feed_forward_length", "d_ff"), key("attention.head_count", "num_heads"),
     key("decoder_block_count", "num_decoder_layers", None),
     Entry(lambda source: {"d_kv": head_size(source)},
           lambda config: dict.fromkeys(("attention.key_length", "attention.value_length"), config["d_kv"])),
     key("attention.relative_buckets_count", "relative_attention_num_buckets"),
     Entry(lambda source: {}, lambda config: {"context_length": config.get("max_position_embeddings", 512),
                                              "decoder_start_token_id": 0}),
     fixed(is_encoder_decoder=True, relative_attention_max_distance=128)),
    _t5,
    irrelevant=frozenset({"context_length", "attention.head_count_kv", "decoder_start_token_id"}),
    ignored=("dec.blk.0.cross_attn_rel_b.weight",),  # stored by early files, never read
)  # fmt: skip
