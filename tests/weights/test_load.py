"""Loading: what is in the files is what is in the model, and nothing else is taken for it."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, LlamaConfig, MixtralConfig

import sublayer
from sublayer.errors import SpecError, SublayerError, UsageError, WeightsError
from tests.oracle import close, compare, oracle, raised, saved
from tests.tiny import tiny

IDS = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
HEADS = {GPT2Config: "transformer.wte.weight", LlamaConfig: "model.embed_tokens.weight"}
BOTH = pytest.mark.parametrize("family", [GPT2Config, LlamaConfig])


def edit(folder, **changes: torch.Tensor | None) -> None:
    """Rewrites model.safetensors with tensors added, replaced, or (None) taken out."""
    tensors = load_file(folder / "model.safetensors") | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / "model.safetensors")


def edit_config(folder, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# --- tied heads ---


@BOTH
def test_a_tied_head_stored_twice_is_tied_again(family, tmp_path) -> None:
    theirs = oracle(family, tie_word_embeddings=True)
    saved(theirs, tmp_path)
    table = load_file(tmp_path / "model.safetensors")[HEADS[family]]
    edit(tmp_path, **{"lm_head.weight": table.clone()})
    with warnings.catch_warnings(action="error"):
        ours = sublayer.load(tmp_path, dtype=torch.float64)
    assert ours.spec.tied
    assert "head.weight" not in dict(ours.named_parameters())
    compare(theirs, ours, tmp_path, IDS)


@BOTH
def test_a_head_that_differs_from_the_tied_table_is_kept_with_a_warning(family, tmp_path) -> None:
    """The flag says tied, the file holds another head: dropping it would lose weights silently."""
    theirs = oracle(family, tie_word_embeddings=False)
    saved(theirs, tmp_path)
    edit_config(tmp_path, tie_word_embeddings=True)
    with pytest.warns(UserWarning, match="lm_head.weight differs from .* kept apart"):
        ours = sublayer.load(tmp_path, dtype=torch.float64)
    assert not ours.spec.tied
    compare(theirs, ours, tmp_path, IDS)


@BOTH
def test_a_head_of_another_dtype_that_is_the_same_table_is_tied(family, tmp_path) -> None:
    saved(oracle(family, tie_word_embeddings=True), tmp_path)
    table = load_file(tmp_path / "model.safetensors")[HEADS[family]].bfloat16()
    edit(tmp_path, **{HEADS[family]: table, "lm_head.weight": table.float()})
    assert sublayer.load(tmp_path).spec.tied


@BOTH
def test_an_untied_model_without_its_head_is_refused(family, tmp_path) -> None:
    saved(oracle(family, tie_word_embeddings=True), tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(WeightsError, match="lm_head.weight missing"):
        sublayer.load(tmp_path)


# --- shards ---


def test_shards_with_an_index_are_one_model(tmp_path) -> None:
    theirs = oracle(LlamaConfig)
    saved(theirs, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    compare(theirs, sublayer.load(tmp_path, dtype=torch.float64), tmp_path, IDS)


def test_a_whole_file_is_read_before_an_index(tmp_path) -> None:
    """As transformers does it, so that both read the same weights of one folder."""
    theirs = oracle(LlamaConfig)
    saved(theirs, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    compare(theirs, sublayer.load(tmp_path, dtype=torch.float64), tmp_path, IDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda index: index["weight_map"].update({"model.norm.weight": "../model.safetensors"}),
            "not a safetensors file",
        ),
        (lambda index: index["weight_map"].update({"model.norm.weight": "/etc/passwd"}), "not a safetensors file"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "..\\\\a.safetensors"}), "missing"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "a.bin"}), "not a safetensors file"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "absent.safetensors"}), "is missing"),
        (lambda index: index["weight_map"].update({"model.norm.weight": 3}), "not a table of file names"),
        (lambda index: index.update(weight_map=[]), "not a table of file names"),
        (lambda index: index.pop("weight_map"), "weight_map is missing"),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(change, message: str, tmp_path) -> None:
    saved(oracle(LlamaConfig), tmp_path, max_shard_size="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=message):
        sublayer.load(tmp_path)


def test_a_tensor_in_two_shards_is_refused(tmp_path) -> None:
    saved(oracle(LlamaConfig), tmp_path, max_shard_size="40KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    save_file(load_file(second) | load_file(first), second)
    with pytest.raises(WeightsError, match=rf"{second.name}: tensor .* is also in {first.name}"):
        sublayer.load(tmp_path)


# --- tensors that do not fit ---


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.norm.weight", None, "tensor model.norm.weight missing from the checkpoint"),
        ("model.norm.bias", torch.ones(32), "tensor model.norm.bias has no place in the model"),
        (
            "model.norm.weight",
            torch.ones(31),
            r"model.norm.weight is \[31\], which does not give .*decoder.norm.weight \[32\]",
        ),
        ("model.norm.weight", torch.ones(32, 1), r"is \[32, 1\]"),
        ("model.norm.weight", torch.ones(()), r"is \[\]"),
        ("model.norm.weight", torch.ones(32, dtype=torch.int8), "holds I8, not floating-point weights"),
        ("model.norm.weight", torch.ones(32, dtype=torch.bool), "holds BOOL, not floating-point weights"),
        ("model.layers.2.self_attn.q_proj.weight", torch.ones(32, 32), "layers.2.self_attn.q_proj.weight has no place"),
        ("model.layers.1.self_attn.q_proj.weight", None, "layers.1.self_attn.q_proj.weight missing"),
        ("model.layers.0.self_attn.k_proj.weight", torch.ones(32, 32), r"is \[32, 32\].*k.weight \[16, 32\]"),
    ],
)
def test_a_llama_tensor_that_does_not_fit_is_named(name, value, message, tmp_path) -> None:
    saved(oracle(LlamaConfig), tmp_path)
    edit(tmp_path, **{name: value})
    with pytest.raises(WeightsError, match=message) as caught:
        sublayer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [torch.ones(32, 32), torch.ones(2), torch.ones(32, 2), torch.ones(32, 96, 1), torch.ones(()), torch.ones(96, 32),
     torch.ones(32, 95), torch.ones(0, 96)],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_fused_gpt2_tensor_that_does_not_fit_is_named(value, kind: str, tmp_path) -> None:
    saved(oracle(GPT2Config), tmp_path)
    edit(tmp_path, **{f"transformer.h.1.attn.c_attn.{kind}": value})
    with pytest.raises(WeightsError, match=rf"h.1.attn.c_attn.{kind} is \[.*q.{kind}") as caught:
        sublayer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_config_far_larger_than_the_file_is_refused_before_memory_is_taken(tmp_path, monkeypatch) -> None:
    saved(oracle(LlamaConfig), tmp_path)
    edit_config(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 20)  # 4 TiB of parameters
    with pytest.raises(WeightsError, match="which does not give the model's"):
        sublayer.load(tmp_path)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (LlamaConfig, {"num_hidden_layers": 9_999}, "the description has 9999 layers, the checkpoint 21 tensors"),
        (MixtralConfig, {"num_local_experts": 1 << 30}, "has 1073741824 experts, the checkpoint 41 tensors"),
    ],
)
def test_a_config_of_far_more_parts_than_the_file_is_refused_before_they_are_built(
    family, changes, message: str, tmp_path
) -> None:
    saved(oracle(family), tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(WeightsError, match=message):
        sublayer.load(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_weights_are_converted_to_the_dtype_asked_for(dtype, tmp_path) -> None:
    theirs = oracle(LlamaConfig)
    ours = sublayer.load(saved(theirs, tmp_path), dtype=dtype)
    assert {parameter.dtype for parameter in ours.parameters()} == {dtype}
    wanted = theirs.get_parameter("model.embed_tokens.weight").to(dtype)
    assert torch.equal(dict(ours.named_parameters())["decoder.embed.tokens.weight"], wanted)
    assert not ours.training


# --- files that are broken ---


def cuts(data: bytes) -> list[int]:
    """Prefix lengths of every class: nothing, within the header's length, the header, at its end, within the data."""
    header = 8 + int.from_bytes(data[:8], "little")
    return [0, 1, 7, 8, 9, header // 2, header - 1, header, header + 1, (header + len(data)) // 2, len(data) - 1]


@pytest.mark.parametrize("which", range(11))
@pytest.mark.parametrize("layout", ["hf", "sublayer"])
def test_a_file_cut_short_is_refused(which: int, layout, tmp_path) -> None:
    sublayer.save(tiny().build(), tmp_path, layout=layout)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: cuts(data)[which]])
    with pytest.raises(WeightsError, match=r"model\.safetensors: not a whole safetensors file") as caught:
        sublayer.load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "last.ckpt", "weights.pkl"])
def test_pickles_are_never_read(name: str, tmp_path) -> None:
    class Trap:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    saved(oracle(LlamaConfig), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(Trap(), tmp_path / name)
    with pytest.raises(WeightsError, match=f"{name}: pickled weights can run code and are not read"):
        sublayer.load(tmp_path)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda f: None, WeightsError, "neither spec.json .* nor config.json"),
        (lambda f: (f / "config.json").write_text("{"), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[1]"), WeightsError, "expected a JSON object"),
        (lambda f: (f / "config.json").write_bytes(b'{"a": "\xff"}'), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[" * 100_000), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text('{"a":' * 100_000), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("1" * 10_000), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").mkdir(), WeightsError, "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("{}"), SpecError, "names no architecture"),
        (lambda f: (f / "config.json").write_text('{"architectures": []}'), SpecError, "names no architecture"),
        (lambda f: (f / "config.json").write_text('{"architectures": ["LlamaForCausaLM"]}'), SpecError,
         "did you mean 'LlamaForCausalLM'"),
        (lambda f: (f / "spec.json").write_text("{}"), SpecError, "a spec needs the key 'spec'"),
        (lambda f: (f / "spec.json").write_text('{"spec": "Rope"}'), SpecError, "expected a Model"),
        (lambda f: (f / "spec.json").write_text('{"spec": "Modell"}'), SpecError, "did you mean 'Model'"),
        (lambda f: (f / "spec.json").write_text(json.dumps(tiny().to_json())), WeightsError,
         "no model.safetensors"),
    ],
)  # fmt: skip
def test_a_folder_that_holds_no_model_is_one_line(make, error, message: str, tmp_path) -> None:
    make(tmp_path)
    with pytest.raises(error, match=message) as caught:
        sublayer.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_path_that_is_no_folder_is_one_line(tmp_path) -> None:
    with pytest.raises(WeightsError, match="no such folder"):
        sublayer.load(tmp_path / "absent")
    for name, said in {
        "file": "expected a folder or a .gguf file",
        "model.safetensors": "expected the folder that holds it",
        "weights.pt": "pickled weights can run code and are not read",
    }.items():
        (tmp_path / name).write_text("")
        with pytest.raises(WeightsError, match=f"{name}: {said}"):
            sublayer.load(tmp_path / name)
    with pytest.raises(WeightsError, match=r"no such folder \(did you mean 'weights.pt'\?\)"):
        sublayer.load(tmp_path / "weight")


def test_a_json_file_beyond_any_real_one_is_not_read(tmp_path) -> None:
    with open(tmp_path / "config.json", "wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(WeightsError, match="cannot be read as JSON: [0-9]+ bytes, more than 67108864"):
        sublayer.load(tmp_path)


@pytest.mark.parametrize("at", ["model.safetensors", "config.json"])
def test_bytes_changed_anywhere_end_in_one_line_or_a_model(at: str, tmp_path) -> None:
    """Hundreds of single-byte changes: each is refused in one line, or is still a model."""
    model = tiny(layers=1, dim=8, hidden=8, vocab=11).build()
    sublayer.save(model, tmp_path, layout="hf")
    data = (tmp_path / at).read_bytes()
    reach = min(len(data), 8 + int.from_bytes(data[:8], "little")) if at.endswith("safetensors") else len(data)
    generator = torch.Generator().manual_seed(0)
    refusals = []
    for _ in range(300):
        place, byte = (int(torch.randint(high, (), generator=generator)) for high in (reach, 256))
        (tmp_path / at).write_bytes(data[:place] + bytes([byte]) + data[place + 1 :])
        try:
            with warnings.catch_warnings(action="ignore"):
                sublayer.load(tmp_path)
        except SublayerError as error:
            refusals.append(str(error))
    assert len(refusals) > 100
    assert not any("\n" in refusal for refusal in refusals)


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "xpu"])
def test_a_device_that_is_not_there_is_one_line(device: str, tmp_path) -> None:
    sublayer.save(tiny().build(), tmp_path)
    with pytest.raises(UsageError, match=f"device '{device}' cannot be used") as caught:
        sublayer.load(tmp_path, device=device)
    assert "\n" not in str(caught.value)


# --- Sublayer's own layout ---


def test_own_layout_takes_no_stranger_for_a_tied_head(tmp_path) -> None:
    sublayer.save(tiny(tied=True).build(), tmp_path)
    edit(tmp_path, **{"lm_head.weight": torch.ones(97, 32)})
    with pytest.raises(WeightsError, match="lm_head.weight has no place in the model"):
        sublayer.load(tmp_path)


def test_own_layout_in_shards_is_read_too(tmp_path) -> None:
    model = tiny().build(seed=3)
    sublayer.save(model, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for part, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / part)
    index = {"weight_map": {name: part for part, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    with torch.no_grad():
        torch.testing.assert_close(sublayer.load(tmp_path)(IDS), model(IDS), rtol=0, atol=0)


def test_oracle_raises_every_cast() -> None:
    """The oracle itself: inside, theirs loses nothing to float32, which a difference at 1e-10 would show."""
    theirs = oracle(LlamaConfig)
    with raised():
        inside = theirs(IDS, use_cache=False).logits
    outside = theirs(IDS, use_cache=False).logits
    assert inside.dtype == torch.float64
    with pytest.raises(AssertionError):
        close(outside, inside)
