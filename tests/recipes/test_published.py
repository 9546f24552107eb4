"""What was published is read: config.json files in all their spellings."""

import json
from typing import Any

import pytest
import torch
import transformers

import sublayer
from sublayer.recipes import from_hf
from tests.oracle import close, oracle, raised, saved
from tests.recipes.published import PUBLISHED, small


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_gives_a_model_of_the_published_size(name: str) -> None:
    parameters, config = PUBLISHED[name]
    spec, _ = from_hf(json.loads(json.dumps(config)))
    assert spec.parameters() == parameters


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-3.2-1B",
        "deepseek-ai/deepseek-coder-1.3b-instruct",
        "HuggingFaceTB/SmolLM3-3B",
        "mistralai/Mistral-7B-v0.1",
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "Qwen/Qwen3-Coder-30B-A3B-Instruct",
        "microsoft/Phi-4-mini-instruct",
        "google/gemma-2-9b",
        "google/gemma-3-1b-it",
        "deepseek-ai/DeepSeek-V2-Lite",
        "moonshotai/Kimi-K2-Instruct",
        "openai/gpt-oss-20b",
        "togethercomputer/RedPajama-INCITE-Base-3B-v1",
    ],
)
def test_a_small_model_of_a_published_file_answers_as_theirs(name: str, tmp_path) -> None:
    """The file as it was published, in its old spelling, stands beside the weights; the text is longer than windows."""
    config = small(PUBLISHED[name][1])
    made: Any = getattr(transformers, config["architectures"][0])
    theirs = oracle(made.config_class, made=made, **json.loads(json.dumps(config)))
    (saved(theirs, tmp_path) / "config.json").write_text(json.dumps(config))
    ours = sublayer.load(tmp_path, dtype=torch.float64)
    ids = torch.randint(97, (2, 24), generator=torch.Generator().manual_seed(5))
    with raised(), torch.no_grad():
        close(ours(ids), theirs(ids, use_cache=False).logits)
