"""GGUF files that we write: what the gguf package and llama.cpp find in them is what the model computes."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import T5Config, T5ForConditionalGeneration
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import sublayer
from sublayer.errors import SpecError, UsageError, WeightsError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import FAMILIES, family, gpt2, llama
from sublayer.recipes.difference import differences
from sublayer.recipes.gpt2 import TINY as TINY_GPT2
from sublayer.weights.gguf import ARCHITECTURES, writer
from sublayer.weights.gguf.mixtures import MIXTURES
from sublayer.weights.gguf.write import BY_PACKAGE, KINDS, TRAINING, write_gguf
from tests.llama_cpp import LlamaCpp
from tests.oracle import oracle, saved
from tests.tiny import tiny
from tests.weights.test_gguf import CASES, IDS, ROUGH, WITHOUT_WINDOW

ROUNDED = {"mamba": "A_log", "mamba2": "A_log", "jamba": "A_log", "gemma": "vectors", "gemma2": "vectors",
           "gemma3": "vectors"}  # fmt: skip
"""What the format stores transformed, -exp or 1 + w: those come back to a rounding."""


TOKENS = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [f"t{i}" for i in range(97)],  # which say no more than their numbers
    "tokenizer.ggml.scores": [0.0] * 97,
    "tokenizer.ggml.token_type": [2, 3, 3, *[1] * 94],
}


@pytest.mark.parametrize("name", WITHOUT_WINDOW)  # with one, it would be Mistral, which GGUF has not
def test_what_is_written_is_the_same_model_read_back_and_in_llama_cpp(name: str, tmp_path: Path) -> None:
    family, changes = CASES[name]
    ours = sublayer.load(saved(oracle(family, **changes), tmp_path))
    write_gguf(ours, tmp_path / "x.gguf", about=TOKENS)
    _check_same(ours, sublayer.load(tmp_path / "x.gguf"), ROUNDED.get(name))
    ids = IDS[:1].clamp(min=3)
    with torch.no_grad():
        wanted = ours.double()(ids)[0, -1].log_softmax(-1)
    theirs = LlamaCpp(tmp_path / "x.gguf").log_probabilities(ids[0].tolist(), 97)
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=1e-2 if name in ROUGH else 1e-5)


@pytest.mark.parametrize("form", ["relu", "gated-gelu"])
def test_t5_reads_back_as_the_same_model(form: str, tmp_path: Path) -> None:
    """llama.cpp's server runs no encoder-decoder; transformers finds all tensors under its own names again."""
    theirs: Any = oracle(T5Config, made=T5ForConditionalGeneration, vocab_size=97, d_model=32, d_kv=8, d_ff=48,
                         num_layers=2, num_heads=4, feed_forward_proj=form)  # fmt: skip
    ours = sublayer.load(saved(theirs, tmp_path))
    write_gguf(ours, tmp_path / "x.gguf")
    _check_same(ours, sublayer.load(tmp_path / "x.gguf"), None)
    found = load_gguf_checkpoint(str(tmp_path / "x.gguf"), return_tensors=True, model_to_load=theirs)["tensors"]
    wanted = theirs.float().state_dict()
    copies = {"lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"}  # of the one table
    assert wanted.keys() - found.keys() <= copies
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), name


def test_each_family_is_written_or_refused_as_the_page_says(tmp_path: Path) -> None:
    """Every table is written by a test above; the families without one are those that docs/export.md lists."""
    refused = set[str]()
    for name in FAMILIES:
        module = family(name)
        spec = getattr(module, name)(**module.TINY) if module.HF else None
        if spec is None:
            continue
        try:
            write_gguf(spec.build(), tmp_path / "x.gguf")
        except SpecError as error:
            if "has no GGUF architecture here" in str(error):
                refused.add(name)
    page = (Path(__file__).parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    (listed,) = re.findall(r"These families have none: ([^.]*)\.", page)
    assert refused == set(re.findall(r"`(\w+)`", listed))
    made = {writer(json.loads((saved(oracle(config, **changes), tmp_path) / "config.json").read_text())).hf
            for config, changes in CASES.values()}  # fmt: skip
    assert made | {"BertModel", "ModernBertModel", "T5ForConditionalGeneration"} == {one.hf for one in ARCHITECTURES}


def _check_same(ours: ModelOp, again: ModelOp, rounded: str | None) -> None:
    assert [one for one in differences(ours.spec, again.spec) if one.path.rpartition(".")[2] not in TRAINING] == []
    found = dict(again.named_parameters())
    assert found.keys() == dict(ours.named_parameters()).keys()
    for name, value in ours.named_parameters():
        if rounded is not None and (rounded in name or (rounded == "vectors" and value.dim() == 1)):
            torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
        else:
            assert torch.equal(found[name], value), name


def _read(path: Path) -> dict[str, tuple[str, np.ndarray]]:
    """By the gguf package: (type, values)."""
    return {t.name: (t.tensor_type.name, t.data) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in MIXTURES])
def test_matrices_are_of_the_type_asked_for_and_vectors_stay_exact(kind: str, tmp_path: Path) -> None:
    """A width of whole blocks for every type. The blocks are those that the package makes of the values."""
    model = llama(256, 1, 4, 2, hidden=256, vocab=40).build(seed=1)
    write_gguf(model, tmp_path / "x.gguf", kind=kind)
    found = _read(tmp_path / "x.gguf")
    for name, ours in (("token_embd", "decoder.embed.tokens"), ("blk.0.attn_v", "decoder.blocks.0.attn.op.v")):
        stored, data = found[f"{name}.weight"]
        assert stored == kind.upper()
        values = model.get_parameter(f"{ours}.weight").detach().numpy()
        wanted = quantize(values, gguf.GGMLQuantizationType[stored])
        assert np.array_equal(data.view(np.uint8).reshape(-1), wanted.view(np.uint8).reshape(-1))
    kept = {stored for name, (stored, _) in found.items() if name.endswith("norm.weight")}
    assert kept == {"F32"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that blocks are dequantised
        again = sublayer.load(tmp_path / "x.gguf")
    stored, data = found["output.weight"]
    wanted = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[stored]).copy())
    assert torch.equal(again.get_parameter("head.weight"), wanted)


def test_what_llama_cpp_reads_as_f32_only_stays_so(tmp_path: Path) -> None:
    write_gguf(gpt2(**TINY_GPT2).build(), tmp_path / "x.gguf", kind="f16")
    kinds = {name: stored for name, (stored, _) in _read(tmp_path / "x.gguf").items()}
    assert kinds["token_embd.weight"] == kinds["blk.0.attn_qkv.weight"] == "F16"
    assert {kinds[name] for name in ("position_embd.weight", "blk.0.attn_qkv.bias", "output_norm.weight")} == {"F32"}


@pytest.mark.parametrize(("width", "group"), [(288, 256), (4304, 64)])
def test_rows_that_are_no_whole_blocks_stay_as_they_are_and_it_is_said(width: int, group: int, tmp_path: Path) -> None:
    """The sizes at which group quantisation fell over elsewhere; here the groups are of 32 values, and 256."""
    model = llama(32, 1, 1, 1, hidden=width, vocab=20).build(seed=1)
    told: list[str] = []
    kind, block = ("tq1_0", 256) if group == 256 else ("q8_0", 32)
    write_gguf(model, tmp_path / "x.gguf", kind=kind, config={"max_position_embeddings": 64}, note=told.append)
    found = _read(tmp_path / "x.gguf")
    assert (found["blk.0.ffn_down.weight"][0] == "F16") == bool(width % block)
    assert all(f"no multiple of {block}" in line for line in told)
    assert len(told) == 1


def test_a_value_beyond_f16_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    model = tiny().build()
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.ffn.op.down.weight")[0, 0] = 70000.0
    with pytest.raises(WeightsError, match="blk.1.ffn_down.weight: holds 70000, beyond F16's 65504; use bf16"):
        write_gguf(model, tmp_path / "x.gguf", kind="f16")
    assert list(tmp_path.iterdir()) == []
    write_gguf(model, tmp_path / "x.gguf", kind="bf16")


@pytest.mark.parametrize("kind", ["f16", "q8_0", "q4_k_m"])
@pytest.mark.parametrize("value", [70000.0, np.inf, np.nan])
def test_what_quantised_blocks_cannot_hold_is_refused_by_name(value: float, kind: str, tmp_path: Path) -> None:
    model = llama(256, 1, 4, 2, hidden=256, vocab=40).build(seed=1)
    with torch.no_grad():
        model.get_parameter("decoder.blocks.0.ffn.op.down.weight")[3, 100] = value
    if np.isnan(value) and kind == "f16":
        write_gguf(model, tmp_path / "x.gguf", kind=kind)
        return
    with pytest.raises(WeightsError, match=f"blk.0.ffn_down.weight: holds {value:.6g}, .*; use bf16"):
        write_gguf(model, tmp_path / "x.gguf", kind=kind)
    assert list(tmp_path.iterdir()) == []


# --- mixtures of k-quants ---

LENGTH = {"max_position_embeddings": 64}  # of which a line would tell that nothing says it


@pytest.mark.filterwarnings("ignore:.*are dequantised")
@pytest.mark.parametrize("mixture", MIXTURES)
def test_a_mixture_is_read_alike_by_the_package_and_by_us_and_runs_in_llama_cpp(mixture: str, tmp_path: Path) -> None:
    """llama.cpp rounds activations to 8 bits before a product with quantised weights."""
    model = llama(256, 3, 8, 2, hidden=512, vocab=97).build(seed=1)
    told: list[str] = []
    write_gguf(model, tmp_path / "x.gguf", kind=mixture, about=TOKENS, config=LENGTH, note=told.append)
    assert told == []  # every row is of whole blocks
    again = sublayer.load(tmp_path / "x.gguf")
    parts = {"token_embd": "decoder.embed.tokens", "output": "head"}
    parts |= {f"blk.2.attn_{letter}": f"decoder.blocks.2.attn.op.{letter}" for letter in "v"}
    parts |= {f"blk.1.ffn_{part}": f"decoder.blocks.1.ffn.op.{part}" for part in ("up", "gate", "down")}
    found = _read(tmp_path / "x.gguf")
    for theirs, ours in parts.items():
        stored, data = found[f"{theirs}.weight"]
        wanted = torch.from_numpy(dequantize(data, gguf.GGMLQuantizationType[stored]).copy())
        assert torch.equal(again.get_parameter(f"{ours}.weight"), wanted), theirs
    ids = IDS[:1].clamp(min=3)
    with torch.no_grad():
        wanted = again.double()(ids)[0, -1].log_softmax(-1)
    theirs = LlamaCpp(tmp_path / "x.gguf").log_probabilities(ids[0].tolist(), 97)
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("width", "wanted"),
    [(256, {"Q2_K", "Q3_K", "Q6_K"}), (288, {"Q4_0", "Q8_0"}), (48, {"F16"})],
)
def test_rows_that_are_no_multiple_of_256_become_shorter_blocks_and_it_is_said(
    width: int, wanted: set[str], tmp_path: Path
) -> None:
    told: list[str] = []
    model = llama(width, 1, 1, 1, hidden=width, vocab=20).build(seed=1)
    write_gguf(model, tmp_path / "x.gguf", kind="q2_k", config=LENGTH, note=told.append)
    assert {stored for stored, _ in _read(tmp_path / "x.gguf").values()} - {"F32"} == wanted
    assert len(told) == (0 if width == 256 else len(wanted))
    assert all("as their rows are no multiple of 256" in line for line in told)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("decoder.blocks.*.attn.op.window=5", "llama cannot say the window of MistralForCausalLM, sliding_window=5"),
        ("decoder.blocks.*.ffn.op.activation=relu", "hidden_act='relu'"),
        ("decoder.blocks.*.attn.op.softcap=30.0", "decoder.blocks.0.attn.op.softcap is None, not 30.0"),
    ],
)
def test_what_the_format_cannot_express_is_refused_by_name(change: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=said):
        write_gguf(tiny().override(change).build(), tmp_path / "x.gguf")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["llama", "t5"])
def test_a_model_without_a_head_is_refused(name: str, tmp_path: Path) -> None:
    """llama.cpp would make one of the table."""
    module = family(name)
    spec = getattr(module, name)(**module.TINY).replace(head=None, tied=False)
    with pytest.raises(SpecError, match=rf"GGUF's {name} has a head, and this model \(\w+Model\) has none"):
        write_gguf(spec.build(), tmp_path / "x.gguf")


@pytest.mark.parametrize(("name", "key"), [("mamba", "expand"), ("jamba", "mamba_expand")])
def test_an_inner_width_that_llama_cpp_does_not_compute_is_refused(name: str, key: str, tmp_path: Path) -> None:
    module = family(name)
    spec = getattr(module, name)(**module.TINY | {"inner": 96})
    with pytest.raises(SpecError, match=f"llama.cpp computes this architecture with {key}=2 alone, not 3"):
        write_gguf(spec.build(), tmp_path / "x.gguf")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="quantize='q4_k': one of f32, f16, bf16, q8_0, .*, q4_k_m, "):
        write_gguf(tiny().build(), tmp_path / "x.gguf", kind="q4_k")


def test_the_package_makes_what_is_left_to_it_and_no_other() -> None:
    made = set()
    for kind, (block, _) in gguf.constants.GGML_QUANT_SIZES.items():
        try:
            quantize(np.ones((1, block), np.float32), kind)
        except (NotImplementedError, KeyError):
            continue
        made.add(kind.name.lower())
    assert made - {"f32", "f16", "bf16"} == set(BY_PACKAGE)


def test_progress_ends_with_all_bytes(tmp_path: Path) -> None:
    told: list[tuple[str, int, int]] = []
    write_gguf(tiny().build(), tmp_path / "x.gguf", kind="q8_0", progress=lambda *now: told.append(now))
    assert told == sorted(told)
    assert told[-1][1] == told[-1][2] == sum(data.nbytes for _, data in _read(tmp_path / "x.gguf").values())
