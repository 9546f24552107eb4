"""Gemma 4, text, dense (Google DeepMind, 2026; the equations are those of transformers' Gemma4ForCausalLM).

As Gemma 3, but norms store their weight itself, values are normed, scores are not scaled, and a learned number scales
each layer's output. Global layers have larger heads, of which a quarter turns; their values may be their keys'
projection. The small models' last layers attend to keys and values of the last layers before them of their kind, and
every layer reads an embedding of its own (a table of all layers' rows, and a projection of the first embedding). Of
checkpoints that see and hear too, the parts for that are left unread.

>>> gemma4(1536, 35, 8, 1, 6144, local=every(5, 35), sharing=20, double=True).parameters()
4628569379
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed, EmbedOp
from ..nn.feed_forward import ACTIVATIONS as FUNCTIONS
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.op import Context, Op, Part
from ..nn.projection import Projection
from ..nn.rope import Rope, rope_from_hf, rope_to_hf
from ..nn.rope_scaling import Proportional
from ..nn.sublayer import Block, Model, Sublayer, Trunk
from ..state import State
from ..step import Step
from .config import Config, of_text, without_head
from .gemma import ACTIVATIONS, every

ROPE = Rope(theta=10000.0)
GLOBAL_ROPE = Rope(theta=1e6, scaling=Proportional(0.25))


class LayeredEmbed(Embed):
    """Tokens, and for each layer a vector of its own, left in Step.condition: [B, L, layers, size].

    It is (norm(W x / sqrt(D)) + sqrt(size) · row) / sqrt(2), of the embedding x and the token's row of a second table.
    """

    layers: int = 0
    """How many layers read one."""
    size: int = 256
    """Its width."""
    rows: int | None = None
    """V of the second table; None: as the first."""
    eps: float = 1e-6
    """Of the norm."""

    def build(self, dim: int, context: Context) -> LayeredEmbedOp:
        return LayeredEmbedOp(self, dim, context)


class LayeredEmbedOp(EmbedOp):
    """ids [B, L] int64 → ([B, L, D], step with condition)."""

    def __init__(self, spec: LayeredEmbed, dim: int, context: Context) -> None:
        super().__init__(spec, dim, context)
        width = spec.layers * spec.size
        self.table = Embed(spec.rows or spec.vocab, scale=spec.size**0.5).build(width, Context())
        self.project = Projection(dim, width, bias=False)
        self.layer_norm = RMSNorm(spec.eps).build(spec.size, context)
        self.layers, self.scale = spec.layers, dim**-0.5

    def forward(self, ids: Tensor, step: Step, shared: Tensor | None = None) -> tuple[Tensor, Step]:
        x, step = super().forward(ids, step, shared)
        row, _ = self.table(ids, step)
        row, own = (y.unflatten(-1, (self.layers, -1)) for y in (row, self.project(x) * self.scale))
        return x, step.replace(condition=(self.layer_norm(own) + row) * 2**-0.5)


class LayerInput(Part):
    """down(activation(gate(x)) · the layer's vector of Step.condition)."""

    layer: int
    """Which of the vectors."""
    size: int
    """Its width."""
    activation: Activation = "gelu_tanh"

    def build(self, dim: int, context: Context) -> LayerInputOp:
        return LayerInputOp(self, dim)


class LayerInputOp(Op):
    """[B, L, D] → [B, L, D]."""

    residual_outputs = ("down",)

    def __init__(self, spec: LayerInput, dim: int) -> None:
        super().__init__()
        self.spec = spec
        self.gate = Projection(dim, spec.size, bias=False)
        self.down = Projection(spec.size, dim, bias=False)

    def forward(self, x: Tensor, step: Step, state: State | None = None) -> Tensor:
        assert step.condition is not None
        return self.down(FUNCTIONS[self.spec.activation](self.gate(x)) * step.condition[:, :, self.spec.layer])


class Scaled(Part):
    """x times one number, which a checkpoint brings and training leaves as it is."""

    def build(self, dim: int, context: Context) -> ScaledOp:
        return ScaledOp()


class ScaledOp(Op):
    """[…, D] → […, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(1), requires_grad=False)

    def initialise(self, generator: torch.Generator, init: Init) -> None:
        self.weight.fill_(1)

    def forward(self, x: Tensor, step: Step | None = None) -> Tensor:
        return x * self.weight


def gemma4(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int = 262144,
    rope: Rope = GLOBAL_ROPE,
    local_rope: Rope = ROPE,
    *,
    head_size: int = 256,
    global_head_size: int = 512,
    global_kv_heads: int | None = None,
    local: tuple[bool, ...] = (),
    window: int = 512,
    sharing: int = 0,
    double: bool = False,
    tied_values: bool = False,
    layer_size: int | None = 256,
    layer_vocab: int | None = None,
    logit_cap: float | None = 30.0,
    bias: bool = False,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-6,
    dropout: float = 0.0,
    tied: bool = True,
) -> Model:
    """The architecture. sharing: how many last layers read the keys and values of others, with a feed-forward twice as
    wide if `double`; tied_values: global values are their keys' projection; layer_size: width of each layer's own
    embedding, None where there is none. New models begin as transformers' do, 0.02 everywhere.
    """
    norm, own = RMSNorm(eps), layers - sharing
    if len(local) != layers or not 0 <= sharing < layers or {*local[:own]} != {*local}:
        raise SpecError(
            f"gemma4: local says of {layers} layers whether they are, and each kind that reads has a writer"
        )
    writers = {kind: max(i for i in range(own) if local[i] == kind) for kind in {*local}} if sharing else {}

    def block(i: int) -> Block:
        reads = i >= own
        kind = "local" if local[i] else "global"
        attention = Attention(
            heads, kv_heads if local[i] else global_kv_heads or kv_heads, head_size if local[i] else global_head_size,
            window=window if local[i] else None, position=local_rope if local[i] else rope, qk_norm=norm, scale=1.0,
            bias=bias, dropout=dropout, v_norm=None if reads else RMSNorm(eps, weight=False),
            tied_values=tied_values and not local[i] and not reads,
            keeps=kind if i == writers.get(local[i]) else None, reads=kind if reads else None,
        )  # fmt: skip
        ffn = FeedForward(2 * hidden if reads and double else hidden, activation, gated=True)
        sublayers = [Sublayer("attn", attention, pre=norm, post=norm), Sublayer("ffn", ffn, pre=norm, post=norm)]
        if layer_size is not None:
            sublayers.append(Sublayer("layer", LayerInput(i, layer_size, activation), post=norm))
        return Block((*sublayers[:-1], sublayers[-1].replace(after=Scaled())))

    embed = Embed(vocab, scale=dim**0.5)
    if layer_size is not None:
        embed = LayeredEmbed(
            vocab, dim**0.5, layers=layers, size=layer_size, rows=None if layer_vocab == vocab else layer_vocab, eps=eps
        )
    trunk = Trunk(embed, tuple(map(block, range(layers))), norm)
    return Model(dim, decoder=trunk, head=Head(softcap=logit_cap), tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "gemma4-e2b": {"dim": 1536, "layers": 35, "heads": 8, "kv_heads": 1, "hidden": 6144, "local": every(5, 35),
                   "sharing": 20, "double": True},
    "gemma4-e4b": {"dim": 2560, "layers": 42, "heads": 8, "kv_heads": 2, "hidden": 10240, "local": every(6, 42),
                   "sharing": 18},
    "gemma4-31b": {"dim": 5376, "layers": 60, "heads": 32, "kv_heads": 16, "hidden": 21504, "local": every(6, 60),
                   "window": 1024, "global_kv_heads": 4, "tied_values": True, "layer_size": None},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 4, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 97, "head_size": 8,
    "global_head_size": 12, "local": (True, False, True, False), "window": 5, "sharing": 2, "double": True,
    "layer_size": 6,
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def NAMES(model: Model) -> list[Row]:
    """The checkpoint table: the number that scales a layer's output stands after its last sublayer."""
    layer = [
        ("input_layernorm", "attn.pre"),
        ("post_attention_layernorm", "attn.post"),
        ("pre_feedforward_layernorm", "ffn.pre"),
        ("post_feedforward_layernorm", "ffn.post"),
        *((f"self_attn.{name}_proj", f"attn.op.{name}") for name in "qkv"),
        ("self_attn.o_proj", "attn.op.out"),
        ("self_attn.q_norm", "attn.op.q_norm"),
        ("self_attn.k_norm", "attn.op.k_norm"),
        ("mlp.gate_proj", "ffn.op.gate"),
        ("mlp.up_proj", "ffn.op.up"),
        ("mlp.down_proj", "ffn.op.down"),
        ("per_layer_input_gate", "layer.op.gate"),
        ("per_layer_projection", "layer.op.down"),
        ("post_per_layer_input_norm", "layer.post"),
    ]
    last = model.find("decoder.blocks.0").sublayers[-1].name
    return [
        Row("model.embed_tokens.weight", "decoder.embed.tokens.weight"),
        Row("model.embed_tokens_per_layer.weight", "decoder.embed.table.tokens.weight"),
        Row("model.layers.{}.layer_scalar", f"decoder.blocks.{{}}.{last}.after.weight"),
        *rows([(f"model.layers.{{}}.{theirs}", f"decoder.blocks.{{}}.{ours}") for theirs, ours in layer]),
        *rows(
            [
                ("model.per_layer_model_projection", "decoder.embed.project"),
                ("model.per_layer_projection_norm", "decoder.embed.layer_norm"),
                ("model.norm", "decoder.norm"),
            ]
        ),
        Row("lm_head.weight", "head.weight"),
    ]


PREFIX = "model."
PREFIXES = ("model.language_model.",)  # in checkpoints that see and hear too
# What published files hold for layers that read others' keys and values, which no class uses, and what sees and hears.
IGNORED = (
    *(f"model.layers.{{}}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm", "v_norm")),
    *(f"model.{part}.*" for part in ("vision_tower", "audio_tower", "embed_vision", "embed_audio")),
)


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Gemma4ForCausalLM's config.json (dense). Raises SpecError for a key or value not modelled."""
    config = Config(values)
    config.fix("enable_moe_block", False)
    config.fix("use_bidirectional_attention", "vision")  # which changes nothing for text
    for key in ("num_experts", "top_k_experts", "moe_intermediate_size"):
        config.fix(key)
    own = config.decoder(1e-6, tied=True) | {"kv_heads": config.count("num_key_value_heads")}
    local = config.local_layers((*every(6, own["layers"])[:-1], False))
    if local[-1]:
        raise SpecError(
            f"{config.kind}: layer_types ends with a sliding_attention, and the last layer of these is global"
        )
    large = _global(config, [i for i, one in enumerate(local) if not one])
    tied_values = config("attention_k_eq_v", False)
    head_sizes = {"full_attention": large["head_dim"], "sliding_attention": config.count("head_dim", 256)}
    ropes = _ropes(config, head_sizes)
    layer_size = config.count("hidden_size_per_layer_input", 256, least=0) or None
    model = gemma4(
        **own,
        hidden=config.count("intermediate_size"),
        rope=ropes["full_attention"],
        local_rope=ropes["sliding_attention"],
        head_size=head_sizes["sliding_attention"],
        global_head_size=head_sizes["full_attention"],
        global_kv_heads=large["num_key_value_heads"] or own["kv_heads"],
        local=local,
        window=config.count("sliding_window", 512),
        sharing=config.count("num_kv_shared_layers", 0, least=0),
        double=config("use_double_wide_mlp", False),
        tied_values=tied_values,
        layer_size=layer_size,
        layer_vocab=config.count("vocab_size_per_layer_input", 262144),
        logit_cap=config.given("final_logit_softcapping", None),
        bias=config("attention_bias", False),
        activation=config.choose("hidden_activation", ACTIVATIONS, "gelu_pytorch_tanh"),
    )
    config.done("max_position_embeddings")
    return model


def _global(config: Config, layers: list[int]) -> dict[str, int | None]:
    """Head size and key heads of global layers: two keys of their own or, as transformers writes them, a table of what
    differs from local ones."""
    table = config.table("per_layer_config")
    if "per_layer_config" not in config.values:
        heads = config.count("num_global_key_value_heads", None) if config("attention_k_eq_v", False) else None
        config.used.add("num_global_key_value_heads")
        return {"head_dim": config.count("global_head_dim", 512), "num_key_value_heads": heads}
    found = list(table.values()) or [{}]
    known = isinstance(found[0], dict) and found[0].keys() <= {"head_dim", "num_key_value_heads"}
    named = sorted(int(key) for key in table if key.isdecimal())  # theirs are as long as the largest: "05", "11"
    whole = not table or (len(named) == len(table) and named == layers)
    if not known or not whole or any(one != found[0] for one in found):
        raise SpecError(f"{config.kind}: per_layer_config gives one head size and number of key heads to global layers")
    own, head_size = Config(found[0]), config.count("head_dim", 256)
    return {"head_dim": own.count("head_dim", head_size), "num_key_value_heads": own.count("num_key_value_heads", None)}


def _ropes(config: Config, head_sizes: dict[str, int]) -> dict[str, Rope]:
    given = config.table("rope_parameters")
    if given.keys() - head_sizes.keys() or not all(isinstance(one, dict) for one in given.values()):
        raise SpecError(f"{config.kind}: rope_parameters holds more than the tables of {' and '.join(head_sizes)}")
    longest = {"max_position_embeddings": config.count("max_position_embeddings", 131072)}
    own = {"full_attention": GLOBAL_ROPE, "sliding_attention": ROPE}
    ropes = {
        kind: rope_from_hf({"rope_parameters": given[kind], **longest}, size) if kind in given else own[kind]
        for kind, size in head_sizes.items()
    }
    if any(rope.size is not None for rope in ropes.values()):
        raise SpecError(f"{config.kind}: partial_rotary_factor is modelled for rope_type 'proportional' only")
    return ropes


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    blocks, embed = model.find("decoder.blocks"), model.find("decoder.embed")
    attentions = [block.sublayers[0].op for block in blocks]
    first, ffn = attentions[0], blocks[0].sublayers[1].op
    kinds = {one.window is not None: one for one in reversed(attentions)}
    local, large = kinds.get(True) or kinds[False], kinds.get(False) or kinds[True]
    layered = isinstance(embed, LayeredEmbed)
    return {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "hidden_size": model.dim,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": first.heads,
        "num_key_value_heads": local.kv_heads,
        "head_dim": local.head_size,
        "per_layer_config": {
            str(i): {"head_dim": one.head_size, "num_key_value_heads": one.kv_heads}
            for i, one in enumerate(attentions)
            if one.window is None
        },
        "intermediate_size": ffn.hidden,
        "vocab_size": embed.vocab,
        "hidden_size_per_layer_input": embed.size if layered else 0,
        "vocab_size_per_layer_input": (layered and embed.rows) or embed.vocab,
        "layer_types": ["sliding_attention" if one.window else "full_attention" for one in attentions],
        "sliding_window": local.window or 512,
        "num_kv_shared_layers": sum(one.reads is not None for one in attentions),
        "use_double_wide_mlp": blocks[-1].sublayers[1].op.hidden == 2 * ffn.hidden,
        "attention_k_eq_v": large.tied_values,
        "attention_bias": first.bias,
        "attention_dropout": first.dropout,
        "hidden_activation": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        "rms_norm_eps": model.find("decoder.norm.eps"),
        "final_logit_softcapping": model.find("head.softcap") if model.head else None,
        "tie_word_embeddings": model.tied,
        "rope_parameters": {
            kind: rope_to_hf(one.position, one.head_size)["rope_parameters"]
            for kind, one in (("full_attention", large), ("sliding_attention", local))
        },
    }


HF = {
    "Gemma4ForCausalLM": from_hf,
    "Gemma4ForConditionalGeneration": of_text(
        from_hf, "audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id", "eoa_token_index",
        "eoi_token_id", "image_token_id", "video_token_id", "vision_soft_tokens_per_image",
    ),
    "Gemma4TextModel": without_head(from_hf),
}  # fmt: skip
