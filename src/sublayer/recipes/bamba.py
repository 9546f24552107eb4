"""Bamba (IBM, Princeton, CMU, UIUC 2024): Mamba-2 with a few attention layers, https://huggingface.co/blog/bamba.

Every block is a mixer and a SwiGLU layer, pre-norm, as in Llama; the mixer is Mamba-2 but in a few layers, where it is
grouped-query attention with rotary positions in half of each head. So only those few keep keys and values.

>>> bamba(4096, 32, 32, 8, 14336, 128256, attention_layers=(9, 18, 27), mamba_heads=128).parameters()
9780235392
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SpecError
from ..names import Row
from ..nn.attention import Attention
from ..nn.embed import Embed
from ..nn.feed_forward import Activation, FeedForward
from ..nn.initialise import Init
from ..nn.mamba import Mamba2
from ..nn.norm import RMSNorm
from ..nn.rope import Rope, rope_from_hf, rope_to_hf
from ..nn.sublayer import Block, Model, Trunk, pre_norm
from .config import Config, without_head
from .jamba import SHARED_NAMES
from .mamba import ACTIVATIONS, whole
from .mamba import check_hf as check_hf
from .mamba2 import mixer_rows, no_step_limit


def bamba(
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    rope: Rope | None = None,
    *,
    attention_layers: tuple[int, ...],
    mamba_heads: int,
    mamba_head_size: int | None = None,
    state_size: int = 128,
    groups: int = 1,
    kernel: int = 4,
    mamba_bias: bool = False,
    conv_bias: bool = True,
    attention_bias: bool = False,
    ffn_bias: bool = False,
    activation: Activation = "silu",
    eps: float = 1e-5,
    dropout: float = 0.0,
    tied: bool = False,
) -> Model:
    """The architecture; rope None turns half of each head, mamba_head_size None is 2 · dim / mamba_heads.

    Matrices begin at 0.02, the scans as Mamba-2's.
    """
    norm = RMSNorm(eps)
    rope = Rope(10000.0, dim // heads // 2) if rope is None else rope
    mamba = Mamba2(
        mamba_heads, mamba_head_size or 2 * dim // mamba_heads, state_size, groups, kernel, mamba_bias, conv_bias,
        activation, norm=RMSNorm(eps, groups=groups),
    )  # fmt: skip
    attention = Attention(heads, kv_heads, position=rope, bias=attention_bias, dropout=dropout)
    ffn = pre_norm("ffn", FeedForward(hidden, activation, gated=True, bias=ffn_bias), norm)
    if not all(0 <= layer < layers for layer in attention_layers):
        raise SpecError(f"bamba: attention_layers={attention_layers} names no layers from 0 to {layers - 1}")
    scans, attends = Block((pre_norm("mamba", mamba, norm), ffn)), Block((pre_norm("attn", attention, norm), ffn))
    blocks = tuple(attends if layer in attention_layers else scans for layer in range(layers))
    return Model(dim, decoder=Trunk(Embed(vocab), blocks, norm), tied=tied, init=Init(0.02))


SIZES: dict[str, dict[str, Any]] = {
    "bamba-9b": {"dim": 4096, "layers": 32, "heads": 32, "kv_heads": 8, "hidden": 14336, "vocab": 128256,
                 "attention_layers": (9, 18, 27), "mamba_heads": 128},
}  # fmt: skip
TINY: dict[str, Any] = {
    "dim": 32, "layers": 3, "heads": 4, "kv_heads": 2, "hidden": 24, "vocab": 61, "attention_layers": (1,),
    "mamba_heads": 4, "mamba_head_size": 8, "state_size": 5, "groups": 2,
}  # fmt: skip
EXEMPT: dict[str, str] = {}

NAMES: list[Row] = [*SHARED_NAMES, *mixer_rows("model.layers.{}.mamba", "decoder.blocks.{}.mamba.op")]
PREFIX = "model."
IGNORED = ("model.rotary_emb.inv_freq",)  # computed from the config


def from_hf(values: Mapping[str, Any]) -> Model:
    """The spec of a BambaForCausalLM's config.json. Raises SpecError for a key or value that is not modelled."""
    config = Config(values)
    own, mamba_heads = config.decoder(1e-5, 8), config.count("mamba_n_heads", 128)
    dim, head_dim = own["dim"], own["dim"] // own["heads"]
    inner = config.number("mamba_expand", 2) * dim
    automatic = config("mamba_d_head", "auto") == "auto"
    head_size = int(inner // mamba_heads) if automatic else config.count("mamba_d_head")
    if mamba_heads * head_size != inner:
        raise SpecError(f"bamba: mamba_n_heads={mamba_heads} of mamba_d_head={head_size} are not mamba_expand · {dim}")
    no_step_limit(config)
    config.fix("z_loss_coefficient", 0.0)
    config.fix("attn_rotary_emb", head_dim // 2)  # older files'; their class reads it no more
    rotary = {"partial_rotary_factor": 0.5, "rope_theta": config("rope_theta", 10000.0)} | {
        key: config.table(key) for key in ("rope_parameters", "rope_scaling")
    }
    model = bamba(
        **own,
        hidden=config.count("intermediate_size"),
        rope=rope_from_hf(rotary | {"max_position_embeddings": config("max_position_embeddings", 262144)}, head_dim),
        attention_layers=tuple(sorted(config.layers_of("attn_layer_indices"))),
        mamba_heads=mamba_heads,
        mamba_head_size=head_size,
        state_size=config.count("mamba_d_state", 256),
        groups=config.count("mamba_n_groups", 1),
        kernel=config.count("mamba_d_conv", 4),
        mamba_bias=config("mamba_proj_bias", False),
        conv_bias=config("mamba_conv_bias", True),
        attention_bias=config("attention_bias", False),
        ffn_bias=config("mlp_bias", False),
        activation=config.choose("hidden_act", ACTIVATIONS, "silu"),
    )
    config.done("mamba_chunk_size", "num_logits_to_keep")
    return model


def to_hf(model: Model) -> dict[str, Any]:
    """The config.json of a spec of this family; the caller checks that it reads back as the same spec."""
    mixers = [block.sublayers[0].op for block in model.find("decoder.blocks")]
    mamba, *_ = [mixer for mixer in mixers if isinstance(mixer, Mamba2)]
    attention = next((mixer for mixer in mixers if isinstance(mixer, Attention)), None)
    ffn = model.find("decoder.blocks.0.ffn.op")
    config: dict[str, Any] = {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "hidden_size": model.dim,
        "num_hidden_layers": len(mixers),
        "intermediate_size": ffn.hidden,
        "vocab_size": model.vocab,
        "attn_layer_indices": [layer for layer, mixer in enumerate(mixers) if isinstance(mixer, Attention)],
        "mamba_n_heads": mamba.heads,
        "mamba_d_head": mamba.head_size,
        "mamba_expand": whole(mamba.heads * mamba.head_size / model.dim),
        "mamba_d_state": mamba.state_size,
        "mamba_n_groups": mamba.groups,
        "mamba_d_conv": mamba.kernel,
        "mamba_proj_bias": mamba.bias,
        "mamba_conv_bias": mamba.conv_bias,
        "mlp_bias": ffn.bias,
        "hidden_act": {ours: theirs for theirs, ours in ACTIVATIONS.items()}[mamba.activation],
        "rms_norm_eps": model.find("decoder.norm.eps"),
        "tie_word_embeddings": model.tied,
    }
    if attention is None or not isinstance(attention.position, Rope):
        return config | {"num_attention_heads": 1, "num_key_value_heads": 1}
    rotary = rope_to_hf(attention.position, model.dim // attention.heads)
    rotary["rope_parameters"].setdefault("partial_rotary_factor", 1.0)  # left out, it would be a half
    return config | rotary | {
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.kv_heads,
        "attention_bias": attention.bias,
        "attention_dropout": attention.dropout,
    }  # fmt: skip


HF = {"BambaForCausalLM": from_hf, "BambaModel": without_head(from_hf)}
