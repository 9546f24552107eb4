"""DeBERTa (He et al. 2020, arXiv 2006.03654) and DeBERTa v2 and v3 (2111.09543).

BERT with disentangled attention: beside content to content, scores add content to position and position to content,
over one table of vectors by distance that all layers share. v2 and v3 tell far distances apart by logarithm, norm the
table, and may use the content's own matrices for positions.

>>> deberta(768, 12, 12).parameters()
183831552
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import SpecError
from ..names import Row, interleaved, rows
from ..nn.attention import Attention, AttentionOp, positions
from ..nn.constant import constant, traced_as_constant
from ..nn.convolution import Gathered, neighbour
from ..nn.documents import Documents
from ..nn.embed import Embed, EmbedOp
from ..nn.feed_forward import ACTIVATIONS as ACTS
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Classifier, Head, Spans, Transform
from ..nn.initialise import Init, normal
from ..nn.mask import Layout, Mask
from ..nn.norm import LayerNorm
from ..nn.op import Context, Extras, Op, Part, Tree
from ..nn.position import Learned
from ..nn.projection import Projection, table
from ..nn.sublayer import Block, BlockOp, Model, Trunk, post_norm, repeat
from ..state import State
from ..step import Shared, Step
from .bert import ACTIVATIONS, SUFFIXES, encoder_names, masked_tokens, prefixed, spans
from .config import Config, labels

Term = Literal["c2p", "p2c"]


class Disentangled(Attention):
    """Attention both ways with scores (q kᵀ + q · key[distance] + k · query[distance]) / sqrt(H · (1 + terms))."""

    terms: tuple[Term, ...] = ("p2c", "c2p")
    """"c2p": queries meet the key vectors of distances; "p2c": keys meet their query vectors."""
    distance: int = 512
    """Distances (query minus key) from −distance to distance − 1 are told apart; those beyond count as the last."""
    buckets: int | None = 256
    """So many buckets either way: half of them for one distance each, the others by logarithm; None: one a distance."""
    shared: bool = True
    """Whether the content's own q and k make the vectors of distances; False: matrices of their own."""
    position_dropout: float = 0.0
    """Share of the table's vectors zeroed while training."""

    def check(self) -> None:
        super().check()
        self.require(not self.causal and not self.cross, "disentangled attention sees both ways, and itself alone")
        self.require(len(set(self.terms)) == len(self.terms), f"terms={self.terms} name one twice")
        self.require(self.distance > 1, f"distance must be above 1, got {self.distance}")
        most = 2 * self.distance - 2  # then half of the buckets lie below distance − 1, the last that has one
        self.require(
            self.buckets is None or (2 <= self.buckets < most and self.buckets % 2 == 0),
            f"buckets={self.buckets} must be even, and below {most} for distance={self.distance}",
        )

    @property
    def span(self) -> int:
        """Rows of the table either way."""
        return self.buckets or self.distance

    def row(self, distance: Tensor) -> Tensor:
        """The table's row of each distance (query minus key): integers [..] to int64 [..]."""
        if self.buckets is None:
            return distance.clamp(-self.span, self.span - 1) + self.span
        known = constant(_buckets(self.buckets, self.distance), distance, torch.int64)
        return known[distance.clamp(-self.distance, self.distance) + self.distance]

    def build(self, dim: int, context: Context) -> DisentangledOp:
        return DisentangledOp(self, dim, context)


class DisentangledOp(AttentionOp):
    """[B, L, D] → [B, L, D]; the table of distances [2 · span, D] is Step.condition."""

    def __init__(self, spec: Disentangled, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        self.distances = spec
        inner = spec.heads * self.head_size
        self.scale = (self.head_size * (1 + len(spec.terms))) ** -0.5
        own, k_bias = not spec.shared, self.k is not None and self.k.bias is not None
        self.position_k = Projection(dim, inner, k_bias) if own and "c2p" in spec.terms else None
        self.position_q = Projection(dim, inner, spec.bias) if own and "p2c" in spec.terms else None

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        """Packed documents are taken out of their rows, for every pair of a row's tokens would have a score."""
        starts = (step.shared or Shared()).starts
        plain = torch.compiler.is_compiling() or any(one is not None for one in (step.mask, step.bias, self.watch))
        if plain or starts is None or step.segment is None or step.pos is None or not bool(starts.any()):
            return super().forward(x, step, state)
        y, pos, real = torch.zeros_like(x), step.pos.expand_as(step.segment), torch.ones_like(step.segment)
        for _, part in Documents.of(step.segment).alike():
            own, document = part.split(pos), part.split(real)
            shared = Shared(document=document, layout=Layout(own, own, document, document))
            inner = step.replace(pos=own, segment=document, shared=shared)
            y = y + part.join(super().forward(part.split(x), inner, state))
        return y

    def relative_scores(self, q: Tensor, k: Tensor, mask: Mask, step: Step) -> Tensor | None:
        spec, vectors = self.distances, step.condition
        assert vectors is not None
        vectors = F.dropout(vectors, spec.position_dropout, self.training)
        q_pos, k_pos = positions(mask, q.shape[2], k.shape[2], q.device)
        row = spec.row(q_pos[:, :, None] - k_pos[:, None, :])[:, None].expand(*q.shape[:3], k.shape[2])
        scores: Tensor | None = None
        if "c2p" in spec.terms:
            projection = self.position_k or self.k
            assert projection is not None
            keys = self._split(projection, vectors).transpose(0, 1)  # [N, 2 · span, H]
            scores = (q @ keys.mT).gather(3, row)
        if "p2c" in spec.terms:
            queries = self._split(self.position_q or self.q, vectors).transpose(0, 1)
            met = (k @ queries.mT).gather(3, row.mT).mT
            scores = met if scores is None else scores + met
        return None if scores is None else scores * self.scale


@traced_as_constant
def _buckets(buckets: int, distance: int) -> tuple[int, ...]:
    return _computed_buckets(buckets, distance)


@lru_cache
def _computed_buckets(buckets: int, distance: int) -> tuple[int, ...]:
    """Rows of the distances −distance … distance. Half of the buckets either way are of one distance each; the rest end
    at distance − 1, evenly by logarithm (the published code; the paper of v2 has no formula)."""
    half = buckets // 2

    def bucket(away: int) -> int:
        if away <= half:
            return away
        return half + math.ceil(math.log(away / half) / math.log((distance - 1) / half) * (half - 1))

    away = [bucket(i) for i in range(distance + 1)]
    either = [-b for b in reversed(away[1:])] + away
    return tuple(min(max(b + buckets, 0), 2 * buckets - 1) for b in either)


class RelativeEmbed(Embed):
    """Token ids to vectors, and beside them the table of distances that all layers read."""

    relative: int = 512
    """Its rows."""
    relative_norm: Part | None = None
    """A norm over its vectors."""

    def build(self, dim: int, context: Context) -> RelativeEmbedOp:
        return RelativeEmbedOp(self, dim, context)


class RelativeEmbedOp(EmbedOp):
    """ids [B, L] → ([B, L, D], step with the table [rows, D] as its condition)."""

    def __init__(self, spec: RelativeEmbed, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        self.relative = table(spec.relative, dim)
        self.relative_norm = spec.relative_norm.build(dim, context) if spec.relative_norm else None

    def forward(self, ids: Tensor, step: Step) -> tuple[Tensor, Step]:
        x, step = super().forward(ids, step)
        vectors = self.relative.weight
        return x, step.replace(condition=vectors if self.relative_norm is None else self.relative_norm(vectors, step))


class ConvolvedBlock(Block):
    """A block to whose output a convolution of its input is added: norm(block(x) + activation(convolution(x))).

    The largest models of v2 have it as their first.
    """

    kernel: int = 3
    """How many neighbours each token's convolution sees, itself in the middle; those of its document alone."""
    activation: Activation = "tanh"
    """What the convolution goes through."""
    norm: LayerNorm = LayerNorm(1e-7)
    """After the sum."""
    dropout: float = 0.0
    """Share of the convolution's output zeroed while training."""

    def check(self) -> None:
        super().check()
        self.require(self.kernel % 2 == 1, f"kernel={self.kernel} has no middle: give an odd number")
        self.require(0 <= self.dropout < 1, f"dropout is a share from 0 to below 1, got {self.dropout}")

    def build(self, dim: int, context: Context) -> ConvolvedBlockOp:
        return ConvolvedBlockOp(self, dim, context)


class ConvolvedBlockOp(BlockOp):
    """(x, step, state) → (y, extras)."""

    def __init__(self, spec: ConvolvedBlock, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        self.convolved = spec
        self.conv = Neighbours(dim, spec.kernel)
        self.norm = spec.norm.build(dim, context)

    def forward(self, x: Tree, step: Step, state: State | None = None) -> tuple[Tree, Extras]:
        y, extras = super().forward(x, step, state)
        assert isinstance(x, Tensor)
        assert isinstance(y, Tensor)
        near = F.dropout(self.conv(x, step), self.convolved.dropout, self.training)
        return self.norm(y + ACTS[self.convolved.activation](near), step), extras


class Neighbours(Op):
    """[B, L, D] → [B, L, D]: a convolution over each document, which sees zeros beyond its ends and skips padding. The
    weight is [D, D, K], as Conv1d's."""

    matrices = ("weight",)

    def __init__(self, dim: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim, dim, kernel))
        self.bias = nn.Parameter(torch.empty(dim))

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        normal(self.weight, init.matrix(self.weight.shape[1]), generator)
        self.bias.zero_()

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        reach = self.weight.shape[2] // 2
        if step.segment is None:
            return F.conv1d(x.mT, self.weight, self.bias, padding=reach).mT
        row = Gathered.read(step, step.segment, reach)
        x = row.gathered(x)
        known = F.pad(x, (0, 0, reach, 0))
        taps = [neighbour(known, x, row, spot) for spot in range(-reach, reach + 1)]
        return row.scattered(F.linear(torch.cat(taps, -1), self.weight.transpose(1, 2).flatten(1), self.bias))


def deberta(
    dim: int,
    layers: int,
    heads: int,
    vocab: int = 128100,
    *,
    hidden: int | None = None,
    context: int | None = None,
    types: int = 0,
    terms: tuple[Term, ...] = ("p2c", "c2p"),
    distance: int = 512,
    buckets: int | None = 256,
    shared: bool = True,
    key_bias: bool = True,
    relative_norm: bool = True,
    kernel: int | None = None,
    conv_activation: Activation = "tanh",
    activation: Activation = "gelu",
    eps: float = 1e-7,
    dropout: float = 0.0,
    head: Part | None = None,
) -> Model:
    """The architecture; hidden None is 4 · dim, context how many absolute positions are learned besides (None: none),
    kernel that of the first layer's convolution (None: none). A Head is tied to the embedding."""
    norm = LayerNorm(eps)
    attention = Disentangled(
        heads, causal=False, bias=True, dropout=dropout, terms=terms, distance=distance, buckets=buckets, shared=shared,
        k_bias=None if key_bias else False, position_dropout=dropout,
    )  # fmt: skip
    ffn = FeedForward(hidden or 4 * dim, activation, bias=True)
    block = Block((post_norm("attn", attention, norm, dropout), post_norm("ffn", ffn, norm, dropout)))
    embed = RelativeEmbed(
        vocab, position=Learned(context) if context else None, types=types, norm=norm, dropout=dropout,
        relative=2 * attention.span, relative_norm=norm if relative_norm else None,
    )  # fmt: skip
    blocks = repeat(block, layers)
    if kernel is not None:
        conv = ConvolvedBlock(
            block.sublayers, kernel=kernel, activation=conv_activation, norm=norm, dropout=dropout
        )  # fmt: skip
        blocks = (conv, *blocks[1:])
    return Model(dim, encoder=Trunk(embed, blocks), head=head, tied=isinstance(head, Head))


V1: dict[str, Any] = {"vocab": 50265, "buckets": None, "shared": False, "key_bias": False, "relative_norm": False}
SIZES: dict[str, dict[str, Any]] = {
    "deberta-base": {"dim": 768, "layers": 12, "heads": 12} | V1,
    "deberta-large": {"dim": 1024, "layers": 24, "heads": 16} | V1,
    "deberta-v2-xlarge": {"dim": 1536, "layers": 24, "heads": 24, "kernel": 3, "conv_activation": "gelu"},
    "deberta-v2-xxlarge": {"dim": 1536, "layers": 48, "heads": 24, "kernel": 3, "conv_activation": "gelu"},
    "deberta-v3-xsmall": {"dim": 384, "layers": 12, "heads": 6},
    "deberta-v3-small": {"dim": 768, "layers": 6, "heads": 12},
    "deberta-v3-base": {"dim": 768, "layers": 12, "heads": 12},
    "deberta-v3-large": {"dim": 1024, "layers": 24, "heads": 16},
}
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "vocab": 97, "distance": 12, "buckets": 6, "head": masked_tokens(1e-7),
}  # fmt: skip
EXEMPT: dict[str, str] = {
    "incremental": "every token sees those after it, so none can be answered before they are known"
}


def NAMES(model: Model) -> list[Row]:
    """The table of a spec: v1 fuses its projections head by head, and a model without a head has no prefix."""
    attention, encoder = model.find("encoder.blocks.0.attn.op"), list[Row]()
    ours, theirs = "encoder.blocks.{}.attn.op", "encoder.layer.{}.attention.self"
    fused = attention.k_bias is False
    if not fused:
        encoder += rows([(f"{theirs}.pos_key_proj", f"{ours}.position_k")])
        encoder += rows([(f"{theirs}.pos_query_proj", f"{ours}.position_q")])
    else:
        size = attention.head_size or model.dim // attention.heads
        weights = tuple(f"{ours}.{name}.weight" for name in "qkv")
        encoder += [
            Row(f"{theirs}.in_proj.weight", weights, interleaved(3, size)),
            Row(f"{theirs}.q_bias", f"{ours}.q.bias"),
            Row(f"{theirs}.v_bias", f"{ours}.v.bias"),
            Row(f"{theirs}.pos_proj.weight", f"{ours}.position_k.weight"),
            *rows([(f"{theirs}.pos_q_proj", f"{ours}.position_q")]),
        ]
    encoder += [
        row
        for row in encoder_names("query_proj", "key_proj", "value_proj")
        if not (fused and "attention.self" in row.their_names[0])
    ]
    encoder += rows(
        [
            ("encoder.rel_embeddings", "encoder.embed.relative"),
            ("encoder.LayerNorm", "encoder.embed.relative_norm"),
            ("encoder.conv.conv", "encoder.blocks.0.conv"),
            ("encoder.conv.LayerNorm", "encoder.blocks.0.norm"),
        ]
    )
    return encoder if model.head is None else prefixed("deberta.", encoder) + HEAD[type(model.head)]


HEAD: dict[type, list[Row]] = {
    Head: [
        *rows([(f"cls.predictions.transform.{name}", f"head.before.{ours}")
               for name, ours in (("dense", "dense"), ("LayerNorm", "norm"))]),
        Row("cls.predictions.decoder.weight", "head.weight"),
        Row("cls.predictions.bias", "head.bias"),
    ],
    Classifier: rows([("pooler.dense", "head.before.dense"), ("classifier", "head.out")]),
    Spans: rows([("qa_outputs", "head.out")]),
}  # fmt: skip
PREFIX = ""
# The published v3 files call the head of masked language models by another name ("legacy": false).
RENAMED = tuple(
    (f"cls.predictions.{new}", f"lm_predictions.lm_head.{old}")
    for new, old in [("bias", "bias")]
    + [(f"transform.{name}.{kind}", f"{name}.{kind}") for name in ("dense", "LayerNorm") for kind in ("weight", "bias")]
)
IGNORED = (
    "deberta.embeddings.position_ids",
    "embeddings.position_ids",
    "cls.predictions.decoder.bias",  # the bias once more
    *("deberta.embeddings.position_embeddings.weight", "embeddings.position_embeddings.weight"),  # kept, and not read
    *(
        f"mask_predictions.{name}.{kind}"
        for name in ("dense", "LayerNorm", "classifier")
        for kind in ("weight", "bias")
    ),
)


def _head(config: Config, suffix: str, activation: Activation, eps: float) -> Part | None:
    dropped = config("hidden_dropout_prob", 0.1)
    pooler = Transform(config.choose("pooler_hidden_act", ACTIVATIONS, "gelu"), dropout=config("pooler_dropout", 0.0))
    of_rows = config("cls_dropout", dropped)
    if suffix == "ForMaskedLM":
        config.fix("tie_word_embeddings", True)
        return masked_tokens(eps, activation)
    if suffix == "ForSequenceClassification":
        return Classifier(config.classes(), "first", pooler, dropout=of_rows)
    if suffix == "ForTokenClassification":
        return Classifier(config.classes(), dropout=dropped)
    return spans(config) if suffix == "ForQuestionAnswering" else None


def _terms(config: Config) -> tuple[Term, ...]:
    given = config("pos_att_type")
    terms = [name.strip() for name in given.lower().split("|")] if isinstance(given, str) else given
    if not isinstance(terms, list) or not terms or any(term not in ("c2p", "p2c") for term in terms):
        raise SpecError(f"{config.kind}: pos_att_type={given!r} does not say c2p, p2c or both")
    return tuple(cast("list[Term]", terms))


def _read(second: bool, suffix: str, values: Mapping[str, Any]) -> Model:
    """The spec of a config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    dim, longest = config.count("hidden_size"), config.count("max_position_embeddings", 512)
    if not config("relative_attention", False):
        raise SpecError(f"{config.kind}: relative_attention=False is not modelled: attention here knows distances")
    config.fix("talking_head", False)
    for key in ("embedding_size", "pooler_hidden_size"):
        config.fix(key, dim)
    config.fix("conv_groups", 1)
    kernel = config.count("conv_kernel_size", 0, least=0) if second else 0
    distance = config.given("max_relative_positions", -1)
    buckets = config.given("position_buckets", -1) if second else -1
    norm = config("norm_rel_ebd", "none") if second else "none"
    if norm not in ("none", "layer_norm"):
        raise SpecError(f"{config.kind}: norm_rel_ebd={norm!r} is not modelled (only 'none', 'layer_norm')")
    activation, eps = config.choose("hidden_act", ACTIVATIONS, "gelu"), config("layer_norm_eps", 1e-7)
    model = deberta(
        dim,
        config.layers("num_hidden_layers"),
        config.count("num_attention_heads"),
        config.count("vocab_size"),
        hidden=config.count("intermediate_size"),
        context=longest if config("position_biased_input", True) else None,
        types=config.count("type_vocab_size", 0, least=0),
        terms=_terms(config),
        distance=longest if distance is None or distance < 1 else distance,
        buckets=None if buckets is None or buckets < 1 else buckets,
        shared=config("share_att_key", False) if second else False,
        key_bias=second,
        relative_norm=norm == "layer_norm",
        kernel=kernel or None,
        conv_activation=config.choose("conv_act", ACTIVATIONS, "tanh"),
        activation=activation,
        eps=eps,
        dropout=config("hidden_dropout_prob", 0.1),
        head=_head(config, suffix, activation, eps),
    ).override(**{"encoder.blocks.*.attn.op.dropout": config("attention_probs_dropout_prob", 0.1)})
    config.done("legacy", "tie_word_embeddings", "cls_dropout", "pooler_dropout")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this line; the caller checks that it reads back as the same spec."""
    embed, attention, ffn = (model.find(f"encoder.{path}") for path in ("embed", "blocks.0.attn.op", "blocks.0.ffn.op"))
    acts = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    head = model.head
    suffix = {type(None): "Model", Head: "ForMaskedLM", Spans: "ForQuestionAnswering"}.get(type(head), "")
    config: dict[str, Any] = {
        "hidden_size": model.dim,
        "num_hidden_layers": len(model.find("encoder.blocks")),
        "num_attention_heads": attention.heads,
        "intermediate_size": ffn.hidden,
        "vocab_size": embed.vocab,
        "max_position_embeddings": embed.position.length if embed.position else 512,
        "position_biased_input": embed.position is not None,
        "type_vocab_size": embed.types,
        "relative_attention": True,
        "pos_att_type": list(attention.terms),
        "max_relative_positions": attention.distance,
        "hidden_act": acts[ffn.activation],
        "layer_norm_eps": embed.norm.eps,
        "hidden_dropout_prob": embed.dropout,
        "attention_probs_dropout_prob": attention.dropout,
        "legacy": True,
    }
    if isinstance(head, Classifier):
        suffix = "ForTokenClassification" if head.pool is None else "ForSequenceClassification"
        config |= labels(head.classes)
        if head.pool is not None:
            before: Any = model.find("head.before")
            config |= {"cls_dropout": head.dropout, "pooler_dropout": before.dropout,
                       "pooler_hidden_act": acts[before.activation]}  # fmt: skip
    if attention.k_bias is False:
        return config | {"architectures": [f"Deberta{suffix}"], "model_type": "deberta"}
    block = model.find("encoder.blocks")[0]
    if isinstance(block, ConvolvedBlock):
        config |= {"conv_kernel_size": block.kernel, "conv_act": acts[block.activation]}
    return config | {
        "architectures": [f"DebertaV2{suffix}"],
        "model_type": "deberta-v2",
        "position_buckets": attention.buckets or -1,
        "share_att_key": attention.shared,
        "norm_rel_ebd": "layer_norm" if embed.relative_norm else "none",
    }


HF = {
    line + suffix: partial(_read, line == "DebertaV2", suffix)
    for line in ("Deberta", "DebertaV2")
    for suffix in SUFFIXES
}
