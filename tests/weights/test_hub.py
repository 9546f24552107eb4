"""Models by their names on the hub: against a stand-in on this machine, never the network."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

import sublayer
from sublayer.cli.main import main
from sublayer.errors import SpecError, SublayerError, WeightsError
from sublayer.weights.gguf.write import write_gguf
from sublayer.weights.hub import HubName, local
from sublayer.weights.load import read_spec
from tests.hub import SHA, Hub, serving
from tests.tiny import tiny


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serves org/model (with what is not to be fetched), org/pickled, org/blocks, org/other and org/gated."""
    model = tiny(vocab=257).build(seed=1)
    folders = {f"org/{name}": tmp_path / "theirs" / name for name in ("model", "pickled", "blocks", "other")}
    for name in ("model", "pickled", "other"):
        sublayer.save(model, folders[f"org/{name}"], layout="hf")
    for name in ("pytorch_model.bin", "run.py", "model.h5", "onnx/config.json"):
        (folders["org/model"] / name).parent.mkdir(exist_ok=True)
        (folders["org/model"] / name).write_text("not to be fetched")
    sublayer.text.Bytes(("<|end|>",)).save(folders["org/model"])
    (folders["org/pickled"] / "model.safetensors").rename(folders["org/pickled"] / "pytorch_model.bin")
    folders["org/blocks"].mkdir()
    (folders["org/blocks"] / "q8_0.gguf").write_bytes(b"GGUF")
    config = folders["org/other"] / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "RetNetForCausalLM"))
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    with serving(Hub(folders, gated=("org/gated",))) as hub:
        at(hub.address, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # as it is for all other tests
        yield hub


def at(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What HF_ENDPOINT does, which is read when the library is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", address)
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + template[template.index("/{repo_id}") :])


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return list(model.parameters())


def test_a_name_of_the_hub_is_a_model(hub, tmp_path) -> None:
    found = sublayer.load("org/model")
    torch.testing.assert_close(weights(found), weights(tiny(vocab=257).build(seed=1)), rtol=0, atol=0)
    assert sorted(hub.fetched) == ["config.json", "model.safetensors", "tokenizer.json"]  # no code, no pickle
    folder = local("org/model")
    assert folder.is_relative_to(tmp_path / "cache")
    assert (folder / "model.safetensors").is_symlink()  # the hub's cache: one copy for all revisions
    assert len(hub.fetched) == 3  # once


def test_the_description_needs_no_weights_and_comes_before_them(hub) -> None:
    assert read_spec(Path("org/model"))[0].dim == 32
    assert "model.safetensors" not in hub.fetched
    with pytest.raises(SpecError, match="architecture 'RetNetForCausalLM' has no recipe"):
        local("org/other")
    assert "model.safetensors" not in hub.fetched


@pytest.mark.parametrize("revision", ["v1", SHA])
def test_a_revision_is_asked_for(revision: str, hub) -> None:
    assert local(f"org/model@{revision}", weights=False).name == SHA
    assert any(f"/{revision}" in line for line in hub.asked)


def test_a_folder_of_that_name_wins(hub) -> None:
    sublayer.save(tiny(vocab=31).build(), "org/model")
    assert sublayer.load("org/model").spec.vocab == 31
    with pytest.raises(WeightsError, match="org/modle: no such folder"):  # its folder is here: meant as a path
        sublayer.load("org/modle")
    assert not hub.asked


def test_a_gguf_file_is_asked_for_by_name(hub) -> None:
    assert local("org/blocks/q8_0.gguf").read_bytes() == b"GGUF"
    assert hub.fetched == ["q8_0.gguf"]
    with pytest.raises(WeightsError, match="org/blocks: the hub's model is of GGUF files; .* org/blocks/q8_0.gguf"):
        local("org/blocks")
    with pytest.raises(WeightsError, match="org/blocks/q4_0.gguf: the hub's model has no file q4_0.gguf"):
        local("org/blocks/q4_0.gguf")


def test_of_a_gguf_model_in_parts_all_are_fetched_from_whichever_folder_they_lie_in(hub) -> None:
    folder = hub.models["org/blocks"] / "f32"
    folder.mkdir()
    parts = write_gguf(tiny(vocab=257).build(seed=1), folder / "x.gguf", shard_size=50_000)
    (folder / "y-00001-of-00003.gguf").write_bytes(b"GGUF")
    found = sublayer.load(f"org/blocks/f32/{parts[1].name}")
    torch.testing.assert_close(weights(found), weights(tiny(vocab=257).build(seed=1)), rtol=0, atol=0)
    assert sorted(hub.fetched) == [path.name for path in parts]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "org/none: no such folder, and the hub has no such model"),
        ("org/gated", "org/gated: the hub gives this model to those who accepted its terms"),
        ("org/model@../../x", "org/model@../../x: no such folder$"),
        ("org/model@v2", "org/model@v2: the hub's model has no revision 'v2'"),
        ("org/pickled", "org/pickled: the hub's model has pickled weights alone .pytorch_model.bin., which can run"),
    ],
)
def test_what_the_hub_does_not_give_is_one_line(name: str, message: str, hub) -> None:
    with pytest.raises(WeightsError, match=message) as caught:
        sublayer.load(name)
    assert "\n" not in str(caught.value)
    assert "pytorch_model.bin" not in hub.fetched


def test_without_a_network_what_was_fetched_serves(hub, monkeypatch) -> None:
    fetched = local("org/model")
    with socket.socket() as closed:  # a port that no one listens at
        closed.bind(("127.0.0.1", 0))
        at(f"http://127.0.0.1:{closed.getsockname()[1]}", monkeypatch)
        assert local("org/model") == fetched
        with pytest.raises(WeightsError, match="org/none: no such folder, .* the hub cannot be reached") as caught:
            local("org/none")
    assert "\n" not in str(caught.value)


def test_offline_nothing_is_asked(hub, monkeypatch) -> None:
    fetched = local("org/model")
    hub.asked.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local("org/model") == fetched
    with pytest.raises(WeightsError, match="org/none: .* not in the hub's cache: HF_HUB_OFFLINE is set"):
        local("org/none")
    assert not hub.asked


@pytest.mark.parametrize(
    "name", ["model", "a/b/c", "/a/b", "./a", "../b", "a/b@", "-a/b", "a b/c", "a/", "org/m.bin/x"]
)
def test_what_can_only_be_a_path_is_not_asked_for(name: str, hub) -> None:
    assert local(name) == Path(name)
    assert not hub.asked


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("org/name", ("org/name", None, None)),
        ("org/name.1-B@refs/pr/1", ("org/name.1-B", None, "refs/pr/1")),
        ("org/name/q4.gguf@main", ("org/name", "q4.gguf", "main")),
    ],
)
def test_the_parts_of_a_name(name: str, parts: tuple, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert HubName.read(name) == parts
    assert str(HubName(*parts)) == name


def test_without_the_library_the_line_says_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(SublayerError, match="org/model: no such folder; to fetch .* pip install huggingface_hub"):
        sublayer.load("org/model")


def test_commands_take_names_of_the_hub(hub, tmp_path) -> None:
    """A process of its own, for HF_ENDPOINT is read once."""
    settings = {"HF_ENDPOINT": hub.address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "sublayer", "generate", "org/model@v1", "--prompt", "a", "--max-tokens", "3"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, env=os.environ | settings, check=False)
    assert done.returncode == 0, done.stderr
    assert '"prompt_ids": [256, 97]' in done.stdout
    assert len(hub.fetched) == 3


def test_show_fetches_descriptions_alone(hub, capsys) -> None:
    (hub.models["org/model"] / "README.md").write_text("---\nlicense: mit\n---\n")
    assert main(["show", "org/model"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "files not fetched: they stay on the hub until the model is loaded" in said
    assert "licence mit (README.md)" in said
    assert sorted(hub.fetched) == ["README.md", "config.json", "tokenizer.json"]
