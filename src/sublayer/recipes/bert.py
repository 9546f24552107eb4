"""BERT (Devlin et al. 2018, arXiv 1810.04805), RoBERTa (1907.11692) and XLM-RoBERTa (1911.02116).

A post-norm encoder that sees both ways, with learned positions, token types, a norm on the embeddings and biases
everywhere. RoBERTa is the same architecture with other numbers: its positions begin at row pad + 1 of their table, and
it has one token type. The heads: masked tokens, classes, tags, spans, or the pooler that sees the first token.

>>> bert(768, 12, 12).parameters()
109482240
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from ..errors import SpecError
from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Classifier, Head, Pooled, Spans, Transform
from ..nn.norm import LayerNorm
from ..nn.op import Part
from ..nn.position import Learned
from ..nn.sublayer import Block, Model, Trunk, post_norm, repeat
from .config import Config, labels

POOLER = Pooled("first", Transform("tanh"))


def masked_tokens(eps: float = 1e-12, activation: Activation = "gelu") -> Head:
    """The head of masked language models; tied to the embedding."""
    return Head(bias=True, before=Transform(activation, LayerNorm(eps)))


def bert(
    dim: int,
    layers: int,
    heads: int,
    vocab: int = 30522,
    context: int = 512,
    *,
    hidden: int | None = None,
    types: int = 2,
    offset: int = 0,
    activation: Activation = "gelu",
    eps: float = 1e-12,
    dropout: float = 0.0,
    head: Part | None = POOLER,
) -> Model:
    """The architecture; hidden None is 4 · dim, offset the rows before position 0. A Head is tied to the embedding."""
    norm = LayerNorm(eps)
    attention = Attention(heads, causal=False, bias=True, dropout=dropout)
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((post_norm("attn", attention, norm, dropout), post_norm("ffn", ffn, norm, dropout)))
    embed = Embed(vocab, position=Learned(context, offset), types=types, norm=norm, dropout=dropout)
    return Model(dim, encoder=Trunk(embed, repeat(block, layers)), head=head, tied=isinstance(head, Head))


SIZES: dict[str, dict[str, Any]] = {
    "bert-base": {"dim": 768, "layers": 12, "heads": 12},
    "bert-large": {"dim": 1024, "layers": 24, "heads": 16},
    "roberta-base": {"dim": 768, "layers": 12, "heads": 12, "vocab": 50265, "types": 1, "offset": 2, "eps": 1e-5},
    "roberta-large": {"dim": 1024, "layers": 24, "heads": 16, "vocab": 50265, "types": 1, "offset": 2, "eps": 1e-5},
}
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "vocab": 97, "context": 64, "head": masked_tokens()}
EXEMPT: dict[str, str] = {
    "incremental": "every token sees those after it, so none can be answered before they are known"
}


def encoder_names(query: str = "query", key: str = "key", value: str = "value") -> list[Row]:
    """The rows of an encoder with BERT's names, without the model's prefix; how its projections are called."""
    return [
        Row("embeddings.position_embeddings.weight", "encoder.embed.position.weight"),
        *rows(
            [
                ("embeddings.word_embeddings", "encoder.embed.tokens"),
                ("embeddings.token_type_embeddings", "encoder.embed.types"),
                ("embeddings.LayerNorm", "encoder.embed.norm"),
                (f"encoder.layer.{{}}.attention.self.{query}", "encoder.blocks.{}.attn.op.q"),
                (f"encoder.layer.{{}}.attention.self.{key}", "encoder.blocks.{}.attn.op.k"),
                (f"encoder.layer.{{}}.attention.self.{value}", "encoder.blocks.{}.attn.op.v"),
                ("encoder.layer.{}.attention.output.dense", "encoder.blocks.{}.attn.op.out"),
                ("encoder.layer.{}.attention.output.LayerNorm", "encoder.blocks.{}.attn.after"),
                ("encoder.layer.{}.intermediate.dense", "encoder.blocks.{}.ffn.op.up"),
                ("encoder.layer.{}.output.dense", "encoder.blocks.{}.ffn.op.down"),
                ("encoder.layer.{}.output.LayerNorm", "encoder.blocks.{}.ffn.after"),
            ]
        ),
    ]


def NAMES(model: Model) -> list[Row]:
    """The table of a spec: each head has names of its own, and a model without one has no prefix."""
    line, suffix = _class(model)
    prefix = "" if suffix == "Model" else f"{line.lower()}."
    return prefixed(prefix, encoder_names()) + HEADS[line].get(suffix, HEADS["Bert"][suffix])


def prefixed(prefix: str, table: list[Row]) -> list[Row]:
    """The same rows with their names under a prefix."""
    return [Row(tuple(prefix + name for name in row.their_names), row.ours, row.change) for row in table]


HEADS: dict[str, dict[str, list[Row]]] = {
    "Bert": {
        "Model": rows([("pooler.dense", "head.before.dense")]),
        "ForMaskedLM": [
            *rows(
                [
                    ("cls.predictions.transform.dense", "head.before.dense"),
                    ("cls.predictions.transform.LayerNorm", "head.before.norm"),
                ]
            ),
            Row("cls.predictions.decoder.weight", "head.weight"),
            Row("cls.predictions.bias", "head.bias"),
        ],
        "ForSequenceClassification": rows([("bert.pooler.dense", "head.before.dense"), ("classifier", "head.out")]),
        "ForTokenClassification": rows([("classifier", "head.out")]),
        "ForQuestionAnswering": rows([("qa_outputs", "head.out")]),
    },
    "Roberta": {
        "ForMaskedLM": [
            *rows([("lm_head.dense", "head.before.dense"), ("lm_head.layer_norm", "head.before.norm")]),
            Row("lm_head.decoder.weight", "head.weight"),
            Row("lm_head.bias", "head.bias"),
        ],
        "ForSequenceClassification": rows(
            [("classifier.dense", "head.before.dense"), ("classifier.out_proj", "head.out")]
        ),
    },
}
SUFFIXES = tuple(HEADS["Bert"])
PREFIX = ""
RENAMED = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))  # as TensorFlow had them
IGNORED = (
    *(f"{line}embeddings.position_ids" for line in ("", "bert.", "roberta.")),  # 0, 1, 2, … as a buffer
    *("cls.predictions.decoder.bias", "lm_head.decoder.bias"),  # the bias once more
    *(f"{name}.{kind}" for name in ("bert.pooler.dense", "roberta.pooler.dense", "cls.seq_relationship")
      for kind in ("weight", "bias")),  # what the published masked language models were pretrained with besides
)  # fmt: skip


def _class(model: Model) -> tuple[str, str]:
    """("Bert" or "Roberta", what follows in the architecture's name)."""
    head = model.head
    if isinstance(head, Classifier):
        suffix = "ForTokenClassification" if head.pool is None else "ForSequenceClassification"
    elif isinstance(head, Head | Spans):
        suffix = "ForMaskedLM" if isinstance(head, Head) else "ForQuestionAnswering"
    else:
        suffix = "Model"
    return "Roberta" if model.find("encoder.embed.position.offset") else "Bert", suffix


def spans(config: Config, before: Part | None = None, dropout: float = 0.0) -> Spans:
    """The head of extractive question answering. Raises SpecError for other than two labels."""
    if config.classes() != 2:
        raise SpecError(f"{config.kind}: id2label names {config.classes()} labels; an answer has a start and an end: 2")
    return Spans(before, dropout=dropout)


def _head(config: Config, line: str, suffix: str, activation: Activation, eps: float) -> Part:
    dropped = config("classifier_dropout", config("hidden_dropout_prob", 0.1))
    if suffix == "ForMaskedLM":
        config.fix("tie_word_embeddings", True)
        return masked_tokens(eps, "gelu" if line == "Roberta" else activation)  # RoBERTa's head has no other
    if suffix == "ForSequenceClassification":
        before = Transform("tanh", dropout=dropped if line == "Roberta" else 0.0)
        return Classifier(config.classes(), "first", before, dropout=dropped)
    if suffix == "ForTokenClassification":
        return Classifier(config.classes(), dropout=dropped)
    return spans(config) if suffix == "ForQuestionAnswering" else POOLER


def _read(line: str, suffix: str, values: Mapping[str, Any]) -> Model:
    """The spec of a config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    config.fix("position_embedding_type", "absolute")
    config.fix("is_decoder", False)
    config.fix("add_cross_attention", False)
    offset = 1 + config.count("pad_token_id", 1, least=0) if line == "Roberta" else 0
    activation, eps = config.choose("hidden_act", ACTIVATIONS, "gelu"), config("layer_norm_eps", 1e-12)
    model = bert(
        config.count("hidden_size"),
        config.layers("num_hidden_layers"),
        config.count("num_attention_heads"),
        config.count("vocab_size"),
        config.count("max_position_embeddings", 512, least=1 + offset) - offset,
        hidden=config.count("intermediate_size"),
        types=config.count("type_vocab_size", 2),
        offset=offset,
        activation=activation,
        eps=eps,
        dropout=config("hidden_dropout_prob", 0.1),
        head=_head(config, line, suffix, activation, eps),
    ).override(**{"encoder.blocks.*.attn.op.dropout": config("attention_probs_dropout_prob", 0.1)})
    config.done("classifier_dropout", "tie_word_embeddings", "pooler_fc_size", "pooler_num_attention_heads",
                "pooler_num_fc_layers", "pooler_size_per_head", "pooler_type", "directionality", "language",
                "name")  # fmt: skip
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this line; the caller checks that it reads back as the same spec."""
    line, suffix = _class(model)
    embed, attention, ffn = (model.find(f"encoder.{path}") for path in ("embed", "blocks.0.attn.op", "blocks.0.ffn.op"))
    config: dict[str, Any] = {
        "architectures": [line + suffix],
        "model_type": line.lower(),
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("encoder.blocks")),
        "num_attention_heads": attention.heads,
        "intermediate_size": ffn.hidden,
        "vocab_size": embed.vocab,
        "max_position_embeddings": embed.position.length + embed.position.offset,
        "type_vocab_size": embed.types,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "layer_norm_eps": embed.norm.eps,
        "hidden_dropout_prob": embed.dropout,
        "attention_probs_dropout_prob": attention.dropout,
    }
    if line == "Roberta":
        config["pad_token_id"] = embed.position.offset - 1
    if isinstance(model.head, Classifier):
        config |= labels(model.head.classes) | {"classifier_dropout": model.head.dropout}
    return config


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",  # the later name of one function is the one that is written
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
HF = {
    theirs + suffix: partial(_read, line, suffix)
    for theirs, line in (("Bert", "Bert"), ("Roberta", "Roberta"), ("XLMRoberta", "Roberta"))
    for suffix in SUFFIXES
}
HF["BertForPreTraining"] = partial(_read, "Bert", "ForMaskedLM")  # what tells whether sentences follow is left unread
