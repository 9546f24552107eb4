"""GGUF files that another hand wrote, of every architecture, give the function of the model they were made from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MambaConfig,
    MixtralConfig,
    ModernBertConfig,
    ModernBertModel,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    T5Config,
    T5ForConditionalGeneration,
)

import sublayer
from tests.llama_cpp import LlamaCpp
from tests.oracle import close, compare, oracle, raised, saved
from tests.weights.gguf_writer import write

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(4))
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.25, 1.5, 2.0],
            "long_factor": [1.0, 3.0, 4.5, 8.0], "original_max_position_embeddings": 8}  # fmt: skip
ENCODER: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
_MAMBA: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "state_size": 4, "num_hidden_layers": 2,
                          "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama with biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama 3": (LlamaConfig, {"rope_parameters": LLAMA3, "hidden_size": 64, "num_attention_heads": 2}),
    "llama, linear": (LlamaConfig, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "smollm3": (SmolLM3Config, {}),
    "mixtral": (MixtralConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen2, yarn": (Qwen2Config, {"rope_parameters": YARN}),
    "qwen3, yarn with a factor": (Qwen3Config, {"head_dim": 16, "rope_parameters": YARN | {"attention_factor": 0.8}}),
    "qwen3": (Qwen3Config, {"head_dim": 16}),
    "qwen3moe": (Qwen3MoeConfig, {"norm_topk_prob": True}),
    "olmo2": (Olmo2Config, {}),
    "phi3": (Phi3Config, {"sliding_window": None}),
    "phi3 with a window": (Phi3Config, {"sliding_window": 5}),
    "phi3, longrope": (Phi3Config, {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8,
                                    "max_position_embeddings": 32}),
    "gemma": (GemmaConfig, {}),
    "gemma2": (Gemma2Config, {"query_pre_attn_scalar": 8}),
    "gemma3": (Gemma3TextConfig, {"query_pre_attn_scalar": 8, "num_hidden_layers": 7}),
    "gpt2": (GPT2Config, {}),
    "gpt2, untied": (GPT2Config, {"tie_word_embeddings": False}),
    "gptneox": (GPTNeoXConfig, {}),
    "gptneox in turn": (GPTNeoXConfig, {"use_parallel_residual": False}),
    "gpt-oss": (GptOssConfig, {}),
    "mamba": (MambaConfig, _MAMBA),
    "mamba2": (Mamba2Config, _MAMBA | {"num_heads": 8, "head_dim": 8, "n_groups": 2}),
    "jamba": (JambaConfig, {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
                            "num_attention_heads": 4, "num_key_value_heads": 2, "attn_layer_period": 4,
                            "attn_layer_offset": 2, "num_experts": 4, "mamba_d_state": 4, "mamba_dt_rank": 6,
                            "use_mamba_kernels": False, "pad_token_id": 0}),
    "deepseek2 (V2)": (DeepseekV2Config, {"topk_method": "group_limited_greedy"}),
    "deepseek2 (V3)": (DeepseekV3Config, {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_an_architecture_is_read_as_what_it_was_written_from(name: str, tmp_path: Path) -> None:
    """Logits, loss and the gradient of every parameter, in fp64."""
    family, changes = CASES[name]
    theirs = oracle(family, **changes)
    path = write(saved(theirs, tmp_path), tmp_path / "x.gguf")
    compare(theirs, sublayer.load(path, dtype=torch.float64), tmp_path, IDS)


# Where llama.cpp looks tanh-GELU up in a table of 16-bit numbers, has no exact GELU (gptneox), or rounds the ends of
# YaRN's ramp, which the published model does not (gpt-oss).
ROUGH = {"gemma", "gemma2", "gemma3", "gpt2", "gpt2, untied", "gptneox", "gptneox in turn", "gpt-oss"}


WITHOUT_WINDOW = [one for one in CASES if one != "phi3 with a window"]


@pytest.mark.parametrize("name", WITHOUT_WINDOW)  # it sees no windows in that family
def test_llama_cpp_finds_the_same_in_the_file(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    path = write(saved(oracle(family, **changes), tmp_path), tmp_path / "x.gguf", wide=False, tokens=True)
    ids = IDS[:1].clamp(min=3)
    with torch.no_grad():
        ours = sublayer.load(path, dtype=torch.float64)(ids)[0, -1].log_softmax(-1)
    theirs = LlamaCpp(path).log_probabilities(ids[0].tolist(), 97)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-2 if name in ROUGH else 1e-5)


def test_bert_gives_vectors_without_the_pooler_that_gguf_leaves_out(tmp_path: Path) -> None:
    theirs = oracle(BertConfig, made=BertModel, **ENCODER)
    path = write(saved(theirs, tmp_path), tmp_path / "x.gguf")
    ours = sublayer.load(path, dtype=torch.float64)
    with raised():
        expected = theirs(input_ids=IDS).last_hidden_state
    close(ours(IDS), expected)


def test_modern_bert_gives_vectors(tmp_path: Path) -> None:
    """The base of its windows' rotations is the usual one, of which the files of its first converters say nothing."""
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    sizes = ENCODER | {"num_hidden_layers": 4, "local_attention": 4}
    theirs = oracle(ModernBertConfig, made=ModernBertModel, **sizes, **special)
    ours = sublayer.load(write(saved(theirs, tmp_path), tmp_path / "x.gguf"), dtype=torch.float64)
    with raised():
        expected = theirs(input_ids=IDS).last_hidden_state
    close(ours(IDS), expected)


@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
@pytest.mark.parametrize("tied", [True, False])
def test_t5_is_read_as_what_it_was_written_from(form: str, tied: bool, tmp_path: Path) -> None:
    theirs = oracle(
        T5Config, made=T5ForConditionalGeneration, vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2,
        num_decoder_layers=3, num_heads=4, feed_forward_proj=form, tie_word_embeddings=tied,
        relative_attention_num_buckets=8,
    )  # fmt: skip
    if not tied:  # as published files of version 1.1 have it; the class itself makes only tied ones
        theirs.lm_head.weight = torch.nn.Parameter(0.2 * torch.randn(97, 32, dtype=torch.float64))
    path = write(saved(theirs, tmp_path), tmp_path / "x.gguf")
    ours = sublayer.load(path, dtype=torch.float64)
    assert ours.spec.tied == tied
    compare(theirs, ours, tmp_path, IDS, source=IDS.flip(1))
