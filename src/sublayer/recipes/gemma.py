"""Gemma 1, 2 and 3, text (arXiv 2403.08295, 2408.00118, 2503.19786), and EmbeddingGemma (2509.20354).

A decoder whose norms store their distance from 1, with embeddings times sqrt(D), tanh-GELU gates and a tied head.
Gemma 2 norms each branch before and after, caps scores and logits softly, and sees a window only in every other layer.
Gemma 3 norms queries and keys in place of the caps; five local layers, with a RoPE of their own, go to each global one.
EmbeddingGemma is Gemma 3 that sees both ways; it answers hidden vectors. Of checkpoints that see images too, the parts
for that are left unread.

>>> gemma(2048, 18, 8, 1, 16384, vocab=256000).parameters()
2506172416
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.head import Head
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.rope import Linear, Rope, rope_to_hf
from ..nn.sublayer import Block, Model, Sublayer, Trunk
from .config import Config, of_text, without_head

ROPE = Rope(theta=10000.0)
GLOBAL_ROPE = Rope(theta=1e6)
STRETCHED_ROPE = Rope(theta=1e6, scaling=Linear(8.0))


def gemma(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int = 262144,
    rope: Rope = ROPE,
    *,
    head_size: int = 256,
    sandwich: bool = False,
    qk_norm: bool = False,
    window: int | None = None,
    local: tuple[bool, ...] = (),
    local_rope: Rope | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    logit_cap: float | None = None,
    causal: bool = True,
    bias: bool = False,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-6,
    dropout: float = 0.0,
    tied: bool = True,
) -> Model:
    """The architecture; local says which layers see only `window` tokens, with local_rope in place of rope (None: the
    same). sandwich: a norm after each branch too. scale, softcap: of scores. Without causal it is an encoder.

    The papers publish no initialisation: new models begin as transformers' do, 0.02 everywhere.
    """
    norm = RMSNorm(eps, plus_one=True)
    post = norm if sandwich else None
    ffn = Sublayer("ffn", FeedForward(hidden, activation, gated=True), pre=norm, post=post)

    def block(local: bool) -> Block:
        attention = Attention(
            heads, kv_heads, head_size, causal=causal, window=window if local else None,
            position=local_rope if local and local_rope else rope, qk_norm=norm if qk_norm else None,
            softcap=softcap, scale=scale, bias=bias, dropout=dropout,
        )  # fmt: skip
        return Block((Sublayer("attn", attention, pre=norm, post=post), ffn))

    local = local or (False,) * layers
    if len(local) != layers:
        raise SpecError(f"gemma: local says of {len(local)} layers whether they are, and there are {layers}")
    if any(local) and window is None:
        raise SpecError("gemma: local layers need a window")
    kinds = {kind: block(kind) for kind in set(local)}
    trunk = Trunk(Embed(vocab, scale=dim**0.5), tuple(kinds[kind] for kind in local), norm)
    if not causal:
        return Model(dim, encoder=trunk, head=None, init=Init(0.02))
    return Model(dim, decoder=trunk, head=Head(softcap=logit_cap), tied=tied, init=Init(0.02))


def every(period: int, layers: int) -> tuple[bool, ...]:
    """Local layers, but for every period-th."""
    return tuple(i % period != 0 for i in range(1, layers + 1))


def _gemma2(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    own = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden, "vocab": 256000}
    caps = {"sandwich": True, "softcap": 50.0, "logit_cap": 30.0}
    return own | caps | {"window": 4096, "local": every(2, layers)} | more


def _gemma3(dim: int, layers: int, heads: int, kv_heads: int, hidden: int, **more: Any) -> dict[str, Any]:
    own = {"dim": dim, "layers": layers, "heads": heads, "kv_heads": kv_heads, "hidden": hidden}
    norms = {"sandwich": True, "qk_norm": True}
    ropes = {"rope": GLOBAL_ROPE, "local_rope": ROPE}
    return own | norms | ropes | {"window": 1024, "local": every(6, layers)} | more


SIZES: dict[str, dict[str, Any]] = {
    "gemma-2b": {"dim": 2048, "layers": 18, "heads": 8, "kv_heads": 1, "hidden": 16384, "vocab": 256000},
    "gemma-7b": {"dim": 3072, "layers": 28, "heads": 16, "kv_heads": 16, "hidden": 24576, "vocab": 256000},
    "gemma2-2b": _gemma2(2304, 26, 8, 4, 9216),
    "gemma2-9b": _gemma2(3584, 42, 16, 8, 14336),
    "gemma2-27b": _gemma2(4608, 46, 32, 16, 36864, head_size=128, scale=144**-0.5),
    "gemma3-270m": _gemma3(640, 18, 4, 1, 2048, window=512),
    "gemma3-1b": _gemma3(1152, 26, 4, 1, 6912, window=512),
    "gemma3-4b": _gemma3(2560, 34, 8, 4, 10240, vocab=262208, rope=STRETCHED_ROPE),
    "gemma3-12b": _gemma3(3840, 48, 16, 8, 15360, vocab=262208, rope=STRETCHED_ROPE),
    "gemma3-27b": _gemma3(5376, 62, 32, 16, 21504, vocab=262208, rope=STRETCHED_ROPE, head_size=128, scale=168**-0.5),
    "embeddinggemma-300m": _gemma3(768, 24, 3, 1, 1152, window=257, causal=False),
}
TINY: dict[str, Any] = {
    "dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 97, "head_size": 8, "sandwich": True,
    "qk_norm": True, "window": 5, "local": (True, False), "rope": GLOBAL_ROPE, "local_rope": ROPE,
}  # fmt: skip
EXEMPT: dict[str, str] = {}


def NAMES(model: Model) -> list[Row]:
    """The checkpoint table: one name of theirs stands for two norms, by whether there is one after each branch."""
    trunk = "decoder" if model.decoder else "encoder"
    sandwich = model.find(f"{trunk}.blocks.0.ffn.post") is not None
    norms = [("post_attention_layernorm", "attn.post"), ("pre_feedforward_layernorm", "ffn.pre"),
             ("post_feedforward_layernorm", "ffn.post")]  # fmt: skip
    layer = [
        ("input_layernorm", "attn.pre"),
        *(norms if sandwich else [("post_attention_layernorm", "ffn.pre")]),
        ("self_attn.q_proj", "attn.op.q"),
        ("self_attn.k_proj", "attn.op.k"),
        ("self_attn.v_proj", "attn.op.v"),
        ("self_attn.o_proj", "attn.op.out"),
        ("self_attn.q_norm", "attn.op.q_norm"),
        ("self_attn.k_norm", "attn.op.k_norm"),
        ("mlp.gate_proj", "ffn.op.gate"),
        ("mlp.up_proj", "ffn.op.up"),
        ("mlp.down_proj", "ffn.op.down"),
    ]
    return [
        Row("model.embed_tokens.weight", f"{trunk}.embed.tokens.weight"),
        *rows([(f"model.layers.{{}}.{theirs}", f"{trunk}.blocks.{{}}.{ours}") for theirs, ours in layer]),
        *rows([("model.norm", f"{trunk}.norm")]),
        Row("lm_head.weight", "head.weight"),
    ]


PREFIX = "model."
PREFIXES = ("language_model.model.", "model.language_model.")  # in checkpoints that see images too
IGNORED = (
    "model.layers.{}.self_attn.rotary_emb.inv_freq",  # computed from the config
    *(f"{root}{part}.*" for root in ("", "model.") for part in ("vision_tower", "multi_modal_projector")),
)


def _read(config: Config, activation: str, **family: Any) -> Model:
    """What the three generations' config.json files share; activation: the key that names it."""
    model = gemma(
        **config.decoder(1e-6, tied=True) | {"kv_heads": config.count("num_key_value_heads")},
        hidden=config.count("intermediate_size"),
        head_size=config.count("head_dim", 256),
        bias=config("attention_bias", False),
        activation=config.choose(activation, ACTIVATIONS, "gelu_pytorch_tanh"),
        **family,
    )
    config.done("cache_implementation")
    return model


def gemma_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a GemmaForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    exact = values.get("hidden_act") == "gelu"  # the first published files' word, which means the approximation
    config = Config(dict(values) | {"hidden_act": "gelu_pytorch_tanh"} if exact else values)
    config.fix("use_bidirectional_attention", False)
    config.fix("hidden_activation", "gelu_pytorch_tanh")  # beside hidden_act="gelu"
    return _read(config, "hidden_act", rope=_rope(config, config.values))


def gemma2_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Gemma2ForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    config.fix("use_bidirectional_attention", False)
    config.fix("hidden_act", "gelu_pytorch_tanh")  # beside hidden_activation in published files
    config.fix("sliding_window_size", _window(config))  # beside sliding_window
    return _read(
        config, "hidden_activation", rope=_rope(config, config.values), sandwich=True, window=_window(config),
        local=_local(config, 2), scale=_scale(config), softcap=config.given("attn_logit_softcapping", 50.0),
        logit_cap=config.given("final_logit_softcapping", 30.0),
    )  # fmt: skip


def gemma3_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Gemma3ForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    Config(values).fix("use_bidirectional_attention", False)
    return _gemma3_from_hf(values)


def _gemma3_from_hf(values: Mapping[str, Any]) -> Model:
    config = Config(values)
    config.fix("attn_logit_softcapping")  # their class takes one and does not apply it
    causal = not config("use_bidirectional_attention", False)
    window = _window(config) if causal else _window(config) // 2 + 1  # theirs counts both sides
    period = config.count("sliding_window_pattern", config.count("_sliding_window_pattern", 6))
    return _read(
        config, "hidden_activation", **_ropes(config), sandwich=True, qk_norm=True, causal=causal, window=window,
        local=_local(config, period), scale=_scale(config), logit_cap=config.given("final_logit_softcapping", None),
    )  # fmt: skip


def _of_text(values: Mapping[str, Any]) -> Model:
    """Of Gemma3ForConditionalGeneration: what the text_config of published files leaves to its class is said here."""
    Config(values).fix("final_logit_softcapping")  # their class takes one and does not apply it
    return gemma3_from_hf({"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 262208} | dict(values))


def _window(config: Config) -> int:
    return config.count("sliding_window", 4096)


def _local(config: Config, period: int) -> tuple[bool, ...]:
    return config.local_layers(every(period, config.layers("num_hidden_layers")))


def _scale(config: Config) -> float | None:
    scalar = config.number("query_pre_attn_scalar", 256)
    return None if scalar == config.count("head_dim", 256) else scalar**-0.5


def _ropes(config: Config) -> dict[str, Rope]:
    """Those of global and of local layers; before transformers 5, each had its own keys."""
    kinds = {
        "full_attention": ("rope_theta", 1e6, config.table("rope_scaling")),
        "sliding_attention": ("rope_local_base_freq", 1e4, {}),
    }
    given = config.table("rope_parameters")
    if given.keys() - kinds.keys() or not all(isinstance(one, dict) for one in given.values()):
        raise SpecError(f"{config.kind}: rope_parameters holds more than the tables of {' and '.join(kinds)}")
    ropes = [
        _rope(config, {"rope_theta": config(key, theta), "rope_scaling": older, "rope_parameters": given.get(kind)})
        for kind, (key, theta, older) in kinds.items()
    ]
    return {"rope": ropes[0], "local_rope": ropes[1]}


def _rope(config: Config, values: Mapping[str, Any]) -> Rope:
    longest = {"max_position_embeddings": config.count("max_position_embeddings", 8192)}
    return config.rope(config.count("head_dim", 256), {**values, **longest})


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    blocks = model.find("decoder.blocks" if model.decoder else "encoder.blocks")
    attentions = [block.sublayers[0].op for block in blocks]
    kinds = {attention.window is not None: attention for attention in attentions}
    attention, local = kinds.get(False) or kinds[True], kinds.get(True) or kinds[False]
    first, second = blocks[0].sublayers
    activation = {ours: theirs for theirs, ours in ACTIVATIONS.items()}[second.op.activation]
    rope = rope_to_hf(attention.position, attention.head_size)
    config = {
        "hidden_size": model.dim,
        "num_hidden_layers": len(blocks),
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "head_dim": attention.head_size,
        "intermediate_size": second.op.hidden,
        "vocab_size": model.vocab,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
        "rms_norm_eps": first.pre.eps,
    }
    if attention.causal:
        config["tie_word_embeddings"] = model.tied
    if first.post is None:
        return {"architectures": ["GemmaForCausalLM"], "model_type": "gemma", "hidden_act": activation} | config | rope
    window = local.window or 4096
    config |= {
        "hidden_activation": activation,
        "query_pre_attn_scalar": round((attention.scale or attention.head_size**-0.5) ** -2),
        "layer_types": ["sliding_attention" if one.window else "full_attention" for one in attentions],
        "sliding_window": window if attention.causal else 2 * (window - 1),
        "attn_logit_softcapping": attention.softcap,
    }
    if attention.causal:
        config["final_logit_softcapping"] = model.find("head.softcap") if model.head else None
    if not attention.qk_norm:
        return {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"} | config | rope
    local_rope = rope_to_hf(local.position, attention.head_size)
    both = {"full_attention": rope["rope_parameters"], "sliding_attention": local_rope["rope_parameters"]}
    return config | {
        "architectures": ["Gemma3ForCausalLM" if attention.causal else "Gemma3TextModel"],
        "model_type": "gemma3_text",
        "use_bidirectional_attention": not attention.causal,
        "rope_parameters": both,
    }


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",  # the later name of one function is the one that is written
    "relu": "relu",
    "silu": "silu",
}
HF = {
    "GemmaForCausalLM": gemma_from_hf,
    "Gemma2ForCausalLM": gemma2_from_hf,
    "Gemma3ForCausalLM": gemma3_from_hf,
    "Gemma3ForConditionalGeneration": of_text(
        _of_text, "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"
    ),
    "GemmaModel": without_head(gemma_from_hf),
    "Gemma2Model": without_head(gemma2_from_hf),
    "Gemma3TextModel": without_head(_gemma3_from_hf),
}
