"""A run of each objective, from files to a judged model; and what is refused on the way."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import sublayer
from sublayer.data.readers import records
from sublayer.errors import InputError, UsageError
from sublayer.nn.attention import Attention
from sublayer.nn.delta import GatedDelta
from sublayer.nn.gated_convolution import GatedConvolution
from sublayer.nn.latent import LatentAttention
from sublayer.nn.linear_attention import LinearAttention
from sublayer.nn.mamba import Mamba, Mamba2
from sublayer.nn.op import Part
from sublayer.nn.recurrent import Recurrent
from sublayer.nn.s4 import S4
from sublayer.recipes.bert import TINY, bert
from sublayer.train.config import run_of
from sublayer.train.examples import Contrastive
from sublayer.train.feeds import ExampleFeed, TextFeed
from sublayer.train.language import Masked
from sublayer.train.view import Quiet
from tests.train.objectives import SMALL, TINY_RUN, carry_out, lines


def test_a_masked_language_model_learns(tmp_path: Path) -> None:
    """Each text repeats a letter of its own: what is hidden can be told from the rest, and from nothing else."""
    (tmp_path / "text").mkdir()
    for i in range(80):
        (tmp_path / "text" / f"{i}.txt").write_text("abcd"[i % 4] * (90 + i))
    sections: dict[str, Any] = {
        "objective": "masked",
        "model": {"recipe": "bert", "dim": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 64},
        "tokenizer": {"kind": "bytes"},
        "data": {"paths": str(tmp_path / "text"), "length": 32},
        "train": {"steps": 150, "batch": 8},
    }
    result = carry_out(tmp_path, **sections)
    assert result.score.loss < 1.0
    assert result.score.bytes == 0
    feed = TextFeed(run_of({"out": "x"} | sections), tmp_path, Quiet())
    feed.open()
    assert feed.bytes_per_token == 0  # a part of the tokens is no code of the text
    assert sublayer.load(result.folder).spec.head is not None


def test_a_reversal_is_learned_as_translation(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    words = ["".join(draw.choice(list("abcd"), 3)) for _ in range(300)]
    paths = lines(tmp_path / "pairs.jsonl", [{"one": word, "two": word[::-1]} for word in words])
    result = carry_out(
        tmp_path,
        objective={"kind": "text_to_text"},
        model={"recipe": "t5", **SMALL},
        tokenizer={"kind": "bytes"},
        data={"paths": paths, "field": "one", "target": "two", "length": 8},
        train={"steps": 40, "batch": 32},
    )
    assert result.score.loss < 3.0
    assert (tmp_path / "out" / "data" / "train.safetensors").exists()


def test_classes_of_texts_are_learned_and_named(tmp_path: Path) -> None:
    records = [{"text": f"{'good' if i % 2 else 'bad'} {i}", "label": "yes" if i % 2 else "no"} for i in range(200)]
    result = carry_out(
        tmp_path,
        objective="classification",
        model={"recipe": "bert", "dim": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 32},
        tokenizer={"kind": "bytes"},
        data={"paths": lines(tmp_path / "d.jsonl", records), "target": "label", "length": 16, "held": 0.2},
        train={"steps": 60, "batch": 16},
    )
    assert result.score.accuracy > 0.95
    assert json.loads((result.folder / "labels.json").read_text()) == ["no", "yes"]
    assert "accuracy" in json.loads((tmp_path / "out" / "result.json").read_text())


def labelled(tmp_path: Path, names: Sequence[str], count: int = 60) -> str:
    records = [{"text": f"text {i}", "label": names[i % len(names)]} for i in range(count)]
    return lines(tmp_path / "d.jsonl", records)


CLASSES: dict[str, Any] = {
    "objective": "classification",
    "model": {"recipe": "bert", "dim": 16, "layers": 1, "heads": 2, "hidden": 16, "context": 32},
    "tokenizer": {"kind": "bytes"},
    "train": {"steps": 2, "batch": 4},
}


def test_labels_are_read_anew_until_there_is_a_checkpoint(tmp_path: Path) -> None:
    """A first attempt with another field, or with data that was mended since, leaves no names behind."""
    data = {"paths": labelled(tmp_path, ("no", "yes")), "length": 16, "held": 0.2}
    with pytest.raises(InputError, match="are longer than"):
        carry_out(tmp_path, **CLASSES, data=data | {"target": "text", "length": 2})
    result = carry_out(tmp_path, **CLASSES, data=data | {"target": "label"})
    assert json.loads((result.folder / "labels.json").read_text()) == ["no", "yes"]


def test_examples_are_encoded_anew_where_the_labels_count_otherwise(tmp_path: Path) -> None:
    """A class that comes first in another source moves the numbers of all."""
    run = run_of(TINY_RUN | CLASSES | {"out": str(tmp_path / "out"), "data": {"paths": labelled(tmp_path, ("b", "c"))}})
    run = run.replace(data=run.data.replace(target="label", length=16))
    ExampleFeed(run, tmp_path / "out", Quiet()).open()
    (tmp_path / "out" / "labels.json").write_text('["a", "b", "c"]')
    feed = ExampleFeed(run, tmp_path / "out", Quiet())
    feed.open()
    assert {int(label) for step in range(6) for label in feed.at(step)[0].labels} == {1, 2}


@pytest.mark.parametrize(("policy", "kept"), [("replace", 3), ("skip", 1)])
def test_bytes_of_examples_that_are_no_text(tmp_path: Path, policy: Literal["replace", "skip"], kept: int) -> None:
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'{"a": "x\xff", "b": 1}\n{"a": "good", "b": 2}\n{"a": "\\ud800y", "b": 3}\n')
    with pytest.raises(InputError, match="0xFF"):
        list(records(path, ("a", "b")))
    found = [record.values for record in records(path, ("a", "b"), bad_bytes=policy)]
    assert len(found) == kept
    assert ("good", 2) in found
    assert policy == "skip" or found[0] == ("x\ufffd", 1)


def test_examples_inside_a_column_of_parquet(tmp_path: Path) -> None:
    """As the translations of a hub's data sets lie; a row without them is passed over."""
    rows = [{"de": "ja", "en": "yes"}, None, {"de": None, "en": "no"}, {"de": "so", "en": "thus"}]
    pq.write_table(pa.table({"translation": rows, "id": [1, 2, 3, 4]}), tmp_path / "d.parquet")
    found = list(records(tmp_path / "d.parquet", ("translation.de", "translation.en")))
    assert [record.values for record in found] == [("ja", "yes"), ("so", "thus")]
    assert found[1].source.endswith("d.parquet:4")
    with pytest.raises(InputError, match="no field 'translation.fr'"):
        list(records(tmp_path / "d.parquet", ("translation.de", "translation.fr")))
    with pytest.raises(InputError, match="no column 'translaton'"):
        list(records(tmp_path / "d.parquet", ("translaton.de", "id")))


def test_every_rank_has_an_example_of_every_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here each text fills a batch alone."""
    monkeypatch.setattr("sublayer.train.feeds.world", lambda: 2)
    data = {"paths": labelled(tmp_path, ("b", "c")), "target": "label", "length": 8}
    run = run_of(TINY_RUN | CLASSES | {"out": str(tmp_path / "out"), "data": data, "train": {"steps": 1, "batch": 1}})
    feed = ExampleFeed(run, tmp_path / "out", Quiet())
    feed.open()
    assert all(feed.at(step, rank, 2)[0].rows for step in range(8) for rank in range(2))


@pytest.mark.parametrize(
    ("recipe", "change"),
    [
        ({"recipe": "linear_transformer", "heads": 2, "hidden": 16}, "decoder.blocks.*.attn.op.causal=false"),
        ({"recipe": "convolution"}, "decoder.blocks.*.mixer.op.causal=false"),
        ({"recipe": "rnn"}, "decoder.blocks.*.mixer.op.direction=backward"),
    ],
)
def test_no_op_sees_the_next_token_that_it_is_to_tell(tmp_path: Path, recipe: dict[str, Any], change: str) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    with pytest.raises(UsageError, match="sees what it is to predict"):
        carry_out(
            tmp_path,
            model={**recipe, "dim": 16, "layers": 1, "change": change},
            tokenizer={"kind": "bytes"},
            data={"paths": str(tmp_path / "a.txt")},
            train={"steps": 1},
        )


def idx_files(folder: Path, split: str, labels: np.ndarray, size: int = 8) -> None:
    """Grey images of noise in IDX files."""
    pixels = np.random.default_rng(0).integers(0, 255, (len(labels), size, size)).astype(np.uint8)
    head = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in pixels.shape)
    (folder / f"{split}-images-idx3-ubyte").write_bytes(head + pixels.tobytes())
    head = bytes([0, 0, 8, 1]) + len(labels).to_bytes(4, "big")
    (folder / f"{split}-labels-idx1-ubyte").write_bytes(head + labels.astype(np.uint8).tobytes())


def test_a_broken_test_split_is_told_and_not_replaced(tmp_path: Path) -> None:
    """It has a class that training has not: to hold out training images instead would hide that."""
    idx_files(tmp_path, "train", np.arange(40) % 3)
    idx_files(tmp_path, "t10k", np.arange(10) % 5)
    model = {"recipe": "vit", "dim": 16, "layers": 1, "heads": 2, "patch": 4}
    with pytest.raises(InputError, match="label 4 of 3 classes"):
        carry_out(
            tmp_path, objective="image_classification", model=model, data={"paths": str(tmp_path)}, train={"steps": 1}
        )


@pytest.mark.parametrize("classes", [2, 7])
def test_a_model_that_is_told_classes_is_told_those_there_are(tmp_path: Path, classes: int) -> None:
    """The number after the last stands for none."""
    idx_files(tmp_path, "train", np.arange(40) % 3)
    model = {"recipe": "dit", "dim": 16, "layers": 1, "heads": 2, "patch": 4, "learn_sigma": False, "classes": classes}
    with pytest.raises(UsageError, match=f"the labels are 3, and the model is told {classes}"):
        carry_out(tmp_path, objective="diffusion", model=model, data={"paths": str(tmp_path)}, train={"steps": 1})


def test_images_are_told_apart(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for split, count in (("train", 200), ("t10k", 50)):
        labels = draw.integers(0, 3, count).astype(np.uint8)
        pixels = draw.integers(0, 60, (count, 8, 8)).astype(np.uint8)
        pixels[np.arange(count), labels * 2 + 1] += 150  # a bright row names the class
        head = bytes([0, 0, 8, 3]) + b"".join(n.to_bytes(4, "big") for n in (count, 8, 8))
        with gzip.open(tmp_path / f"{split}-images-idx3-ubyte.gz", "wb") as file:
            file.write(head + pixels.tobytes())
        with gzip.open(tmp_path / f"{split}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + labels.tobytes())
    result = carry_out(
        tmp_path,
        objective="image_classification",
        model={"recipe": "vit", "dim": 32, "layers": 1, "heads": 2, "patch": 4},
        data={"paths": str(tmp_path)},
        train={"steps": 100, "batch": 32},
    )
    assert result.score.accuracy > 0.95
    assert result.score.tokens == 50


def test_spans_are_filled_in(tmp_path: Path) -> None:
    """Each text repeats a letter of its own, so a span is that letter between sentinels whose order is known."""
    (tmp_path / "text").mkdir()
    for i in range(80):
        (tmp_path / "text" / f"{i}.txt").write_text("abcd"[i % 4] * 30)
    result = carry_out(
        tmp_path,
        objective="span_corruption",
        model={"recipe": "t5", **SMALL},
        tokenizer={"kind": "bytes"},
        data={"paths": str(tmp_path / "text"), "length": 32},
        train={"steps": 120, "batch": 8},
    )
    assert result.score.loss < 1.0  # of log 257 and more at first


def test_words_are_tagged(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    records = list[dict[str, Any]]()
    for _ in range(200):
        words = ["".join(draw.choice(list("abcd"), 2)) for _ in range(1 + draw.integers(4))]
        records.append({"words": words, "tags": ["early" if word[0] in "ab" else "late" for word in words]})
    result = carry_out(
        tmp_path,
        objective="tagging",
        model={"recipe": "bert", "dim": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 32},
        tokenizer={"kind": "bytes"},
        data={"paths": lines(tmp_path / "d.jsonl", records), "field": "words", "target": "tags", "length": 16},
        train={"steps": 120, "batch": 16},
    )
    assert result.score.accuracy > 0.95
    assert json.loads((result.folder / "labels.json").read_text()) == ["early", "late"]


def test_sentences_that_mean_the_same_come_together(tmp_path: Path) -> None:
    """One of a pair is in capitals: what they share, no byte says."""
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdefgh"), 6)) for _ in range(300)]
    result = carry_out(
        tmp_path,
        objective="contrastive",
        model={"recipe": "bert", "dim": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 32},
        tokenizer={"kind": "bytes"},
        data={"paths": lines(tmp_path / "d.jsonl", [{"text": t, "target": t.upper()} for t in texts]), "length": 16},
        train={"steps": 100, "batch": 16},
    )
    assert result.score.accuracy > 0.8


def test_tasks_are_mixed_by_their_prefixes(tmp_path: Path) -> None:
    """The same sources have another target in each task, so the prefix alone tells them apart."""
    sources = list[dict[str, Any]]()
    for name, target in (("one", "aaa"), ("two", "bbb")):
        paths = lines(tmp_path / f"{name}.jsonl", [{"text": f"{i:02}", "target": target} for i in range(100)])
        sources.append({"paths": paths, "name": name, "prefix": f"{name}: "})
    result = carry_out(
        tmp_path,
        objective="text_to_text",
        model={"recipe": "transformer", **SMALL},
        tokenizer={"kind": "bytes"},
        data={"sources": sources, "length": 12},
        train={"steps": 80, "batch": 16},
    )
    assert result.score.loss < 0.1  # log 2 / 4 for whom the prefix says nothing


@pytest.mark.parametrize(("target", "trivial"), [("noise", 1.0), ("velocity", 4 / 3)])
def test_noise_is_told_from_images(tmp_path: Path, target: str, trivial: float) -> None:
    """Images are even noise from −1 to 1; trivial: the squared error of whom answers 0."""
    idx_files(tmp_path, "train", np.arange(200) % 3)
    result = carry_out(
        tmp_path,
        objective={"kind": "diffusion", "target": target},
        model={"recipe": "dit", "dim": 32, "layers": 1, "heads": 2, "patch": 4, "learn_sigma": False},
        data={"paths": str(tmp_path)},
        train={"steps": 120, "batch": 16},
    )
    assert result.score.loss < 0.85 * trivial


def test_what_an_objective_cannot_train_is_refused(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text " * 100)
    for name, said in (
        ("masked", "masked trains encoders"),
        ("text_to_text", "text_to_text trains encoder-decoders"),
        ("contrastive", "contrastive trains encoders"),
    ):
        with pytest.raises(UsageError, match=said):
            carry_out(
                tmp_path,
                objective=name,
                model={"recipe": "llama", "kv_heads": 2, **SMALL},
                tokenizer={"kind": "bytes"},
                data={"paths": str(text)},
                train={"steps": 1},
            )
    with pytest.raises(UsageError, match=r"objective.kind: unknown: 'maskd', nearest: masked|objective"):
        run_of({"out": "x", "objective": "maskd", "model": {"size": "gpt2-124m"}, "data": {"paths": "a"}})


@pytest.mark.parametrize(
    "mixer",
    [Attention(2), LinearAttention(2), LatentAttention(2, 8, 4, 4, 4), Recurrent("gru"), GatedConvolution(), S4(8),
     Mamba(16), Mamba2(2, 8, 4), GatedDelta(2, 2, 4, 4)],
    ids=lambda mixer: type(mixer).__name__,
)  # fmt: skip
def test_an_encoder_that_sees_one_side_is_refused_where_both_are_meant(mixer: Part) -> None:
    whole = bert(**TINY)
    blind = whole.override(**{"encoder.blocks.1.attn.op": mixer})
    for objective in (Masked(), Contrastive()):
        objective.fits(objective.adapt(whole, 0))
        with pytest.raises(UsageError, match=r"model\.encoder\.blocks\.1\.attn\.op is causal: it sees one side only"):
            objective.fits(objective.adapt(blind, 0))
