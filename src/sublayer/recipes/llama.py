"""The Llama line: Llama 1, 2 and 3 (arXiv 2302.13971, 2307.09288, 2407.21783), Mistral (2310.06825), Qwen2
(2407.10671) and Qwen3 (2505.09388), SmolLM to SmolLM3, TinyLlama (2401.02385).

A pre-norm decoder with RMSNorm, rotary positions, SwiGLU and no biases; later ones share keys among query heads.
Mistral adds a sliding window, Qwen2 biases on q, k and v, Qwen3 a norm of each head's queries and keys; SmolLM3 leaves
every fourth layer without positions (2501.18795): other numbers, the same architecture.

>>> llama(4096, 32, 32, 32, hidden=11008, vocab=32000).parameters()
6738415616
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Row, rows
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.norm import RMSNorm
from ..nn.rope import Llama3, Rope, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm, repeat
from .config import Config, without_head, written

ROPE = Rope(theta=10000.0)
LLAMA3_ROPE = Rope(theta=500000.0)
LLAMA32_ROPE = Rope(theta=500000.0, scaling=Llama3(32.0, 1.0, 4.0, 8192))
QWEN3: dict[str, Any] = {"kv_heads": 8, "head_size": 128, "vocab": 151936, "rope": Rope(theta=1000000.0),
                         "qk_norm": True, "eps": 1e-6}  # fmt: skip


def llama(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    rope: Rope = ROPE,
    *,
    head_size: int | None = None,
    window: int | tuple[int | None, ...] | None = None,
    unrotated: tuple[int, ...] = (),
    qkv_bias: bool = False,
    out_bias: bool = False,
    ffn_bias: bool = False,
    qk_norm: bool = False,
    activation: Activation = "silu",
    eps: float = 1e-5,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; a window may be one number or one for each layer. unrotated: layers, from 0, whose queries and
    keys know no positions.

    The papers publish no initialisation: new models begin as GPT-2's do, 0.02 with residual outputs divided by the
    square root of their number.
    """
    norm = RMSNorm(eps)
    windows = window if isinstance(window, tuple) else (window,) * layers
    ffn = FeedForward(hidden, activation, gated=True, bias=ffn_bias)

    def block(window: int | None, rope: Rope | None) -> Block:
        attention = Attention(
            heads, kv_heads, head_size, window=window, position=rope, qk_norm=norm if qk_norm else None,
            bias=qkv_bias, out_bias=None if out_bias == qkv_bias else out_bias, dropout=dropout,
        )  # fmt: skip
        return Block((pre_norm("attn", attention, norm), pre_norm("ffn", ffn, norm)))

    if len(windows) != layers:
        raise SpecError(f"llama: window={window} gives {len(windows)} windows for {layers} layers")
    if not all(0 <= layer < layers for layer in unrotated):
        raise SpecError(f"llama: unrotated={unrotated} names no layers from 0 to {layers - 1}")
    kinds = [(window, None if layer in unrotated else rope) for layer, window in enumerate(windows)]
    blocks = repeat(block(*kinds[0]), layers) if len(set(kinds)) == 1 else tuple(block(*kind) for kind in kinds)
    return Model(dim, decoder=Trunk(Embed(vocab), blocks, norm), tied=tied, init=Init(0.02, residual="depth"))


SIZES: dict[str, dict[str, Any]] = {
    "llama2-7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 32, "hidden": 11008, "vocab": 32000},
    "llama2-13b": {"dim": 5120, "layers": 40, "heads": 40, "kv_heads": 40, "hidden": 13824, "vocab": 32000},
    "llama2-70b": {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 32000},
    "llama3-8b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256,
                  "rope": LLAMA3_ROPE},
    "llama3-70b": {"dim": 8192, "layers": 80, "heads": 64, "kv_heads": 8, "hidden": 28672, "vocab": 128256,
                   "rope": LLAMA3_ROPE},
    "llama3.1-405b": {"dim": 16384, "layers": 126, "heads": 128, "kv_heads": 8, "hidden": 53248, "vocab": 128256,
                      "rope": Rope(theta=500000.0, scaling=Llama3(8.0, 1.0, 4.0, 8192))},
    "llama3.2-1b": {"dim": 2048, "layers": 16, "heads": 32, "kv_heads": 8, "hidden": 8192, "vocab": 128256,
                    "rope": LLAMA32_ROPE, "tied": True},
    "tinyllama-1.1b": {"dim": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "hidden": 5632, "vocab": 32000},
    "smollm2-135m": {"dim": 576, "layers": 30, "heads": 9, "kv_heads": 3, "hidden": 1536, "vocab": 49152,
                     "rope": Rope(theta=100000.0), "tied": True},
    "smollm3-3b": {"dim": 2048, "layers": 36, "heads": 16, "kv_heads": 4, "hidden": 11008, "vocab": 128256,
                   "rope": Rope(theta=5e6), "unrotated": tuple(range(3, 36, 4)), "eps": 1e-6, "tied": True},
    "mistral-7b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 32000,
                   "window": 4096},
    "qwen2.5-0.5b": {"dim": 896, "layers": 24, "heads": 14, "kv_heads": 2, "hidden": 4864, "vocab": 151936,
                     "rope": Rope(theta=1000000.0), "qkv_bias": True, "eps": 1e-6, "tied": True},
    "qwen3-0.6b": QWEN3 | {"dim": 1024, "layers": 28, "heads": 16, "hidden": 3072, "tied": True},
    "qwen3-1.7b": QWEN3 | {"dim": 2048, "layers": 28, "heads": 16, "hidden": 6144, "tied": True},
    "qwen3-4b": QWEN3 | {"dim": 2560, "layers": 36, "heads": 32, "hidden": 9728, "tied": True},
    "qwen3-8b": QWEN3 | {"dim": 4096, "layers": 36, "heads": 32, "hidden": 12288},
    "qwen3-14b": QWEN3 | {"dim": 5120, "layers": 40, "heads": 40, "hidden": 17408},
    "qwen3-32b": QWEN3 | {"dim": 5120, "layers": 64, "heads": 64, "hidden": 25600},
}  # fmt: skip
TINY: dict[str, Any] = {"dim": 32, "layers": 2, "heads": 4, "kv_heads": 2, "hidden": 48, "vocab": 97}
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [
    Row("model.embed_tokens.weight", "decoder.embed.tokens.weight"),
    *rows(
        [
            ("model.layers.{}.input_layernorm", "decoder.blocks.{}.attn.pre"),
            ("model.layers.{}.self_attn.q_proj", "decoder.blocks.{}.attn.op.q"),
            ("model.layers.{}.self_attn.k_proj", "decoder.blocks.{}.attn.op.k"),
            ("model.layers.{}.self_attn.v_proj", "decoder.blocks.{}.attn.op.v"),
            ("model.layers.{}.self_attn.o_proj", "decoder.blocks.{}.attn.op.out"),
            ("model.layers.{}.self_attn.q_norm", "decoder.blocks.{}.attn.op.q_norm"),
            ("model.layers.{}.self_attn.k_norm", "decoder.blocks.{}.attn.op.k_norm"),
            ("model.layers.{}.post_attention_layernorm", "decoder.blocks.{}.ffn.pre"),
            ("model.layers.{}.mlp.gate_proj", "decoder.blocks.{}.ffn.op.gate"),
            ("model.layers.{}.mlp.up_proj", "decoder.blocks.{}.ffn.op.up"),
            ("model.layers.{}.mlp.down_proj", "decoder.blocks.{}.ffn.op.down"),
            ("model.norm", "decoder.norm"),
        ]
    ),
    Row("lm_head.weight", "head.weight"),
]
PREFIX = "model."
IGNORED = ("model.layers.{}.self_attn.rotary_emb.inv_freq",)  # computed from the config


def _read(
    config: Config,
    kv_heads: int | None,
    head_dim: int | None = None,
    *,
    theta: float = 1e4,
    tied: bool = False,
    **family: Any,
) -> Model:
    """What the line's config.json files share; each family adds its own keys. kv_heads, head_dim, theta, tied: where
    the file names none."""
    own = config.decoder(1e-6, kv_heads, tied=tied)
    head_size = config.count("head_dim", head_dim or own["dim"] // own["heads"])
    model = llama(
        **own,
        hidden=config.count("intermediate_size"),
        rope=config.rope(head_size, config.values | {"rope_theta": config("rope_theta", theta)}),
        head_size=None if head_size * own["heads"] == own["dim"] else head_size,
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
        **family,
    )
    config.done("is_llama_config", "max_sequence_length")
    return model


def llama_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a LlamaForCausalLM's config.json (SmolLM, TinyLlama). Raises SpecError for what is not modelled."""
    config = Config(values)
    config.fix("rope_interleaved", False)  # SmolLM's
    bias = config("attention_bias", False)
    return _read(config, None, qkv_bias=bias, out_bias=bias, ffn_bias=config("mlp_bias", False))


def mistral_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a MistralForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    return _read(config, 8, window=_window(config))


def qwen2_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen2ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    config.fix("use_mrope", False)  # Qwen2.5's
    return _read(config, 32, qkv_bias=True, window=_windows(config))


def qwen3_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a Qwen3ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    bias = config("attention_bias", False)
    return _read(config, 32, 128, qk_norm=True, qkv_bias=bias, out_bias=bias, window=_windows(config))


def smollm3_from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a SmolLM3ForCausalLM's config.json. Raises SpecError for what is not modelled."""
    config = Config(values)
    layers, every = config.layers("num_hidden_layers"), config.count("no_rope_layer_interval", 4)
    rotated = config("no_rope_layers", [(layer + 1) % every != 0 for layer in range(layers)])  # 1 where there is RoPE
    if not isinstance(rotated, list) or len(rotated) != layers or any(one not in (0, 1) for one in rotated):
        raise SpecError(f"{config.kind}: no_rope_layers does not say 0 or 1 for each of {layers} layers")
    window = config.count("sliding_window", None) if config("use_sliding_window", False) else None
    config.used |= {"sliding_window", "max_window_layers"}  # which stand there unused
    local = config.local_layers([not one for one in rotated])
    bias = config("attention_bias", False)
    return _read(
        config, 4, theta=2e6, tied=True, qkv_bias=bias, out_bias=bias, ffn_bias=config("mlp_bias", False),
        unrotated=tuple(layer for layer, one in enumerate(rotated) if not one),
        window=tuple(window if one else None for one in local) if window else None,
    )  # fmt: skip


def _windows(config: Config) -> tuple[int | None, ...] | None:
    """Qwen's: a window in some layers, where it is used at all."""
    layers = config.layers("num_hidden_layers")
    window = _window(config)
    window = window if config("use_sliding_window", False) else None  # published files name one that is not used
    full = config.count("max_window_layers", 28, least=0)  # the first layers attend fully
    local = config.local_layers([i >= full for i in range(layers)])
    windows = tuple(window if one else None for one in local)
    return windows if set(windows) != {None} else None


def _window(config: Config) -> int | None:
    """4,096 where the file does not say, none where it says null."""
    return config.count("sliding_window", None if "sliding_window" in config.values else 4096)


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this line; the caller checks that it reads back as the same spec."""
    attentions = [block.sublayers[0].op for block in model.find("decoder.blocks")]
    attention, ffn = (
        next((one for one in attentions if one.position), attentions[0]),
        model.find("decoder.blocks.0.ffn.op"),
    )
    windows = [one.window for one in attentions]
    head_size = attention.head_size or model.dim // attention.heads
    config: dict[str, Any] = {
        **written(model, attention),
        "head_dim": head_size,
        "intermediate_size": ffn.hidden,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[ffn.activation],
        **rope_to_hf(attention.position, head_size),
    }
    sliding = {
        "use_sliding_window": any(windows),
        "sliding_window": max(filter(None, windows), default=None),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in windows],
    }
    if any(one.position is None for one in attentions):
        family = {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "pad_token_id": None}
        rotated = [int(one.position is not None) for one in attentions]
        return family | config | sliding | {"no_rope_layers": rotated, "attention_bias": attention.bias,
                                            "mlp_bias": ffn.bias}  # fmt: skip
    if attention.qk_norm:
        family = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
        return family | config | sliding | {"attention_bias": attention.bias}
    if attention.bias and attention.out_bias is False:
        return {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | config | sliding
    if any(windows):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": windows[0]} | config
    family = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    return family | config | {"attention_bias": attention.bias, "mlp_bias": ffn.bias}


ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",  # the later name of one function is the one that is written
}
HF = {
    "LlamaForCausalLM": llama_from_hf,
    "MistralForCausalLM": mistral_from_hf,
    "Qwen2ForCausalLM": qwen2_from_hf,
    "Qwen3ForCausalLM": qwen3_from_hf,
    "SmolLM3ForCausalLM": smollm3_from_hf,
    "LlamaModel": without_head(llama_from_hf),
    "MistralModel": without_head(mistral_from_hf),
    "Qwen2Model": without_head(qwen2_from_hf),
    "Qwen3Model": without_head(qwen3_from_hf),
    "SmolLM3Model": without_head(smollm3_from_hf),
}
