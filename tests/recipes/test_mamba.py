"""Mamba against transformers."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MambaConfig, PreTrainedModel

import sublayer
from sublayer.errors import SpecError
from sublayer.recipes import from_hf, mamba, to_hf
from sublayer.recipes.mamba import TINY
from sublayer.state import State
from sublayer.step import Step
from tests.oracle import PADDED, check_export, check_parity, close, oracle, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))

SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3}


def config(**changes: object) -> dict:
    return {"architectures": ["MambaForCausalLM"], "model_type": "mamba"} | SMALL | changes


def theirs_of(base: bool = False, **changes: Any) -> PreTrainedModel:
    return oracle(MambaConfig, base=base, **SMALL | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expand": 3, "state_size": 5, "time_step_rank": "auto"},
        {"conv_kernel": 2, "use_conv_bias": False},
        {"use_bias": True, "tie_word_embeddings": False},
        {"layer_norm_epsilon": 1e-2, "residual_in_fp32": False},
        {"hidden_act": "gelu"},
    ],
    ids=str,
)
def test_logits_loss_and_gradients_equal_theirs(changes: dict, tmp_path) -> None:
    check_parity(theirs_of(**changes), tmp_path, IDS)


@pytest.mark.parametrize("length", [2, 4, 64])
def test_lengths_on_both_sides_of_the_kernel_and_of_a_block(length: int, tmp_path) -> None:
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
def test_64_steps_equal_the_parallel_form_and_theirs_in_fp32(tmp_path) -> None:
    """Steps drifted from the parallel form; a prompt shorter than the convolution was filled up wrongly."""
    ids = torch.randint(97, (1, 64), generator=torch.Generator().manual_seed(3))
    theirs = theirs_of()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float32)
    whole = ours(ids)
    for prompt in (1, 2, 3, 40):
        state = State.allocate(ours, 1, 64)
        parts = [ours(ids[:, :prompt], Step(), state)]
        parts += [ours(ids[:, i : i + 1], Step(), state) for i in range(prompt, 64)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * whole.abs().max().item())
    with raised():
        expected = theirs(ids, use_cache=False).logits
    expected = expected.float()
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("changes", [{}, {"use_bias": True, "tie_word_embeddings": False, "expand": 1}], ids=str)
def test_export_is_exact_and_read_by_transformers(changes: dict, tmp_path) -> None:
    check_export(MambaConfig, tmp_path, **SMALL | changes)


def test_base_class_gives_their_hidden_vectors(tmp_path) -> None:
    theirs = theirs_of(base=True)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    with raised():
        expected = theirs(IDS, use_cache=False).last_hidden_state
    close(ours(IDS), expected)


def test_decays_survive_theirs_as_they_are(tmp_path) -> None:
    """A is kept as log(−A) on both sides, so nothing is rounded on the way."""
    theirs = theirs_of()
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    A_log = theirs.get_parameter("backbone.layers.0.mixer.A_log")
    assert torch.equal(ours.get_parameter("decoder.blocks.0.mixer.op.A_log"), A_log)


def test_published_config_is_the_published_size() -> None:
    """As state-spaces/mamba-130m-hf has it."""
    values = config(vocab_size=50280, hidden_size=768, num_hidden_layers=24, state_size=16, time_step_rank=48) | {
        "conv_kernel": 4, "d_inner": 1536, "d_model": 768, "expand": 2, "fused_add_norm": True, "hidden_act": "silu",
        "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "n_layer": 24,
        "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True,
        "ssm_cfg": {}, "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1,
        "time_step_min": 0.001, "time_step_scale": 1.0, "torch_dtype": "float32", "use_bias": False,
        "use_conv_bias": True,
    }  # fmt: skip
    spec, _ = from_hf(values)
    assert spec == mamba(768, 24, rank=48)
    assert spec.parameters() == 129_135_360


@pytest.mark.parametrize("changes", [{}, {"inner": 64, "tied": False}, {"rank": 2, "bias": True, "kernel": 3}], ids=str)
def test_specs_and_config_files_are_inverses(changes: dict) -> None:
    spec = mamba(**TINY | changes)
    values, module = to_hf(spec)
    assert module.HF[values["architectures"][0]](values).replace(init=spec.init) == spec


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("made_up_key", 1),
        ("hidden_act", "tanh"),
        ("conv_kernel", 1),
        ("intermediate_size", 65),
        ("rms_norm", False),
        ("ssm_cfg", {"layer": "Mamba2"}),
        ("time_step_rank", "half"),
        ("state_size", 0),
        ("expand", "two"),
        ("use_bias", "no"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(key: str, value: object) -> None:
    ours = {"conv_kernel": "kernel", "use_bias": "bias"}
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
