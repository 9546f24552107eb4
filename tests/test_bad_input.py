"""A user's mistake, as the user meets it: the command ends with one line on stderr and exit code 2 or 1.

2: a request that cannot be meant. 1: a job that failed. What Python callers meet is tested beside each module.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import sublayer
from sublayer.cli.main import main
from sublayer.recipes import gpt2, llama
from sublayer.recipes.gpt2 import TINY as TINY_GPT2
from sublayer.recipes.llama import TINY

TENSORS = "model.safetensors"


@pytest.fixture
def gpt2_folder(tmp_path: Path) -> Path:
    """A checkpoint in Hugging Face's layout; its table has 64 positions."""
    sublayer.save(gpt2(**TINY_GPT2).build(), tmp_path / "model", layout="hf")
    return tmp_path / "model"


def refused(capsys: pytest.CaptureFixture, code: int, message: str, *args: object) -> None:
    """The command ends with this exit code and one line that holds the message; it prints nothing else."""
    assert main([str(arg) for arg in args]) == code
    out, err = capsys.readouterr()
    assert out.strip() == ""
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("sublayer: ")
    assert message in lines[0]


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    held = load_file(folder / TENSORS) | changes
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / TENSORS)


# --- specs ---


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["gpt2-124"], "unknown model 'gpt2-124' (did you mean 'gpt2-124m'?)"),
        (["no such folder/at all"], "no such folder/at all: no such file or folder"),
        (["llama.ggf"], "llama.ggf: no such file or folder; and of the published sizes, none is called that"),
        (["gpt2-124m", "--set", "dmi=3"], "dmi: unknown key of Model (did you mean 'dim'?)"),
        (["gpt2-124m", "--set", "dim"], "dim: an override reads path=value"),
        (["gpt2-124m", "--set", "dim=wide"], "Model.dim: expected int, got 'wide'"),
        (["gpt2-124m", "--set", "decoder.blocks.*.attn.op.heads=5"], "heads=5 do not divide the width 768"),
        (["llama3-8b", "--set", "decoder.blocks.*.attn.op.kv_heads=3"], "heads=32 is not a multiple of kv_heads=3"),
        (["llama3-8b", "--set", "decoder.blocks.*.attn.op.window=0"], "window=0 hides everything"),
        (["llama3-8b", "--set", "decoder.blocks.99.attn.op.window=8"], "no such element (there are 32, from 0)"),
        (["gpt2-124m", "--set", f"dim={1 << 62}"], "sizes beyond any memory"),
        (["gpt2-124m", "--set", "decoder.norm=" + "[" * 5000], "nested deeper than 64 levels"),
        (["gpt2-124m", "--length", "0"], "--length"),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else None,
)
def test_show_of_what_is_no_model(args: list[str], message: str, capsys) -> None:
    refused(capsys, 2, message, "show", *args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_embed": 32}, "config.json sets n_embed=32, which this recipe does not model"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not modelled"),
        ({"architectures": ["GPT2LMHeadModl"]}, "'GPT2LMHeadModl' has no recipe (did you mean 'GPT2LMHeadModel'?)"),
        ({"architectures": None}, "names no architecture"),
        ({"n_head": 5}, "heads=5 do not divide the width 32"),
        ({"n_layer": 10**9}, "n_layer=1000000000 is not a whole number from 1 to 10000"),
        ({"n_head": {"a": 1}}, "n_head={'a': 1} is not a whole number"),
    ],
)  # fmt: skip
def test_show_of_a_config_that_is_not_modelled(changes: dict, message: str, gpt2_folder, capsys) -> None:
    edit_json(gpt2_folder / "config.json", **changes)
    refused(capsys, 2, message, "show", gpt2_folder)


def test_show_of_a_spec_file_that_is_no_model(tmp_path, capsys) -> None:
    sublayer.save(llama(**TINY).build(), tmp_path)
    edit_json(tmp_path / "spec.json", dime=3)
    refused(capsys, 2, f"{tmp_path / 'spec.json'}: dime: unknown key of Model (did you mean 'dim'?)", "show", tmp_path)
    (tmp_path / "spec.json").write_text('{"spec": "Model", "decoder": ' + '{"a":' * 100_000)
    refused(capsys, 1, f"{tmp_path / 'spec.json'}: cannot be read as JSON", "show", tmp_path)


# --- prompts ---


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ids", "1,97"], "token id 97 at place 1 is outside the vocabulary of 97"),
        (["--ids", "1,-1"], "token id -1 at place 1 is outside the vocabulary of 97"),
        (
            ["--ids", ",".join(["1"] * 65), "--max-tokens", "1"],
            "the prompt of 65 tokens is longer than the 64 positions",
        ),
    ],
)
def test_a_prompt_that_the_model_cannot_take(options: list[str], message: str, gpt2_folder, capsys) -> None:
    """Ids outside the vocabulary, a prompt longer than the positions."""
    refused(capsys, 1, message, "generate", gpt2_folder, *options)


# --- checkpoints ---


def shorten(share: float) -> Callable[[Path], object]:
    def cut(folder: Path) -> None:
        data = (folder / TENSORS).read_bytes()
        (folder / TENSORS).write_bytes(data[: int(share * len(data))])

    return cut


def point_outside(folder: Path) -> None:
    (folder / TENSORS).rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"transformer.wte.weight": "../elsewhere.safetensors"}})
    )


def only_pickles(folder: Path) -> None:
    torch.save(load_file(folder / TENSORS), folder / "pytorch_model.bin")
    (folder / TENSORS).unlink()


CHECKPOINTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (shorten(0), "model.safetensors: not a whole safetensors file"),
    "cut in the header": (shorten(0.02), "model.safetensors: not a whole safetensors file"),
    "cut in the middle": (shorten(0.5), "model.safetensors: not a whole safetensors file"),
    "cut at the end": (shorten(0.9999), "model.safetensors: not a whole safetensors file"),
    "huge header": (
        lambda f: (f / TENSORS).write_bytes(b"\xff" * 64),
        "model.safetensors: not a whole safetensors file",
    ),
    "no weights": (lambda f: (f / TENSORS).unlink(), "no model.safetensors and no model.safetensors.index.json"),
    "pickles only": (only_pickles, "pytorch_model.bin: pickled weights can run code and are not read"),
    "index outside": (point_outside, "'../elsewhere.safetensors' is not a safetensors file of this folder"),
    "missing tensor": (
        lambda f: edit_tensors(f, **{"transformer.ln_f.bias": None}),
        "tensor transformer.ln_f.bias missing from the checkpoint",
    ),
    "extra tensor": (
        lambda f: edit_tensors(f, **{"transformer.ln_g.bias": torch.ones(32)}),
        "tensor transformer.ln_g.bias has no place in the model",
    ),
    "misshapen tensor": (
        lambda f: edit_tensors(f, **{"transformer.h.0.attn.c_attn.weight": torch.ones(32, 32)}),
        "transformer.h.0.attn.c_attn.weight is [32, 32], which does not give the model's",
    ),
    "integer tensor": (
        lambda f: edit_tensors(f, **{"transformer.ln_f.bias": torch.ones(32, dtype=torch.int8)}),
        "transformer.ln_f.bias holds I8, not floating-point weights",
    ),
    "no description": (lambda f: (f / "config.json").unlink(), "neither spec.json (Sublayer) nor config.json"),
    "broken description": (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read as JSON"),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_that_is_not_what_it_says(name: str, gpt2_folder, capsys) -> None:
    breaks, message = CHECKPOINTS[name]
    breaks(gpt2_folder)
    refused(capsys, 1, message, "generate", gpt2_folder, "--ids", "1,2")


# --- the process itself ---


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["show", "lama3-8b"], 2, "unknown model 'lama3-8b' (did you mean 'llama3-8b'?)"),
        (["generate", "{folder}", "--ids", "1,2"], 1, "model.safetensors: not a whole safetensors file"),
    ],
)
def test_the_process_ends_with_one_line_and_the_code(args: list[str], code: int, message: str, gpt2_folder) -> None:
    shorten(0.5)(gpt2_folder)
    command = [sys.executable, "-m", "sublayer", *(arg.format(folder=gpt2_folder) for arg in args)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == code
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert message in done.stderr
