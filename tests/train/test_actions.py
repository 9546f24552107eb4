"""Behaviour cloning: what is asked, whole runs, a robot that reaches, a series that is foretold."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sublayer
from sublayer.data.bins import Bins, Series
from sublayer.data.episodes import pixels, write_episode
from sublayer.decoding import act, forecast
from sublayer.errors import InputError, UsageError
from sublayer.nn.sublayer import ModelOp
from sublayer.recipes import actions, llama
from sublayer.recipes.actions import images_first
from sublayer.spec import Spec
from sublayer.text import Tokenizer, load_tokenizer
from sublayer.train import train
from sublayer.train.actions import BehaviourCloning, told
from sublayer.train.config import run_of
from sublayer.train.episodes import EpisodeFeed
from sublayer.train.optim import AdamW
from sublayer.train.schedule import Schedule
from sublayer.train.update import update
from sublayer.train.view import Quiet

TINY: dict[str, Any] = {"dim": 32, "layers": 1, "heads": 2, "kv_heads": 2, "hidden": 48}


# --- what is asked ---


def test_only_actions_are_asked() -> None:
    batch = told([[7, 8, 9], [5]], [[20, 21], [22, 23]])
    assert batch.inputs.tolist() == [[7, 8, 9, 20, 21], [5, 22, 23, 0, 0]]
    assert batch.labels.tolist() == [[-100, -100, 20, 21, -100], [22, 23, -100, -100, -100]]
    assert batch.step.segment is not None
    assert batch.step.segment.tolist() == [[1] * 5, [1, 1, 1, 0, 0]]
    assert told([[]], [[3, 4, 5]]).labels.tolist() == [[4, 5, -100]]


def test_the_loss_is_that_of_actions_behind_their_image() -> None:
    """Row by row: the log-probability of each action, given image, instruction and the actions before it."""
    model = actions(**TINY, vocab=40, image=8, patch=4).build(dtype=torch.float64)
    images = torch.randn(2, 2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    instructions, done = [[7, 8, 9], [5]], [[20, 21], [22, 23]]
    loss = BehaviourCloning()(model, told(instructions, done, images))
    expected = torch.zeros((), dtype=torch.float64)
    for image, text, ids in zip(images, instructions, done, strict=True):
        for i, token in enumerate(ids):
            stream = images_first(model.spec, torch.tensor([[*text, *ids[:i]]]), image[None])
            expected = expected - model(stream)[0, -1].log_softmax(-1)[token]
    torch.testing.assert_close(loss.sum, expected)
    assert int(loss.tokens) == 4


def test_what_it_cannot_train_is_refused() -> None:
    with pytest.raises(InputError, match="reads no images"):
        BehaviourCloning()(llama(**TINY, vocab=40).build(), told([[1]], [[2]], torch.zeros(1, 1, 3, 8, 8)))
    with pytest.raises(UsageError, match="sees what it is to predict"):
        BehaviourCloning().fits(llama(**TINY, vocab=40).override("decoder.blocks.*.attn.op.causal=false"))
    with pytest.raises(UsageError, match="trains decoders with a head"):
        BehaviourCloning().fits(llama(**TINY, vocab=40).replace(head=None))


# --- deciding ---


def test_an_action_is_the_likeliest_bin_after_the_last() -> None:
    """Each dimension by a whole forward pass of its own, in rows of several lengths."""
    bins = Bins((0.0, -1.0, 5.0), (1.0, 1.0, 9.0), 16, first=24)
    model = actions(**TINY, vocab=40, image=8, patch=4).build(seed=3).eval()
    images = torch.randint(256, (3, 8, 8, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    texts = [[1, 2, 3, 4], [5], [6, 7]]
    found = act(model, images, texts, bins, steps=2)
    assert found.shape == (3, 2, 3)
    for row, text in enumerate(texts):
        ids = list(text)
        with torch.no_grad():
            for _ in range(6):
                stream = images_first(model.spec, torch.tensor([ids]), pixels(images[row])[None, None])
                ids.append(24 + int(model(stream)[0, -1, 24:].argmax()))
        assert np.array_equal(found[row], bins.decode(np.array(ids[len(text) :]).reshape(2, 3)))
    with pytest.raises(UsageError, match="bins' ids end at 41"):
        act(model, images, texts, Bins((0.0,), (1.0,), 17, first=24))
    with pytest.raises(UsageError, match="at least one id"):
        act(model, images, [[1], [], [2]], bins)
    with pytest.raises(UsageError, match="for 3 rows"):
        act(model, images[:2], texts, bins)


# --- runs ---


def clone(tmp_path: Path, **sections: Any) -> Any:
    table: dict[str, Any] = {
        "out": str(tmp_path / "out"), "objective": {"kind": "behaviour_cloning", "bins": 16, "tails": 0.0},
        "tokenizer": {"kind": "bytes"}, "optimizer": {"kind": "adamw", "rate": 0.01}, "schedule": {"warmup": 5},
        "eval": {"every": 1000, "tokens": 200}, "save": {"every": 1000},
    }  # fmt: skip
    return train(run_of(table | sections))


def test_a_run_clones_what_an_image_and_a_word_say(tmp_path: Path) -> None:
    """The action is the place of the bright pixel, or its mirror image when the word says so."""
    draw = np.random.default_rng(0)
    for number in range(24):
        (tmp_path / "data").mkdir(exist_ok=True)
        places, mirror = draw.integers(0, 4, 6), number % 2 == 1
        images = np.zeros((6, 4, 4, 1), np.uint8)
        images[np.arange(6), places, 1] = 255
        done = np.where(mirror, 3 - places, places)[:, None].astype(np.float32)
        write_episode(tmp_path / f"data/{number}.safetensors", done, images, "no" if mirror else "yes")
    result = clone(
        tmp_path,
        model={"recipe": "actions", **TINY, "layers": 2, "patch": 4},
        data={"paths": str(tmp_path / "data"), "held": 0.2},
        train={"steps": 70, "batch": 24},
    )
    assert result.score.loss < 0.1
    model, tokenizer = sublayer.load(result.folder), load_tokenizer(result.folder)
    bins = Spec.from_json(json.loads((result.folder / "bins.json").read_text()))
    assert isinstance(bins, Bins)
    image = np.zeros((2, 4, 4, 1), np.uint8)
    image[:, 3, 1] = 255
    found = act(model, image, [tokenizer.encode(text, framed=True) for text in ("yes", "no")], bins)
    assert found[:, 0, 0].round().tolist() == [3, 0]


@pytest.fixture
def few(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "data").mkdir()
    for number in range(8):
        write_episode(tmp_path / f"data/{number}.safetensors", np.full((5, 1), number / 8), None, "a long text")
    return {
        "model": {"recipe": "actions", **TINY}, "data": {"paths": str(tmp_path / "data"), "held": 0.3},
        "train": {"steps": 1, "batch": 4},
    }  # fmt: skip


def test_series_are_episodes_without_images(tmp_path: Path, few: dict[str, Any]) -> None:
    result = clone(tmp_path, objective={"kind": "behaviour_cloning", "bins": 8, "steps": 3}, **few)
    assert result.score.tokens % 3 == 0


def test_a_batch_depends_on_seed_and_step_alone(tmp_path: Path, few: dict[str, Any]) -> None:
    """Whatever came before; and ranks share it."""

    def feed(seed: int) -> EpisodeFeed:
        table = few | {"out": str(tmp_path / f"out{seed}"), "seed": seed, "objective": "behaviour_cloning"}
        made = EpisodeFeed(run_of(table | {"tokenizer": {"kind": "bytes"}}), tmp_path / f"out{seed}", Quiet())
        made.open()
        return made

    first, again, other = feed(0), feed(0), feed(1)
    batches = [first.at(step) for step in range(4)]
    batch, where = again.at(3)
    assert torch.equal(batch.inputs, batches[3][0].inputs)
    assert where == batches[3][1]
    assert [where for _, where in batches] != [other.at(step)[1] for step in range(4)]
    shared = [first.at(3, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat([part.inputs for part, _ in shared]), batch.inputs)
    assert [place for _, places in shared for place in places] == where
    held = {str(episode.path) for episode in first.kept}
    assert not held & {place.partition(",")[0] for _, places in batches for place in places}


def test_faults_of_a_run_are_named(tmp_path: Path, few: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"raise data\.length"):
        clone(tmp_path, **few | {"data": few["data"] | {"length": 5}})
    with pytest.raises(UsageError, match="from one source"):
        clone(tmp_path / "b", **few | {"data": {"sources": [{"paths": str(tmp_path / "data")}] * 2}})
    with pytest.raises(UsageError, match=r"objective\.steps|steps=0"):
        clone(tmp_path / "c", **few | {"objective": {"kind": "behaviour_cloning", "steps": 0}})


# --- a series ---


def test_a_noisy_sine_is_foretold_better_than_by_its_last_value() -> None:
    """Chronos's ids through the same model, without images: the median of drawn continuations."""
    draw, series = np.random.default_rng(0), Series(count=60, limit=4.0)

    def sines(count: int, length: int) -> np.ndarray:
        start, size = draw.uniform(0, 12, (count, 1)), draw.uniform(1, 50, (count, 1))
        return size * (np.sin((np.arange(length) + start) * 2 * np.pi / 12) + 0.1 * draw.normal(size=(count, length)))

    model = llama(**TINY, vocab=series.size).build(seed=1)
    optimizer, schedule, steps = AdamW(rate=1e-2).build(model), Schedule(warmup=10), 150
    for step in range(steps):
        values = sines(16, 36)
        ids = series.encode(values, series.scale(values[:, :24])).tolist()
        optimizer.set_rate(schedule.factor(step, steps))
        update(model, [told([[]] * 16, ids)], BehaviourCloning(), optimizer)
    values = sines(24, 36)
    found = np.median(forecast(model, values[:, :24], 12, series, samples=9, seed=2), axis=1)
    size = np.abs(values[:, :24]).mean(1, keepdims=True)
    error, repeated = (np.abs((guess - values[:, 24:]) / size).mean() for guess in (found, values[:, 23:24]))
    assert error < 0.5 * repeated
    with pytest.raises(UsageError, match="horizon"):
        forecast(model, values, 0, series)


# --- a robot ---

SIDE = 16


def hand(angles: np.ndarray) -> np.ndarray:
    """[…, 2]: where an arm of two links of length 1 ends, of its two joint angles."""
    first, both = angles[..., 0], angles.sum(-1)
    return np.stack([np.cos(first) + np.cos(both), np.sin(first) + np.sin(both)], -1)


def postures(count: int, draw: np.random.Generator) -> np.ndarray:
    return draw.uniform([0.0, 0.3], [np.pi / 2, 2.2], (count, 2))


def drawing(*points: np.ndarray) -> np.ndarray:
    """uint8 [B, SIDE, SIDE, C]: a soft dot a channel."""
    grid = np.linspace(-2, 2, SIDE)
    near = [
        np.exp(-((grid - p[:, :1]) ** 2)[:, None] / 0.1 - ((grid - p[:, 1:]) ** 2)[:, :, None] / 0.1) for p in points
    ]
    return (255 * np.stack(near, -1)).astype(np.uint8)


def reached(model: ModelOp, tokenizer: Tokenizer, bins: Bins, draw: np.random.Generator) -> tuple[float, float]:
    """Shares of 100 goals that the model's arm, and one at random, come within 0.3 of; the other dot is no goal."""
    red, green = hand(postures(100, draw)), hand(postures(100, draw))
    texts = [f"reach {'red' if i % 2 else 'green'}" for i in range(100)]
    goal = np.where(np.arange(100)[:, None] % 2, red, green)
    found = act(model, drawing(red, green), [tokenizer.encode(text, framed=True) for text in texts], bins)[:, 0]
    shares = [(np.linalg.norm(hand(one) - goal, axis=-1) < 0.3).mean() for one in (found, postures(100, draw))]
    return float(shares[0]), float(shares[1])


@pytest.mark.slow
def test_an_arm_learns_to_reach_what_it_is_told(tmp_path: Path) -> None:
    """A scripted policy shows where its joints have to be; the clone reaches goals it has never seen."""
    draw = np.random.default_rng(1)
    (tmp_path / "data").mkdir()
    for number in range(500):
        red, green = postures(10, draw), postures(10, draw)
        wanted, word = (red, "red") if number % 2 else (green, "green")
        images = drawing(hand(red), hand(green))
        write_episode(tmp_path / f"data/{number}.safetensors", wanted, images, f"reach {word}")
    result = clone(
        tmp_path,
        objective={"kind": "behaviour_cloning", "bins": 16, "tails": 0.0},
        model={"recipe": "actions", "dim": 64, "layers": 2, "heads": 4, "kv_heads": 4, "hidden": 128, "patch": 8},
        tokenizer={"kind": "words", "vocab": 5},
        optimizer={"kind": "adamw", "rate": 0.003},
        data={"paths": str(tmp_path / "data"), "held": 0.05},
        train={"steps": 700, "batch": 64},
    )
    bins = Spec.from_json(json.loads((result.folder / "bins.json").read_text()))
    assert isinstance(bins, Bins)
    ours, chance = reached(sublayer.load(result.folder), load_tokenizer(result.folder), bins, draw)
    assert chance < 0.3
    assert ours > 0.8
