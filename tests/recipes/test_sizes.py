"""What the published sizes are beside their counts, which no count tells."""

import json
from typing import Any

import pytest
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GemmaConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JambaConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    ModernBertConfig,
    WhisperConfig,
)

from sublayer.nn.rope_scaling import Linear, Llama3, Proportional, Yarn
from sublayer.recipes import from_hf, model
from sublayer.recipes.difference import differences

# Config classes whose defaults are a published model's, and what differs: the authors' training, a later published
# file, or a class that keeps an older default.
CLASSES: dict[str, tuple[Any, str, set[str]]] = {
    "deepseek-v3": (DeepseekV3Config, "DeepseekV3ForCausalLM", {"scaling", "scale"}),  # of before it was extended
    "gemma-7b": (GemmaConfig, "GemmaForCausalLM", set()),
    "gemma2-2b": (Gemma2Config, "Gemma2ForCausalLM", set()),
    "gpt-neox-20b": (GPTNeoXConfig, "GPTNeoXForCausalLM", {"activation"}),  # the published file says gelu_fast
    "gpt-oss-120b": (GptOssConfig, "GptOssForCausalLM", {"balance_loss"}),
    "jamba-52b": (JambaConfig, "JambaForCausalLM", {"balance_loss"}),
    "llama2-7b": (LlamaConfig, "LlamaForCausalLM", {"eps"}),
    "codestral-mamba-7b": (Mamba2Config, "Mamba2ForCausalLM", set()),
    "mistral-7b": (MistralConfig, "MistralForCausalLM", {"eps"}),
    "mixtral-8x7b": (MixtralConfig, "MixtralForCausalLM", {"balance_loss"}),
    "modernbert-base": (ModernBertConfig, "ModernBertForMaskedLM", set()),
    "whisper-tiny": (WhisperConfig, "WhisperForConditionalGeneration", set()),
}


@pytest.mark.parametrize("size", CLASSES)
def test_a_size_is_what_their_class_makes_of_nothing(size: str) -> None:
    made, architecture, other = CLASSES[size]
    values = json.loads(made().to_json_string(use_diff=False)) | {"architectures": [architecture]}
    found = differences(from_hf(values)[0], model(size))
    assert {path.split(".")[-1] for path, _, _ in found} == other


ATTENTION, FFN = "decoder.blocks.{}.attn.op", "decoder.blocks.{}.ffn.op"
LOCAL, GLOBAL = ATTENTION.format(0), ATTENTION.format(5)
# From the published config.json files: {path: value}.
PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma2-9b": {"head.softcap": 30.0, f"{LOCAL}.softcap": 50.0, f"{LOCAL}.window": 4096, f"{GLOBAL}.window": None},
    "gemma2-27b": {"head.softcap": 30.0, f"{LOCAL}.softcap": 50.0, f"{LOCAL}.window": 4096, f"{LOCAL}.scale": 1 / 12},
    "gemma3-270m": {f"{LOCAL}.window": 512, f"{LOCAL}.position.theta": 1e4, f"{GLOBAL}.position.theta": 1e6},
    "gemma3-1b": {f"{LOCAL}.window": 512, f"{GLOBAL}.window": None, f"{GLOBAL}.position.scaling": None},
    "gemma3-4b": {
        f"{LOCAL}.window": 1024, f"{LOCAL}.position.theta": 1e4, f"{LOCAL}.position.scaling": None,
        f"{GLOBAL}.position.theta": 1e6, f"{GLOBAL}.position.scaling": Linear(8.0), f"{LOCAL}.softcap": None,
    },
    "gemma3-27b": {f"{LOCAL}.scale": 168**-0.5, f"{GLOBAL}.position.scaling": Linear(8.0)},
    # sliding_window=512, of which transformers makes 256 tokens either side
    "embeddinggemma-300m": {
        "encoder.blocks.0.attn.op.window": 257, "encoder.blocks.5.attn.op.window": None,
        "encoder.blocks.5.attn.op.position.theta": 1e6,
    },
    "gemma4-e2b": {f"{LOCAL}.window": 512, f"{ATTENTION.format(4)}.position.scaling": Proportional(0.25)},
    "llama3-8b": {f"{LOCAL}.position.theta": 5e5, f"{LOCAL}.position.scaling": None},
    "llama3.1-405b": {f"{LOCAL}.position.scaling": Llama3(8.0, 1.0, 4.0, 8192), f"{LOCAL}.position.theta": 5e5},
    "llama3.2-1b": {f"{LOCAL}.position.scaling": Llama3(32.0, 1.0, 4.0, 8192), f"{LOCAL}.position.theta": 5e5},
    "smollm2-135m": {f"{LOCAL}.position.theta": 1e5, "decoder.norm.eps": 1e-5},
    "tinyllama-1.1b": {f"{LOCAL}.position.theta": 1e4, "decoder.norm.eps": 1e-5},
    "qwen2.5-0.5b": {f"{LOCAL}.position.theta": 1e6, "decoder.norm.eps": 1e-6},
    "qwen3-8b": {f"{LOCAL}.position.theta": 1e6, "decoder.norm.eps": 1e-6},
    "qwen3-30b-a3b": {f"{LOCAL}.position.theta": 1e6, f"{FFN.format(0)}.router.renormalise": True},
    "qwen3-next-80b-a3b": {f"{ATTENTION.format(3)}.position.theta": 1e7, f"{FFN.format(0)}.router.active": 10},
    "olmo2-7b": {f"{LOCAL}.position.theta": 5e5, "decoder.norm.eps": 1e-6},
    "phi3-mini": {f"{LOCAL}.window": 2047, f"{LOCAL}.position.theta": 1e4},
    "phi4": {f"{LOCAL}.window": None, f"{LOCAL}.position.theta": 2.5e5},
    "mixtral-8x22b": {f"{LOCAL}.position.theta": 1e6, f"{LOCAL}.window": None},
    "deepseek-v3": {
        f"{LOCAL}.position.scaling": Yarn(40.0, 4096, mscale=1.0, mscale_all_dim=1.0),
        f"{FFN.format(3)}.router.scale": 2.5, f"{FFN.format(3)}.router.groups": 8,
        f"{FFN.format(3)}.router.active_groups": 4, f"{FFN.format(3)}.router.renormalise": True,
    },
    "deepseek-v2": {
        f"{LOCAL}.position.scaling": Yarn(40.0, 4096, mscale=0.707, mscale_all_dim=0.707),
        f"{FFN.format(1)}.router.scale": 16.0, f"{FFN.format(1)}.router.active_groups": 3,
        f"{FFN.format(1)}.router.renormalise": False,
    },
    "deepseek-v2-lite": {f"{FFN.format(1)}.router.scale": 1.0, f"{FFN.format(1)}.router.groups": 1},
    "grok-1": {  # the released code: embedding and output multipliers, scores capped
        "decoder.embed.scale": 78.38367176906169, "head.scale": 0.5773502691896257, f"{LOCAL}.softcap": 30.0,
        f"{FFN.format(0)}.router.renormalise": False,
    },
    "bamba-9b": {"decoder.blocks.9.attn.op.position.size": 64, "decoder.blocks.9.attn.op.position.theta": 1e4},
    "pythia-1b": {f"{LOCAL}.position.size": 64, f"{LOCAL}.position.theta": 1e4},
}  # fmt: skip


@pytest.mark.parametrize("size", PUBLISHED)
def test_a_size_has_the_numbers_of_its_published_file(size: str) -> None:
    spec = model(size)
    assert {path: spec.find(path) for path in PUBLISHED[size]} == PUBLISHED[size]
