"""GGUF files as what `load` takes: dtypes, folders, and what is refused in one line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants
from transformers import Gemma3TextConfig, GptOssConfig, JambaConfig, LlamaConfig, Mamba2Config, Qwen3MoeConfig

import sublayer
from sublayer.errors import SpecError, SublayerError, WeightsError
from sublayer.gguf_header import read_header
from sublayer.weights.gguf.tensors import Tensors
from sublayer.weights.load import read_spec
from tests.oracle import oracle, saved
from tests.weights.gguf_writer import write
from tests.weights.test_gguf import CASES, LLAMA3

SHARED = "qwen3moe.expert_shared_feed_forward_length"


def rewrite(
    path: Path,
    keys: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray | None] | None = None,
    kind: GGMLQuantizationType | None = None,
) -> Path:
    """The file with keys and tensors set or (None) left out; kind: of matrices whose rows are whole blocks."""
    header = read_header(path)
    read = Tensors(header)
    metadata = {**header.metadata, **(keys or {})}
    values = {name: read.read(name).float().numpy() for name in header.tensors} | (tensors or {})
    out = gguf.GGUFWriter(path.with_name("again"), metadata.pop("general.architecture"))
    for key, value in metadata.items():
        add = {bool: out.add_bool, int: out.add_uint32, float: out.add_float32, str: out.add_string}.get(type(value))
        if value is not None:
            (add or out.add_array)(key, value)
    for name, value in values.items():
        if value is None:
            continue
        fits = kind is not None and value.ndim == 2 and value.shape[-1] % 32 == 0
        data = quants.quantize(value, kind) if fits and kind is not None else np.ascontiguousarray(value)
        out.add_tensor(name, data, raw_dtype=kind if fits else None)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()
    return path.with_name("again").rename(path)


def tiny(folder: Path, family: type = LlamaConfig, **changes: Any) -> Path:
    return write(saved(oracle(family, **changes), folder / "theirs"), folder / "x.gguf", wide=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_blocks_become_numbers_of_the_dtype_asked_for_and_that_is_said_once(dtype, tmp_path: Path) -> None:
    path = rewrite(tiny(tmp_path), kind=GGMLQuantizationType.Q8_0)
    with pytest.warns(UserWarning, match=r"x.gguf: Q8_0 are dequantised") as said:
        found = sublayer.load(path, dtype=dtype)
    assert len(said) == 1
    table = read_header(path).tensors["token_embd.weight"]
    assert table.kind == "Q8_0"
    data = np.frombuffer(path.read_bytes(), np.uint8, table.size, table.offset).reshape(97, -1)
    wanted = torch.from_numpy(quants.dequantize(data, GGMLQuantizationType.Q8_0)).to(dtype)
    assert torch.equal(found.get_parameter("decoder.embed.tokens.weight"), wanted)
    assert {parameter.dtype for parameter in found.parameters()} == {dtype}


def test_a_folder_of_one_gguf_file_is_that_model(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    alone = tmp_path / "alone"
    alone.mkdir()
    path.rename(alone / "model.gguf")
    wanted = sublayer.load(alone / "model.gguf")
    assert torch.equal(sublayer.load(alone).get_parameter("head.weight"), wanted.get_parameter("head.weight"))
    assert read_spec(alone)[0] == wanted.spec
    (alone / "other.gguf").write_bytes(b"")
    with pytest.raises(WeightsError, match="holds model.gguf and 1 more GGUF models; name one of them"):
        sublayer.load(alone)


def test_a_head_that_is_the_table_once_more_is_tied(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    table = Tensors(read_header(path)).read("token_embd.weight").numpy()
    assert not sublayer.load(path).spec.tied
    assert sublayer.load(rewrite(path, tensors={"output.weight": table})).spec.tied
    assert sublayer.load(rewrite(path, tensors={"output.weight": None})).spec.tied


def test_divisors_that_no_published_scaling_gives_are_kept_as_they_are(tmp_path: Path) -> None:
    path = tiny(tmp_path)
    plain = sublayer.load(path).spec.find("decoder.blocks.0.attn.op.position")
    ones = rewrite(path, tensors={"rope_freqs.weight": np.ones(4, np.float32)})
    assert sublayer.load(ones).spec.find("decoder.blocks.0.attn.op.position") == plain
    odd = rewrite(path, tensors={"rope_freqs.weight": np.array([1, 1.1, 3, 7], np.float32)})
    scaled = sublayer.load(odd).spec.find("decoder.blocks.0.attn.op.position")
    expected = [one / by for one, by in zip((1, 0.1, 0.01, 0.001), (1, 1.1, 3, 7), strict=True)]
    assert scaled.scaling.frequencies(scaled.theta, 8) == pytest.approx(expected, rel=1e-6)
    assert scaled.scaling.magnitude() == 1.0


def test_the_published_scaling_of_llama_3_is_found_in_its_divisors(tmp_path: Path) -> None:
    spec = read_spec(tiny(tmp_path, hidden_size=64, num_attention_heads=2, rope_parameters=LLAMA3))[0]
    scaling = spec.find("decoder.blocks.0.attn.op.position.scaling")
    assert (scaling.factor, scaling.low_frequency_factor, scaling.high_frequency_factor, scaling.trained_length) == (
        8.0, 1.0, 4.0, 8192,
    )  # fmt: skip


CHANGES: list[tuple[dict[str, Any], type, str]] = [
    (
        {"general.architecture": "lama"},
        SpecError,
        r"GGUF architecture 'lama' cannot be read \(did you mean 'llama'\?\)",
    ),
    ({"general.type": "adapter"}, SpecError, "general.type is 'adapter'"),
    ({"llama.block_count": None}, SpecError, "the metadata has no llama.block_count"),
    ({"llama.attention.clamp_kqv": 8.0}, SpecError, "sets llama.attention.clamp_kqv=8.0, which is not modelled"),
    ({"llama.attention.value_length": 16}, SpecError, "value_length: not modelled where it differs"),
    ({"llama.rope.dimension_count": 4}, SpecError, "rope.dimension_count=4: this family rotates whole heads of 8"),
    ({"llama.rope.scaling.type": "warp", "llama.rope.scaling.factor": 2.0}, SpecError, "'warp' is not modelled"),
    ({"llama.rope.scaling.attn_factor": 2.0}, SpecError, "attn_factor=2.0 is modelled for yarn and longrope only"),
    ({"llama.attention.head_count": "4"}, SpecError, "llama.attention.head_count='4' is not a whole number"),
    ({"llama.attention.head_count_kv": "2"}, SpecError, "num_key_value_heads|kv_heads"),
    ({"llama.rope.freq_base": "x"}, SpecError, "Rope.theta: expected float, got 'x'"),
    ({"llama.block_count": 3}, WeightsError, "tensor blk.2.*missing from the checkpoint"),
    ({"llama.block_count": 1}, WeightsError, "x.gguf: tensor blk.1.*has no place in the model"),
    ({"llama.feed_forward_length": 47}, WeightsError, r"x.gguf: blk.0.ffn_gate.weight is \[48, 32\], which does"),
    ({"llama.block_count": 4_000_000_000}, SpecError, "num_hidden_layers=4000000000 is not a whole number from"),
    ({"llama.expert_count": 4_000_000_000, "llama.expert_used_count": 2}, SpecError, "expert_count=4000000000"),
]


@pytest.mark.parametrize(("keys", "error", "message"), CHANGES)
def test_metadata_that_say_another_model_are_refused(keys, error, message: str, tmp_path: Path) -> None:
    path = rewrite(tiny(tmp_path), keys)
    with pytest.raises(error, match=message) as caught:
        sublayer.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"blk.1.attn_k.weight": None}, "tensor blk.1.attn_k.weight missing from the checkpoint"),
        ({"blk.1.attn_k.scale": np.ones(1, np.float32)}, "tensor blk.1.attn_k.scale has no place in the model"),
        (
            {"blk.0.attn_q.weight": np.ones((32, 31), np.float32)},
            r"blk.0.attn_q.weight is \[32, 31\], which does not give",
        ),
        ({"blk.0.attn_q.weight": np.ones((30, 32), np.float32)}, r"attn_q.weight \[30, 32\] is not"),
        ({"rope_freqs.weight": np.ones(3, np.float32)}, "expected one for each of 4 rotated pairs"),
        ({"rope_freqs.weight": np.zeros(4, np.float32)}, "holds what no frequency can be divided by"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tensors, message: str, tmp_path: Path) -> None:
    path = rewrite(tiny(tmp_path), tensors=tensors)
    with pytest.raises(SublayerError, match=message) as caught:
        sublayer.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("family", "name", "keys", "message"),
    [
        (Mamba2Config, "mamba2", {"mamba2.ssm.group_count": 3}, "heads=8 is not a multiple of groups=3"),
        (JambaConfig, "jamba", {"jamba.attention.head_count_kv": [2, 2, 0, 2]}, "follow no period"),
        (JambaConfig, "jamba", {"jamba.attention.head_count_kv": 2}, "does not say of each of 4 layers"),
        (Gemma3TextConfig, "gemma3", {"gemma3.block_count": 4_000_000_000}, "block_count=4000000000 is more than"),
        (GptOssConfig, "gpt-oss", {"gpt-oss.block_count": 4_000_000_000}, "block_count=4000000000 is more than"),
        (Qwen3MoeConfig, "qwen3moe", {SHARED: 7}, f"{SHARED}=7 is not modelled"),
    ],
)
def test_what_other_architectures_do_not_mean_is_refused(family, name, keys, message: str, tmp_path: Path) -> None:
    path = rewrite(tiny(tmp_path, family, **CASES[name][1]), keys)
    with pytest.raises(SpecError, match=message):
        sublayer.load(path)


def test_published_files_say_what_changes_nothing(tmp_path: Path) -> None:
    """Those of Qwen3-Coder."""
    path = tiny(tmp_path, Qwen3MoeConfig, **CASES["qwen3moe"][1])
    spec = read_spec(path)[0]
    assert read_spec(rewrite(path, {SHARED: 0}))[0] == spec


@pytest.mark.parametrize(
    "path_of", [lambda folder: folder / "absent.gguf", lambda folder: folder, lambda folder: "/dev/null.gguf"]
)
def test_a_path_without_a_file_is_one_line(path_of: Callable[[Path], Any], tmp_path: Path) -> None:
    with pytest.raises(SublayerError) as caught:
        sublayer.load(path_of(tmp_path))
    assert "\n" not in str(caught.value)
