"""`sublayer show`: what it prints of sizes, contexts and windows."""

import json
import os
from math import prod
from pathlib import Path

import gguf
import pytest

from sublayer.cli import main as cli
from sublayer.errors import WeightsError
from sublayer.text import Bytes
from sublayer.weights import save
from sublayer.weights.load import Checkpoint
from tests.decoding.models import SPECS, tiny
from tests.text.control import CHATML, tokenizer_folder
from tests.text.kinds import sentence_piece_model

LAYERS, DIM, HIDDEN, VOCAB = 80, 8192, 28672, 128256  # Llama 3, 70B


def llama_70b() -> dict[str, tuple[int, ...]]:
    """Its tensors, as they are published."""
    of_layer = {
        "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (1024, DIM), "self_attn.v_proj": (1024, DIM),
        "self_attn.o_proj": (DIM, DIM), "mlp.gate_proj": (HIDDEN, DIM), "mlp.up_proj": (HIDDEN, DIM),
        "mlp.down_proj": (DIM, HIDDEN), "input_layernorm": (DIM,), "post_attention_layernorm": (DIM,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, DIM), "lm_head.weight": (VOCAB, DIM)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(LAYERS) for name, shape in of_layer.items()}
    return shapes | {"model.norm.weight": (DIM,)}


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 5e5, "hidden_act": "silu",
}  # fmt: skip


@pytest.fixture
def no_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        pytest.fail("the values of a tensor were read")

    monkeypatch.setattr(Checkpoint, "read", read)


def shown(capsys: pytest.CaptureFixture[str], *args: str, code: int = 0) -> str:
    assert cli.main(["show", *args]) == code
    said = capsys.readouterr()
    return said.out if code == 0 else said.err


def test_json_has_exact_sizes_and_the_whole_spec(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(shown(capsys, "gpt2-124m", "--json"))
    assert (found["parameters"], found["state_bytes_per_token"]) == (124_439_808, 36 * 1024)
    assert sum(found["parameters_by_part"].values()) == found["parameters"]
    assert found["spec"]["spec"] == "Model"


def test_a_row_is_no_longer_than_the_context(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "gpt2-124m")
    assert "memory for 1 row of 1,024 tokens, in bfloat16" in said
    assert "  state          36.01 MiB\n" in said  # 36 MiB of keys and values, 8 KiB of positions and documents
    assert "has 1024 positions" in shown(capsys, "gpt2-124m", "--length", "2048", code=2)


def test_a_window_shows_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "llama3-8b", "--set", "decoder.blocks.*.attn.op.window=512", "--batch", "2")
    assert "memory for 2 rows of 8,192 tokens, in bfloat16" in said
    assert "  state          2 GiB\n" in said
    assert "its windows need  128 MiB" in said
    assert "windows" not in shown(capsys, "llama3-8b")


def test_a_family_lists_its_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert "gpt2 is a family; its sizes: gpt2-124m," in shown(capsys, "gpt2", code=2)


def test_a_name_in_other_capitals_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'bert-base'?" in shown(capsys, "BERT-base", code=2)


def test_a_model_that_decodes_nothing_has_no_state(capsys: pytest.CaptureFixture[str]) -> None:
    said = shown(capsys, "bert-base")
    assert "  state          none: it answers all at once\n" in said
    assert "state, in bfloat16" in shown(capsys, "mamba-130m")


def test_counts_stand_in_one_column(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [line for line in shown(capsys, "evoformer-48").splitlines() if line.startswith("  ") and line.endswith("%")]
    assert len(rows) == 11
    assert len({len(row) for row in rows}) == 1


def test_a_checkpoint_of_140_gb_is_shown_from_its_header(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_values: None
) -> None:
    header, at = dict[str, object](), 0
    for name, shape in llama_70b().items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at := at + 2 * prod(shape)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)  # no byte of it is on the disk
    (tmp_path / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    said = shown(capsys, str(tmp_path))
    assert "parameters  70,553,706,496 (70.6B)" in said
    assert "  weights        131.4 GiB" in said
    assert "  state          2.5 GiB" in said  # 320 KiB a token
    assert "model.safetensors, 131.4 GiB; tensors: BF16 100.0% in 723" in said
    assert "  context        8,192 tokens" in said
    assert "  licence        not stated" in said
    assert "no tokenizer.json there" in said
    assert "  chat template  none" in said


def test_a_gguf_file_is_shown_from_its_header(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, no_values: None
) -> None:
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(DIM)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(64)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e5)
    writer.add_license("llama3")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    size = 0
    for name, shape in llama_70b().items():
        matrix = "Q6_K" if name == "lm_head.weight" else "Q4_K"  # as llama.cpp stores them
        kind = gguf.GGMLQuantizationType["F32" if len(shape) == 1 else matrix]
        per, taken = gguf.GGML_QUANT_SIZES[kind]
        count = prod(shape) // per * taken
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None
        writer.add_tensor_info(theirs, shape, "float32", count, raw_dtype=kind)  # type: ignore[arg-type]
        size += count
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(path, path.stat().st_size + size + 32)
    said = shown(capsys, str(path), "--dtype", "float32", "--length", "100")
    assert "parameters  70,553,706,496 (70.6B)" in said
    assert "  weights        262.8 GiB" in said
    stored = "big.gguf, 37.22 GiB; tensors: Q4_K 98.5% in 561, Q6_K 1.5% in 1, F32 0.0% in 161"
    assert stored in " ".join(said.split())
    assert "  licence        llama3 (general.license)" in said
    assert "no tokenizer in it" in said
    assert "  context        8,192 tokens" in said


def test_the_end_of_a_text_is_told_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(tiny(SPECS["llama"]), tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(sentence_piece_model("bpe"))
    assert "ends at 2 </s>\n" in shown(capsys, str(tmp_path))


def test_a_folder_tells_its_tokenizer_template_and_licence(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(tiny(SPECS["llama"]), tmp_path)
    tokenizer_folder(tmp_path, CHATML)
    (tmp_path / "LICENSE").write_text("\n   # MIT License\n\nCopyright", encoding="utf-8")
    said = shown(capsys, str(tmp_path))
    assert "  licence        MIT License (LICENSE)" in said
    assert "  tokenizer      byte-level BPE, 260 ids, ends at 257 </s>" in said
    assert "  chat template  yes" in said
    assert "F64 100.0% in" in said
    for text, name in (
        ("---\nlicense: apache-2.0\n---\n# A model", "apache-2.0"),
        ("---\ntags:\n- license: no\nlicense: 'other'\nlicense_name: mine-1.0  # mine\n---\n", "mine-1.0"),
        ("---\r\nlicense: mit\r\n---\r\n", "mit"),
    ):
        (tmp_path / "README.md").write_bytes(text.encode())
        assert f"  licence        {name} (README.md)" in shown(capsys, str(tmp_path))
    found = json.loads(shown(capsys, str(tmp_path), "--json"))
    assert found["checkpoint"]["tokenizer"] == {"kind": "byte-level BPE", "size": 260, "ends": {"257": "</s>"}}
    assert found["checkpoint"]["chat_template"] is True
    assert found["memory"]["total"] == sum(found["memory"][part] for part in PARTS)


PARTS = ("weights", "state", "activations", "logits")


def test_what_is_wrong_with_a_part_is_told_in_its_place(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    save(tiny(SPECS["llama"]), tmp_path)
    Bytes().save(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(WeightsError) as caught, Checkpoint.open(tmp_path):
        pass
    said = shown(capsys, str(tmp_path))
    assert "".join(str(caught.value).split()) in "".join(said.split())
    assert "  tokenizer      bytes, 256 ids, without an end" in said
    weights.unlink()
    assert "no model.safetensors" in shown(capsys, str(tmp_path))


@pytest.mark.parametrize("name", ["deepseek-v3", "gemma3-4b", "t5-small"])
@pytest.mark.parametrize("width", [80, 60])
def test_lines_stay_within_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    whole = shown(capsys, name)
    monkeypatch.setenv("COLUMNS", str(width))
    said = shown(capsys, name)
    assert max(map(len, said.splitlines())) <= width
    strokes = str.maketrans("│├└─", "    ")
    assert said.translate(strokes).split() == whole.translate(strokes).split()
