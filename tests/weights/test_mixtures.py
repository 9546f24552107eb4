"""Mixtures of k-quants: every matrix gets the type that llama.cpp's own program gives it."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType
from torch import Tensor
from transformers import LlamaConfig, MixtralConfig, Qwen2Config, T5Config, T5ForConditionalGeneration

import sublayer
from sublayer.gguf_header import read_header
from sublayer.recipes import llama
from sublayer.text import load_tokenizer
from sublayer.weights import export
from sublayer.weights.gguf.mixtures import MIXTURES, types_of
from sublayer.weights.gguf.write import write_gguf
from tests.assets.gguf_files import gemma3, smollm2
from tests.assets.llama_library import quantise_file
from tests.llama_cpp import LlamaCpp
from tests.oracle import oracle, saved
from tests.weights.test_gguf import CASES
from tests.weights.test_gguf_write import TOKENS

PUBLISHED = {"q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_m": 3.9960, "q3_k_l": 4.2979, "q4_k_s": 4.6672, "q4_k_m": 4.8944,
             "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633}  # fmt: skip
"""Bits a weight of Llama 3.1 8B, as the README of llama.cpp's quantize has them."""

NAMES = ("llama, tied", "qwen3moe", "phi3", "gemma3", "gpt2", "gptneox", "gpt-oss", "mamba", "mamba2", "jamba",
         "deepseek2 (V3)")  # fmt: skip
"""Architectures whose tensors have names of their own."""
MORE: dict[str, tuple[type, dict[str, Any]]] = {
    "mixtral of 8": (MixtralConfig, {"num_local_experts": 8}),
    "llama of 80 layers": (LlamaConfig, {"num_hidden_layers": 80}),
    "llama of 80 layers, ungrouped": (LlamaConfig, {"num_hidden_layers": 80, "num_key_value_heads": 4}),
    "qwen2 of 80 layers, ungrouped": (Qwen2Config, {"num_hidden_layers": 80, "num_key_value_heads": 4}),
    "llama, four to a head": (LlamaConfig, {"num_attention_heads": 8}),
    "llama of 35 layers": (LlamaConfig, {"num_hidden_layers": 35}),
    "t5": (T5Config, {"made": T5ForConditionalGeneration, "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48,
                      "num_layers": 9, "num_decoder_layers": 11, "num_heads": 4}),
}  # fmt: skip


@pytest.mark.parametrize("mixture", MIXTURES)
def test_llama_3_gets_the_bits_that_are_published(mixture: str) -> None:
    sizes = {"token_embd.weight": 128256 * 4096, "output.weight": 128256 * 4096}
    for i in range(32):
        sizes |= {f"blk.{i}.attn_{part}.weight": 4096 * 4096 for part in ("q", "output")}
        sizes |= {f"blk.{i}.attn_{part}.weight": 4096 * 1024 for part in ("k", "v")}
        sizes |= {f"blk.{i}.ffn_{part}.weight": 4096 * 14336 for part in ("up", "gate", "down")}
    said = {"general.architecture": "llama", "llama.block_count": 32, "llama.attention.head_count": 32,
            "llama.attention.head_count_kv": 8}  # fmt: skip
    bits = float(32 * (plain := 65 * 4096 + 64))  # norms, and the factors of its rope
    for name, kind in types_of(mixture, sizes, said).items():
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
        bits += sizes[name] * 8 * size / block
    assert bits / (sum(sizes.values()) + plain) == pytest.approx(PUBLISHED[mixture], abs=5e-5)


def _kinds(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.assets
@pytest.mark.parametrize("name", ["llama, blocks of 256", *NAMES, *MORE])
def test_llama_cpps_program_chooses_the_same_types(name: str, tmp_path: Path) -> None:
    """Mostly with short rows: nearly each type has a fallback of its own, so that tells as much."""
    family, changes = (CASES | MORE).get(name, (None, {}))
    model = sublayer.load(saved(oracle(family, **changes), tmp_path)) if family else None
    model = model or llama(256, 9, 4, 2, hidden=256, vocab=97).build(seed=1)
    write_gguf(model, tmp_path / "f.gguf", about=TOKENS)
    for mixture in ("q3_k_m", "q4_k_s") if "80" in name else MIXTURES:  # only those with Q3_K or Q4_K differ there
        quantise_file(tmp_path / "f.gguf", tmp_path / "theirs.gguf", LlamaFileType[f"MOSTLY_{mixture.upper()}"])
        write_gguf(model, tmp_path / "ours.gguf", kind=mixture, about=TOKENS)
        assert _kinds(tmp_path / "ours.gguf") == _kinds(tmp_path / "theirs.gguf"), mixture


@pytest.mark.assets
def test_a_shipped_file_has_the_types_that_are_chosen() -> None:
    header = read_header(gemma3())
    kinds = {name: place.kind for name, place in header.tensors.items()}
    matrices = {name for name, kind in kinds.items() if kind != "F32"}
    fallback = {"Q4_K": {"Q4_K", "Q5_0"}, "Q6_K": {"Q6_K", "Q8_0"}}
    for name, kind in types_of("q4_k_m", matrices, header.metadata).items():
        assert kinds[name] in fallback[kind], name


@pytest.mark.assets
@pytest.mark.filterwarnings("ignore:.*are dequantised")
def test_a_published_model_in_a_mixture_predicts_as_well_as_llama_cpps_file_does(tmp_path: Path) -> None:
    """SmolLM2-135M, dequantised from its Q4_1: the F32 file's predictions of this LICENSE, by ours, against those of
    two files of Q4_K_M, ours and llama.cpp's own. 576 wide, only its ffn_down are in k-quants. llama.cpp runs ours."""
    f32, ours, theirs = (tmp_path / f"{name}.gguf" for name in ("f32", "ours", "theirs"))
    export(smollm2(), f32, to="gguf", dtype=torch.float32)
    export(smollm2(), ours, to="gguf", dtype=torch.float32, quantize="q4_k_m")
    quantise_file(f32, theirs, LlamaFileType.MOSTLY_Q4_K_M)
    tokenizer = load_tokenizer(f32)
    text = Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8")
    ids = torch.tensor([tokenizer.encode(text, framed=True)[:512]])

    def predictions(path: Path) -> Tensor:
        with torch.no_grad():
            return sublayer.load(path)(ids)[0].log_softmax(-1)

    wanted = predictions(f32)
    divergences, agreements = [], []
    for path in (ours, theirs):
        found = predictions(path)
        divergences.append(float((wanted.exp() * (wanted - found)).sum(-1).mean()))
        agreements.append(float((wanted.argmax(-1) == found.argmax(-1)).float().mean()))
        print(f"\n{path.name}: mean KL {divergences[-1]:.4f}, top-1 {agreements[-1]:.1%}")
    assert divergences[0] < 1.1 * divergences[1]
    assert divergences[0] < 0.1
    assert agreements[0] > agreements[1] - 0.02
    asked = tokenizer.encode("The capital of France is", framed=True)
    assert tokenizer.decode(LlamaCpp(ours).greedy(asked, 2)) == " Paris."
