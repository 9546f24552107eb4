"""bert and modern-bert (their vectors, for GGUF keeps no head of them) and t5."""

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
from ...recipes.modernbert import FULL, LOCAL
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
    position = model.spec.find("encoder.embed.position")
    before = position.offset if isinstance(position, Learned) else 0
    if not before:
        return model
    cut = model.spec.override(**{"encoder.embed.position.offset": 0}).empty(device="meta")
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        rows = parameter.detach()[before:] if name == POSITIONS else parameter.detach()
        setattr(cut.get_submodule(module), kind, nn.Parameter(rows, requires_grad=False))
    return cut.eval()


def dressed(spec: Model) -> Model:
    """The spec of a bare encoder with the head that its class of Hugging Face's has, and GGUF leaves out."""
    if not _vectors(spec):
        return spec
    return spec.replace(head=POOLER if isinstance(spec.find("encoder.embed.position"), Learned) else None)


def _vectors(spec: Model) -> bool:
    """Whether it is an encoder of tokens that answers vectors, of them or of texts."""
    encoder = spec.encoder if spec.decoder is None else None
    tokens = isinstance(encoder, Trunk) and isinstance(encoder.embed, Embed)
    return tokens and (spec.head is None or isinstance(spec.head, Pooled))


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


def _near() -> Entry:
    """Every third layer, say, sees everything, the first among them; the others a window, with a base of their own."""

    def read(source: Source) -> dict[str, Any]:
        every = max(1, source.count("attention.sliding_window_pattern", 3))
        ropes = {FULL: source("rope.freq_base", 160000.0), LOCAL: source("rope.freq_base_swa", 10000.0)}
        return {
            "local_attention": source.count("attention.sliding_window"),
            "layer_types": _kinds(source.layers(), every),
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in ropes.items()},
        }

    def write(config: Config) -> dict[str, Any]:
        kinds, ropes = config["layer_types"], config["rope_parameters"]
        every = next((i for i, kind in enumerate(kinds) if i and kind == FULL), len(kinds))
        if kinds != _kinds(len(kinds), every):
            raise SpecError("GGUF cannot say layer_types of this architecture but with every n-th layer full")
        scaled = next((kind for kind in ropes.values() if kind["rope_type"] != "default"), None)
        if scaled is not None:
            raise SpecError(f"GGUF cannot say rope_parameters.rope_type={scaled['rope_type']!r} of this architecture")
        return {
            "attention.sliding_window": config["local_attention"],
            "attention.sliding_window_pattern": every,
            "rope.freq_base": float(ropes[FULL]["rope_theta"]),
            "rope.freq_base_swa": float(ropes[LOCAL]["rope_theta"]),
        }

    return Entry(read, write)


def _kinds(layers: int, every: int) -> list[str]:
    return [LOCAL if i % every else FULL for i in range(layers)]


MODERN_BERT = Architecture(
    "modern-bert", "ModernBertModel", "modernbert",
    (WIDTH, key("block_count", "num_hidden_layers"), vocabulary(), HIDDEN,
     key("attention.head_count", "num_attention_heads"), key("attention.layer_norm_epsilon", "norm_eps"),
     Entry(lambda source: {}, lambda config: {"context_length": config.get("max_position_embeddings", 8192)}), _near(),
     constant("attention.causal", False), constant("rope.scaling.type", "none"),
     Entry(constant("hidden_act", "gelu").read, lambda config: {}),  # newer files say it
     fixed(hidden_activation="gelu", norm_bias=False, attention_bias=False, mlp_bias=False)),
    lambda config: [
        *rows([("embeddings.tok_embeddings", "token_embd"), ("embeddings.norm", "token_embd_norm"),
               ("final_norm", "output_norm")]),
        *layers("layers", "blk", ("attn_norm", "attn_norm"), ("attn.Wqkv", "attn_qkv"), ("attn.Wo", "attn_output"),
                ("mlp_norm", "ffn_norm"), ("mlp.Wi", "ffn_up"), ("mlp.Wo", "ffn_down")),
    ],
    irrelevant=frozenset({"context_length", "attention.head_count_kv", "rope.dimension_count",
                          "classifier.output_labels"}),
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
