"""Episodes on disk: read step by step, refused by name, in an order that the seed alone decides."""

from pathlib import Path

import numpy as np
import pytest
import torch

from sublayer.data.episodes import Moments, all_actions, episodes, parted, pixels, write_episode
from sublayer.errors import InputError
from sublayer.files import write_tensors


def written(folder: Path, lengths: list[int]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, length in enumerate(lengths):
        actions = np.arange(2 * length, dtype=np.float32).reshape(length, 2) + 100 * i
        images = (np.arange(length * 4 * 6 * 3) % 251 + i).astype(np.uint8).reshape(length, 4, 6, 3)
        write_episode(folder / f"{i:02}.safetensors", actions, images, f"task {i}")
    return folder


def test_an_episode_is_read_back_step_by_step(tmp_path: Path) -> None:
    found = episodes(str(written(tmp_path / "robot", [3, 5])))
    assert [(one.steps, one.dimensions, one.shape, one.instruction) for one in found] == [
        (3, 2, (1, 3, 4, 6), "task 0"), (5, 2, (1, 3, 4, 6), "task 1"),
    ]  # fmt: skip
    assert found[1].actions(1, 3).tolist() == [[102, 103], [104, 105]]
    whole = (np.arange(5 * 72) % 251 + 1).astype(np.uint8).reshape(5, 1, 4, 6, 3)
    assert np.array_equal(found[1].images(4).numpy(), whole[4])
    assert all_actions(found).shape == (8, 2)
    assert len(episodes(f"{tmp_path}/robot/*1.safetensors")) == 1
    with pytest.raises(InputError, match="no episodes"):
        episodes(str(tmp_path), without=tmp_path / "robot")


def test_several_cameras_and_pixels(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (2, 3, 4, 6, 1), dtype=np.uint8)
    write_episode(tmp_path / "a.safetensors", np.zeros((2, 1)), images)
    (one,) = episodes(str(tmp_path / "a.safetensors"))
    assert (one.shape, one.instruction) == ((3, 1, 4, 6), "")
    seen = pixels(one.images(1))
    assert seen.shape == (3, 1, 4, 6)
    torch.testing.assert_close(seen[2, 0], torch.from_numpy(images[1, 2, ..., 0]).float() / 255 * 2 - 1)
    with pytest.raises(InputError, match="uint8"):
        pixels(torch.zeros(2, 2, 1))


def test_what_is_no_episode_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"bad\.safetensors: not a safetensors file"):
        episodes(str(path))
    for tensors, said in (
        ({"images": torch.zeros(2, 4, 4, 3, dtype=torch.uint8)}, r"actions are floating \[T, A\], got none"),
        ({"actions": torch.zeros(2, 3, dtype=torch.long)}, r"actions are floating \[T, A\], got I64"),
        ({"actions": torch.zeros(0, 3)}, r"got F32 \[0, 3\]"),
        ({"actions": torch.zeros(2, 3), "images": torch.zeros(3, 4, 4, 3, dtype=torch.uint8)}, "images are uint8"),
        ({"actions": torch.zeros(2, 3), "images": torch.zeros(2, 4, 4, 3)}, "got F32"),
    ):
        write_tensors(path, tensors, {})
        with pytest.raises(InputError, match=said):
            episodes(str(path))
    write_tensors(path, {"actions": torch.tensor([[1.0], [torch.nan]])}, {})
    (one,) = episodes(str(path))
    with pytest.raises(InputError, match="not all finite"):
        one.actions()
    write_episode(tmp_path / "other.safetensors", np.zeros((2, 4)))
    with pytest.raises(InputError, match=r"other\.safetensors: actions of 4 dimensions"):
        episodes(str(tmp_path))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [4]) / "00.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(InputError, match="not a safetensors file"):
        episodes(str(path))


def test_an_epoch_has_every_moment_once(tmp_path: Path) -> None:
    found = episodes(str(written(tmp_path, [3, 1, 5])))
    moments = Moments(found, steps=2, seed=4)
    assert len(moments) == 2 + 4
    every = [(episode.path.name, at) for episode, at in map(moments.__getitem__, range(6))]
    assert every == [("00.safetensors", 0), ("00.safetensors", 1), *(("02.safetensors", at) for at in range(4))]
    epochs = [[(one.path.name, at) for one, at in map(moments.drawn, range(e * 6, e * 6 + 6))] for e in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == every
    assert epochs[0] != epochs[1]
    again = Moments(found, steps=2, seed=4)
    assert [(one.path.name, at) for one, at in map(again.drawn, range(6))] == epochs[0]
    with pytest.raises(InputError, match="no episode has 6 steps"):
        Moments(found, steps=6)


def test_episodes_are_held_out_whole(tmp_path: Path) -> None:
    found = episodes(str(written(tmp_path, [2] * 40)))
    training, held = parted(found, 0.3)
    assert {*training} | {*held} == {*found}
    assert not {*training} & {*held}
    assert 4 < len(held) < 20
    assert parted(found[:20], 0.3)[1] == [one for one in held if one in found[:20]]
    with pytest.raises(InputError, match="too few episodes.*larger data.held"):
        parted(found[:1], 0.3)
