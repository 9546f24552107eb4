"""Mamba-2 against transformers."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Mamba2Config, PreTrainedModel

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.ssd import CHUNK
from sublayer.recipes import from_hf, mamba2, to_hf
from sublayer.recipes.mamba2 import TINY
from sublayer.state import State
from sublayer.step import Step
from tests.oracle import PADDED, check_export, check_parity, close, oracle, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "num_heads": 8, "head_dim": 8,
         "n_groups": 2, "chunk_size": 5}  # fmt: skip


def config(**changes: object) -> dict:
    return {"architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2"} | SMALL | changes


def theirs_of(base: bool = False, **changes: Any) -> PreTrainedModel:
    return oracle(Mamba2Config, base=base, **SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_groups": 1, "chunk_size": 256},
        {"n_groups": 8, "expand": 1, "num_heads": 8, "head_dim": 4},
        {"conv_kernel": 2, "use_conv_bias": False},
        {"use_bias": True, "tie_word_embeddings": True},
        {"layer_norm_epsilon": 1e-2, "residual_in_fp32": False},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(theirs_of(**changes), tmp_path, IDS)


@pytest.mark.parametrize("length", [2, CHUNK, CHUNK + 1])
def test_lengths_on_both_sides_of_the_kernel_and_of_a_chunk(length: int, tmp_path) -> None:
    ids = torch.randint(97, (2, length + 1), generator=torch.Generator().manual_seed(2))
    check_parity(theirs_of(), tmp_path, ids)


def test_left_padded_rows_equal_theirs(tmp_path) -> None:
    check_parity(theirs_of(), tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), attention_mask=PADDED)


def test_packed_documents_equal_theirs_alone(tmp_path) -> None:
    theirs = theirs_of()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    segment = torch.tensor([[1] * 2 + [2] * 10, [1] * 7 + [2] * 5])
    with raised():
        alone = [torch.cat([theirs(row[None, :cut], use_cache=False).logits, theirs(row[None, cut:]).logits], 1)
                 for row, cut in zip(IDS, (2, 7), strict=True)]  # fmt: skip
    close(ours(IDS, Step(segment=segment)), torch.cat(alone))


@torch.no_grad()
def test_steps_equal_the_chunked_form_in_fp32(tmp_path) -> None:
    ids = torch.randint(97, (1, CHUNK + 9), generator=torch.Generator().manual_seed(3))
    ours = sublayer.load(saved(theirs_of(), tmp_path), dtype=torch.float32)
    whole = ours(ids)
    for prompt in (1, 2, 3, CHUNK):
        state = State.allocate(ours, 1, CHUNK + 9)
        parts = [ours(ids[:, :prompt], Step(), state)]
        parts += [ours(ids[:, i : i + 1], Step(), state) for i in range(prompt, CHUNK + 9)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * whole.abs().max().item())


@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_word_embeddings": True}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(Mamba2Config, tmp_path, **SMALL | changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = theirs_of(base=True)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        expected = theirs(IDS, use_cache=False).last_hidden_state
    close(ours(IDS), expected)


@pytest.mark.parametrize(
    "changes", [{}, {"groups": 4, "tied": False}, {"heads": 2, "head_size": 32, "bias": True, "kernel": 3}], ids=str
)
def test_specs_and_config_files_are_inverses(changes: dict) -> None:
    spec = mamba2(**TINY | changes)
    values, module = to_hf(spec)
    assert module.HF[values["architectures"][0]](values).replace(init=spec.init) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("hidden_act", "tanh"),
        ("conv_kernel", 1),
        ("n_groups", 3),
        ("num_heads", 9),
        ("head_dim", 0),
        ("expand", "two"),
        ("time_step_limit", [0.0, 0.1]),
        ("use_bias", "no"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"conv_kernel": "kernel", "use_bias": "bias", "n_groups": "groups"}
    with pytest.raises(SpecError, match=ours.get(key, key)) as caught:
        from_hf(config() | {key: value})
    assert "\n" not in str(caught.value)


def test_an_embedding_under_its_first_name_is_read(tmp_path) -> None:
    folder = saved(theirs_of(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    assert torch.equal(
        sublayer.load(folder, dtype=torch.float64).get_parameter("decoder.embed.tokens.weight"),
        tensors["backbone.embedding.weight"],
    )
