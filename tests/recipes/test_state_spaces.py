"""Mamba, Mamba-2, and with attention Jamba and Bamba, against transformers."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import BambaConfig, BambaForCausalLM, JambaConfig, Mamba2Config, MambaConfig, PreTrainedModel

import sublayer
from sublayer.errors import SpecError
from sublayer.nn.rope import Rope
from sublayer.nn.ssd import CHUNK
from sublayer.recipes import family, from_hf, jamba, mamba, to_hf
from sublayer.state import State
from sublayer.step import Step
from tests.oracle import PADDED, check_base, check_export, check_parity, close, oracle, positions, raised, saved

IDS = torch.randint(97, (2, 12), generator=torch.Generator().manual_seed(1))
ROTATED = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 1.0}


class Line(NamedTuple):
    config: type
    small: dict[str, Any]
    parity: tuple[dict[str, Any], ...]
    """Changes of the configuration under which logits, loss and gradients are compared, beside none."""
    export: tuple[dict[str, Any], ...]
    """Those under which an export is."""
    specs: tuple[dict[str, Any], ...]
    """Changes of our tiny spec, each of which has a configuration."""
    refused: tuple[tuple[str, object, str], ...]
    """(key, value, what the error says) of what is not modelled."""


LINES = {
    "mamba": Line(
        MambaConfig,
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "time_step_rank": 3},
        (
            {"expand": 3, "state_size": 5, "time_step_rank": "auto"},
            {"conv_kernel": 2, "use_conv_bias": False},
            {"use_bias": True, "tie_word_embeddings": False},
            {"layer_norm_epsilon": 1e-2, "residual_in_fp32": False},
            {"hidden_act": "gelu"},
        ),
        ({"use_bias": True, "tie_word_embeddings": False, "expand": 1},),
        ({"inner": 64, "tied": False}, {"rank": 2, "bias": True, "kernel": 3}),
        (
            ("conv_kernel", 1, "kernel"),
            ("intermediate_size", 65, "intermediate_size"),
            ("rms_norm", False, "rms_norm"),
            ("ssm_cfg", {"layer": "Mamba2"}, "ssm_cfg"),
            ("time_step_rank", "half", "time_step_rank"),
            ("state_size", 0, "state_size"),
            ("expand", "two", "expand"),
            ("use_bias", "no", "bias"),
        ),
    ),
    "mamba2": Line(
        Mamba2Config,
        {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 6, "num_heads": 8, "head_dim": 8,
         "n_groups": 2, "chunk_size": 5},
        (
            {"n_groups": 1, "chunk_size": 256},
            {"n_groups": 8, "expand": 1, "num_heads": 8, "head_dim": 4},
            {"conv_kernel": 2, "use_conv_bias": False},
            {"use_bias": True, "tie_word_embeddings": True},
            {"layer_norm_epsilon": 1e-2, "residual_in_fp32": False},
            {"hidden_act": "gelu"},
        ),
        ({"use_bias": True, "tie_word_embeddings": True},),
        ({"groups": 4, "tied": False}, {"heads": 2, "head_size": 32, "bias": True, "kernel": 3}),
        (
            ("conv_kernel", 1, "kernel"),
            ("n_groups", 3, "groups"),
            ("num_heads", 9, "num_heads"),
            ("head_dim", 0, "head_dim"),
            ("expand", "two", "expand"),
            ("time_step_limit", [0.0, 0.1], "time_step_limit"),
            ("use_bias", "no", "bias"),
        ),
    ),
    "jamba": Line(
        JambaConfig,
        {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4,
         "mamba_d_state": 4},
        (
            {"attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 3, "expert_layer_offset": 0},
            {"num_experts_per_tok": 3, "mamba_dt_rank": 5, "mamba_expand": 1},
            {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 2},
            {"tie_word_embeddings": True, "rms_norm_eps": 1e-2, "hidden_act": "gelu"},
            {"num_experts": 1, "num_experts_per_tok": 1},
            {"num_experts_per_tok": 1},
        ),
        ({"tie_word_embeddings": True, "mamba_proj_bias": True}, {"num_experts": 1}),
        ({"attention": (9, 8), "tied": True}, {"moe": (4, 3)}, {"experts": 1, "rank": 4}),
        (
            ("mamba_d_conv", 1, "kernel"),
            ("attn_layer_offset", 3, "attn_layer_offset"),
            ("expert_layer_period", 0, "expert_layer_period"),
            ("num_experts_per_tok", 5, "active"),
            ("mamba_inner_layernorms", False, "mamba_inner_layernorms"),
            ("mamba_expand", "two", "mamba_expand"),
            ("mamba_dt_rank", "half", "mamba_dt_rank"),
            ("sliding_window", 5, "sliding_window"),
            ("router_aux_loss_coef", -1.0, "balance_loss"),
        ),
    ),
    "bamba": Line(
        BambaConfig,
        {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
         "num_key_value_heads": 2, "attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_state": 6,
         "mamba_chunk_size": 5},
        (
            {"attn_layer_indices": [0, 2], "mamba_n_groups": 2, "mamba_d_head": 8, "mamba_n_heads": 8},
            {"mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
            {"mamba_conv_bias": False, "mamba_d_conv": 2, "tie_word_embeddings": True},
            {"rms_norm_eps": 1e-2, "hidden_act": "gelu"},
            {"rope_parameters": ROTATED},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
            {"attn_layer_indices": None},
        ),
        ({"attn_layer_indices": [], "mamba_n_groups": 2}, {"tie_word_embeddings": True, "rope_parameters": ROTATED}),
        ({"attention_layers": (0, 2), "tied": True}, {"rope": Rope(500.0), "ffn_bias": True}),
        (
            ("mamba_d_conv", 1, "kernel"),
            ("mamba_n_groups", 3, "groups"),
            ("mamba_n_heads", 5, "mamba_n_heads"),
            ("mamba_expand", "two", "mamba_expand"),
            ("attn_layer_indices", [3], "attention_layers"),
            ("attn_layer_indices", "all", "attn_layer_indices"),
            ("attn_rotary_emb", 8, "attn_rotary_emb"),
            ("z_loss_coefficient", 0.1, "z_loss_coefficient"),
            ("time_step_limit", [0.0, 0.1], "time_step_limit"),
            ("rope_parameters", {"rope_type": "spiral"}, "rope_parameters"),
        ),
    ),
}  # fmt: skip
PURE = ("mamba", "mamba2")


def config(name: str, **changes: object) -> dict[str, Any]:
    return {"architectures": [next(iter(family(name).HF))], "model_type": name} | LINES[name].small | changes


def theirs_of(name: str, **changes: Any) -> PreTrainedModel:
    return oracle(LINES[name].config, **LINES[name].small | changes)


def each(field: str) -> list[Any]:
    """(name, changes) of all lines, each without changes too."""
    return [(name, changes) for name, line in LINES.items() for changes in ({}, *getattr(line, field))]


@pytest.mark.parametrize(("name", "changes"), each("parity"), ids=str)
def test_logits_loss_and_gradients_equal_theirs(name: str, changes: dict, tmp_path: Path) -> None:
    check_parity(theirs_of(name, **changes), tmp_path, IDS)


@pytest.mark.parametrize("length", [2, 4, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("name", PURE)
def test_lengths_on_both_sides_of_the_kernel_and_of_a_chunk(name: str, length: int, tmp_path: Path) -> None:
    ids = torch.randint(97, (2, length + 1), generator=torch.Generator().manual_seed(2))
    check_parity(theirs_of(name), tmp_path, ids)


@pytest.mark.parametrize("name", LINES)
def test_left_padded_rows_equal_theirs(name: str, tmp_path: Path) -> None:
    padded = {"attention_mask": PADDED} | ({} if name in PURE else {"position_ids": positions(PADDED)})
    check_parity(theirs_of(name), tmp_path, IDS, Step(segment=PADDED), PADDED.bool(), **padded)


@pytest.mark.parametrize("name", LINES)
def test_packed_documents_equal_theirs_alone(name: str, tmp_path: Path) -> None:
    theirs = theirs_of(name)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    segment = torch.tensor([[1] * 2 + [2] * 10, [1] * 7 + [2] * 5])
    with raised():
        alone = [torch.cat([theirs(row[None, :cut], use_cache=False).logits, theirs(row[None, cut:]).logits], 1)
                 for row, cut in zip(IDS, (2, 7), strict=True)]  # fmt: skip
    close(ours(IDS, Step(segment=segment)), torch.cat(alone))


@torch.no_grad()
@pytest.mark.parametrize("name", PURE)
def test_steps_equal_the_parallel_form_and_theirs_in_fp32(name: str, tmp_path: Path) -> None:
    """Steps drifted from the parallel form; a prompt shorter than the convolution was filled up wrongly."""
    length = CHUNK + 9
    ids = torch.randint(97, (1, length), generator=torch.Generator().manual_seed(3))
    theirs = theirs_of(name)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float32)
    whole = ours(ids)
    for prompt in (1, 2, 3, 40, CHUNK):
        state = State.allocate(ours, 1, length)
        parts = [ours(ids[:, :prompt], Step(), state)]
        parts += [ours(ids[:, i : i + 1], Step(), state) for i in range(prompt, length)]
        torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5 * whole.abs().max().item())
    with raised():
        expected = theirs(ids, use_cache=False).logits
    expected = expected.float()
    torch.testing.assert_close(whole, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize(("name", "changes"), each("export"), ids=str)
def test_export_is_exact_and_read_by_transformers(name: str, changes: dict, tmp_path: Path) -> None:
    check_export(LINES[name].config, tmp_path, **LINES[name].small | changes)


@pytest.mark.parametrize("name", LINES)
def test_base_class_gives_their_hidden_vectors(name: str, tmp_path: Path) -> None:
    check_base(LINES[name].config, tmp_path, IDS, **LINES[name].small)


@pytest.mark.parametrize(("name", "changes"), each("specs"), ids=str)
def test_specs_and_config_files_are_inverses(name: str, changes: dict) -> None:
    spec = getattr(family(name), name)(**family(name).TINY | changes)
    values, module = to_hf(spec)
    assert module.HF[values["architectures"][0]](values).replace(init=spec.init) == spec


@pytest.mark.parametrize(
    ("name", "key", "value", "said"),
    [
        (name, *one)
        for name, line in LINES.items()
        for one in (("made_up_key", 1, "made_up_key"), ("hidden_act", "tanh", "hidden_act"), *line.refused)
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(name: str, key: str, value: object, said: str) -> None:
    with pytest.raises(SpecError, match=said) as caught:
        from_hf(config(name) | {key: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", PURE)
def test_an_embedding_under_its_first_name_is_read(name: str, tmp_path: Path) -> None:
    folder = saved(theirs_of(name), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    save_file(tensors, folder / "model.safetensors")
    found = sublayer.load(folder, dtype=torch.float64).get_parameter("decoder.embed.tokens.weight")
    assert torch.equal(found, tensors["backbone.embedding.weight"])


def test_decays_survive_theirs_as_they_are(tmp_path: Path) -> None:
    """A is kept as log(−A) on both sides, so nothing is rounded on the way."""
    theirs = theirs_of("mamba")
    ours = sublayer.load(saved(theirs, tmp_path), dtype=torch.float64)
    A_log = theirs.get_parameter("backbone.layers.0.mixer.A_log")
    assert torch.equal(ours.get_parameter("decoder.blocks.0.mixer.op.A_log"), A_log)


def test_the_published_mamba_is_the_published_size() -> None:
    """As state-spaces/mamba-130m-hf has it."""
    spec, _ = from_hf({
        "architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 50280, "hidden_size": 768,
        "num_hidden_layers": 24, "state_size": 16, "time_step_rank": 48, "conv_kernel": 4, "d_inner": 1536,
        "d_model": 768, "expand": 2, "fused_add_norm": True, "hidden_act": "silu", "initializer_range": 0.1,
        "intermediate_size": 1536, "layer_norm_epsilon": 1e-05, "n_layer": 24, "pad_vocab_size_multiple": 8,
        "rescale_prenorm_residual": False, "residual_in_fp32": True, "rms_norm": True, "ssm_cfg": {},
        "time_step_floor": 0.0001, "time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001,
        "time_step_scale": 1.0, "torch_dtype": "float32", "use_bias": False, "use_conv_bias": True,
    })  # fmt: skip
    assert spec == mamba(768, 24, rank=48)
    assert spec.parameters() == 129_135_360


def test_the_published_jamba_is_the_published_size() -> None:
    """As ai21labs/Jamba-v0.1 has it."""
    spec, _ = from_hf({
        "architectures": ["JambaForCausalLM"], "model_type": "jamba", "attention_dropout": 0.0, "attn_layer_offset": 4,
        "attn_layer_period": 8, "calc_logits_for_entire_prompt": False, "expert_layer_offset": 1,
        "expert_layer_period": 2, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_state": 16, "mamba_dt_rank": 256, "mamba_expand": 2,
        "mamba_inner_layernorms": True, "mamba_proj_bias": False, "max_position_embeddings": 262144,
        "num_attention_heads": 32, "num_experts": 16, "num_experts_per_tok": 2, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "router_aux_loss_coef": 0.001, "sliding_window": None,
        "tie_word_embeddings": False, "use_mamba_kernels": True, "vocab_size": 65536,
    })  # fmt: skip
    assert spec == jamba(4096, 32, 32, 8, 14336, 65536, inner=8192, rank=256, balance_loss=0.001 / 16)


def test_the_published_bamba_is_as_large_as_theirs() -> None:
    published = BambaConfig(vocab_size=128256, attn_layer_indices=[9, 18, 27], mamba_d_state=128)
    with torch.device("meta"):
        theirs = sum(parameter.numel() for parameter in BambaForCausalLM(published).parameters())
    spec, _ = from_hf(published.to_diff_dict() | {"architectures": ["BambaForCausalLM"]})
    assert spec.parameters() == theirs
    assert spec.find("decoder.blocks.9.attn.op.position") == Rope(10000.0, 64)
