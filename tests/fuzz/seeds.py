"""The real files that mutations start from, one folder each: written by transformers and the gguf package, and of the
families without a class of theirs in this form, by `save`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import (
    DeepseekV2Config,
    Gemma3TextConfig,
    GPT2Config,
    JambaConfig,
    LlamaConfig,
    MambaConfig,
    MixtralConfig,
    Phi3Config,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.utils import logging

import sublayer
from sublayer.recipes import FAMILIES, family
from tests.oracle import SMALL, oracle, saved
from tests.weights.gguf_writer import write

ONE_LAYER: dict[str, Any] = {"num_hidden_layers": 1}
LONG: dict[str, Any] = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 8,
}  # fmt: skip
JAMBA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 4,
    "mamba_dt_rank": 6, "use_mamba_kernels": False, "pad_token_id": 0,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 1, "pad_token_id": 0, "bos_token_id": 0,
    "eos_token_id": 0,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip
DEEPSEEK: dict[str, Any] = SMALL[DeepseekV2Config] | {"topk_method": "group_limited_greedy"}


def make(folder: Path) -> None:
    """folder/kind/seed/…, for each kind of file that is mutated."""
    logging.disable_progress_bar()
    llama = oracle(LlamaConfig, **ONE_LAYER).float()
    whole = folder / "safetensors"
    saved(llama, whole / "llama")
    saved(oracle(GPT2Config, n_layer=1, tie_word_embeddings=True).float(), whole / "gpt2")
    saved(oracle(MixtralConfig, **ONE_LAYER).float(), whole / "mixtral")
    saved(oracle(LlamaConfig).float(), folder / "index.json" / "llama", max_shard_size="40KB")
    models = {
        "llama": llama,
        "mixtral": oracle(MixtralConfig, **ONE_LAYER),
        "qwen2": oracle(Qwen2Config, **ONE_LAYER),
        "gemma3": oracle(Gemma3TextConfig, **ONE_LAYER, query_pre_attn_scalar=8, vocab_size=97),
        "phi3": oracle(Phi3Config, **ONE_LAYER, rope_parameters=LONG, original_max_position_embeddings=8,
                       max_position_embeddings=32, sliding_window=None),
        "jamba": oracle(JambaConfig, **JAMBA),
        "mamba": oracle(MambaConfig, **MAMBA),
        "deepseek2": oracle(DeepseekV2Config, **DEEPSEEK),
        "t5": oracle(T5Config, made=T5ForConditionalGeneration, **T5),
    }  # fmt: skip
    for name, theirs in models.items():
        described = saved(theirs, folder / "described")
        made = folder / "GGUF" / name
        made.mkdir(parents=True)
        write(described, made / "x.gguf", wide=False, tokens=name in ("llama", "qwen2"))
        if name in ("llama", "mixtral"):  # of 12 and of 13 tensors
            parts = folder / "GGUF part" / name
            parts.mkdir(parents=True)
            write(described, parts / "x.gguf", wide=False, split={"split_max_tensors": 7})
        shutil.rmtree(described)
    for name in FAMILIES:
        module = family(name)
        if module.HF:
            sublayer.save(getattr(module, name)(**module.TINY).build(), folder / "config.json" / name, layout="hf")
