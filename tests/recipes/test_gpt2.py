"""GPT-2 against transformers."""

import json

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import model as published
from sublayer.recipes.gpt2 import TINY, from_hf, gpt2, to_hf
from sublayer.step import Step
from tests.oracle import check_parity, close, oracle, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False},
        {"n_inner": 40},
        {"layer_norm_epsilon": 1e-2},
        *({"activation_function": name} for name in ("gelu", "relu", "silu", "gelu_pytorch_tanh")),
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(oracle(GPT2Config, **changes), tmp_path, IDS)
