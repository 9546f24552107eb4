"""Objectives: what each asks, held to counts and formulas; and a run of each, from files to a judged model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import sublayer
from sublayer.data.alignments import Crop, Crops, gathered, parted, read_alignments
from sublayer.data.batches import Rows
from sublayer.data.examples import ExampleBatches, Examples, bundles
from sublayer.data.readers import records
from sublayer.errors import InputError, SpecError, UsageError
from sublayer.recipes import llama
from sublayer.recipes.evoformer import GAP, MASKED, TINY, evoformer
from sublayer.step import Step
from sublayer.text import Bytes, Characters
from sublayer.train import train
from sublayer.train.batch import Batch
from sublayer.train.config import run_of
from sublayer.train.examples import Contrastive, Tagging, TextToText, contrast
from sublayer.train.feeds import AlignmentFeed, ExampleFeed, TextFeed
from sublayer.train.language import END, MASK, SENTINELS, Masked, SpanCorruption, Words, corrupt_spans
from sublayer.train.protein import MaskedAlignment, distance_loss
from sublayer.train.run import Result
from sublayer.train.view import Quiet
from tests.assets import debian
from tests.contracts import roughen

BYTES = Words(Bytes((END, MASK)))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows_of(texts: Sequence[str], length: int) -> Rows:
    """One row: documents one after the other, each behind the end of the one before, then padding."""
    ids, segment = torch.zeros(2, 1, length, dtype=torch.long)
    at = 0
    for number, text in enumerate(texts, 1):
        piece = torch.tensor([BYTES.tokenizer.eos[0], *BYTES.tokenizer.encode(text)])
        ids[0, at : at + len(piece)], segment[0, at : at + len(piece)] = piece, number
        at += len(piece)
    return Rows(ids, segment, ["here"])


# --- masked tokens ---


def test_masked_tokens_are_chosen_as_often_as_asked() -> None:
    """15% of the text; of those 80% hidden, 10% another token, 10% as they were; never an end, a mask or padding."""
    rows = rows_of(["a quick brown fox. " * 500] * 2, 20001)
    batch = Masked().collate(rows, BYTES, generator())
    ids, asked = rows.ids[:, :-1], batch.labels != -100
    text = (rows.segment[:, :-1] != 0) & (ids != BYTES.end)
    assert not bool((asked & ~text).any())
    assert torch.equal(batch.labels[asked], ids[asked])
    assert torch.equal(batch.inputs[~asked], ids[~asked])
    assert float(asked[text].float().mean()) == pytest.approx(0.15, abs=0.01)
    shown = batch.inputs[asked]
    hidden, same = float((shown == BYTES.mask).float().mean()), float((shown == ids[asked]).float().mean())
    assert (hidden, same) == (pytest.approx(0.8, abs=0.02), pytest.approx(0.1, abs=0.015))
    assert int(shown[shown != BYTES.mask].max()) < 256
    assert batch.step.segment is not None


def test_other_tokens_are_asked_in_another_step_and_the_same_in_the_same() -> None:
    rows = rows_of(["words and words " * 18], 300)
    once, again, other = (Masked().collate(rows, BYTES, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(once.inputs, again.inputs)
    assert not torch.equal(once.labels, other.labels)


def test_whole_words_are_masked_together() -> None:
    rows = rows_of(["some words, longer ones; others " * 20], 700)
    objective = Masked(whole_words=True, hidden=1.0, replaced=0.0)
    batch = objective.collate(rows, BYTES, generator())
    asked = (batch.labels != -100)[0]
    text = bytes(min(i, 255) for i in rows.ids[0, :-1].tolist())
    for place in range(1, len(text) - 1):
        if bytes([text[place]]).isalpha() and bytes([text[place + 1]]).isalpha():
            assert asked[place] == asked[place + 1]
    assert 0.05 < float(asked.float().mean()) < 0.3


# --- corrupted spans ---


@pytest.mark.parametrize("length", [1, 2, 3, 20, 100, 511])
def test_a_corrupted_text_and_its_target_are_the_text(length: int) -> None:
    """Putting each span back in place of its sentinel gives the text; counts are T5's."""
    ids, sentinels = torch.arange(length) + 1000, torch.arange(100)
    source, target = corrupt_spans(ids, sentinels, 0.15, 3.0, generator())
    spans: dict[int, list[int]] = {}
    for token in target.tolist():
        if token < 1000:
            spans[token] = []
        else:
            spans[max(spans)].append(token)
    restored = [piece for token in source.tolist() for piece in (spans[token] if token < 1000 else [token])]
    assert restored == ids.tolist()
    assert list(spans) == sorted(spans)
    if length > 1:
        hidden = sum(map(len, spans.values()))
        assert hidden == min(max(round(length * 0.15), 1), length - 1)
        assert len(spans) == max(round(hidden / 3), 1)
        assert all(spans.values())


def test_spans_of_a_packed_row_stay_in_their_documents() -> None:
    words = Words(Bytes((END, *SENTINELS)))
    rows = rows_of(["a" * 40, "b" * 30], 80)
    batch = SpanCorruption().collate(rows, words, generator())
    step = batch.step
    assert step.segment is not None
    assert step.memory_segment is not None
    for number, letter in ((1, "a"), (2, "b")):
        source = batch.source[step.memory_segment == number]
        target = batch.inputs[step.segment == number]
        letters = {i for i in (*source.tolist(), *target.tolist()) if i < 256}
        assert letters == {ord(letter)}
        assert (target[0], target[-1]) == (words.end, words.end)
        labels = batch.labels[step.segment == number]
        assert torch.equal(labels[:-1], target[1:])
        assert labels[-1] == -100


def test_a_tokenizer_without_the_special_tokens_is_refused() -> None:
    plain = Words(Bytes((END,)))
    with pytest.raises(UsageError, match="no mask token"):
        _ = plain.mask
    with pytest.raises(UsageError, match="no tokens that stand for spans"):
        _ = plain.sentinels


# --- examples ---


def test_the_decoder_reads_what_it_has_said() -> None:
    objective = TextToText()
    examples = [objective.example(pair, BYTES, {}, "> ") for pair in (("ab", "xyz"), ("c", "q"))]
    batch = objective.gather([{k: torch.tensor(v) for k, v in one.items()} for one in examples], BYTES)
    end = BYTES.end
    assert batch.source[0].tolist() == [*b"> ab", end]
    assert batch.inputs[0].tolist() == [end, *b"xyz"]
    assert batch.labels[0].tolist() == [*b"xyz", end]
    assert batch.labels[1].tolist() == [*b"q", end, -100, -100]
    assert batch.step.segment is not None
    assert batch.step.segment[1].tolist() == [1, 1, 0, 0]


def test_a_word_is_tagged_at_its_first_token() -> None:
    example = Tagging().example((["Ada", "runs"], ["N", "V"]), BYTES, {"N": 0, "V": 1}, "")
    assert list(example["text"]) == [BYTES.end, *b"Ada runs"]
    assert list(example["tags"]) == [-100, 0, -100, -100, 1, -100, -100, -100, -100]
    with pytest.raises(InputError, match="as many tags"):
        Tagging().example((["Ada"], []), BYTES, {}, "")


class Both(Bytes):
    """Its texts stand between two special tokens, as BERT's do."""

    def encode(self, text: str, *, framed: bool = False, specials: Any = "text") -> list[int]:
        ids = super().encode(text, specials=specials)
        return [257, *ids, 256] if framed else ids


def test_tagged_words_stand_between_the_tokens_that_their_model_expects() -> None:
    example = Tagging().example((["Ada", "runs"], ["N", "V"]), Words(Both((END, MASK))), {"N": 0, "V": 1}, "")
    assert list(example["text"]) == [257, *b"Ada runs", 256]
    assert list(example["tags"]) == [-100, 0, -100, -100, 1, -100, -100, -100, -100, -100]


def test_tagged_words_of_any_alphabet() -> None:
    words = Words(Characters.train(["語 言"], end=END))
    example = Tagging().example((["語", "言"], ["N", "V"]), words, {"N": 0, "V": 1}, "")
    assert list(example["text"]) == [words.end, *words.tokenizer.encode("語 言")]
    assert list(example["tags"]) == [-100, 0, 1, -100]


def test_contrast_is_the_formula() -> None:
    """InfoNCE, pair by pair, written out."""
    one, other = (F.normalize(torch.randn(5, 8, dtype=torch.float64, generator=generator(s)), dim=-1) for s in (1, 2))
    expected = torch.zeros((), dtype=torch.float64)
    for a, b in ((one, other), (other, one)):
        for i in range(5):
            scores = torch.stack([(a[i] @ b[j] / 0.1).exp() for j in range(5)])
            expected = expected - (scores[i] / scores.sum()).log() / 2
    found = contrast(one, other, 0.1)
    torch.testing.assert_close(found.sum, expected)
    assert found.tokens == 5


def test_pairs_stay_together_when_rows_are_split() -> None:
    examples = [{"one": torch.tensor([i]), "other": torch.tensor([i + 10, i + 10])} for i in range(4)]
    parts = Contrastive().gather(examples, BYTES).split(2)
    assert [part.inputs["ids"][:, :, 0].tolist() for part in parts] == [[[0, 10], [1, 11]], [[2, 12], [3, 13]]]


def test_a_batch_is_split_and_put_together() -> None:
    batch = Batch(torch.arange(12).view(6, 2), torch.arange(6), Step(segment=torch.ones(6, 2)), {"x": torch.arange(6)})
    parts = batch.split(4)
    assert [part.rows for part in parts] == [4, 2]
    assert torch.equal(torch.cat([part.inputs for part in parts]), batch.inputs)
    assert torch.equal(torch.cat([part.source["x"] for part in parts]), torch.arange(6))
    assert parts[1].step.segment is not None
    assert parts[1].step.segment.shape == (2, 2)


# --- batches of examples ---


def ragged(lengths: Sequence[int]) -> Examples:
    return Examples.gather([({"a": [i] * n, "b": [i]}, f"line {i}") for i, n in enumerate(lengths)])


def test_an_epoch_has_every_example_once_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 30, 200).tolist()
    batches = ExampleBatches([(ragged(lengths), 1.0)], budget=64, seed=3)
    seen: list[int] = []
    step = 0
    while len(seen) < 200:
        examples, where = batches.at(step)
        longest = max(len(example["a"]) for example in examples)
        assert len(examples) * longest <= 64
        assert len(where) == len(examples)
        seen += [int(example["b"][0]) for example in examples]
        step += 1
    assert sorted(seen) == list(range(200))
    again, _ = ExampleBatches([(ragged(lengths), 1.0)], budget=64, seed=3).at(step - 1)
    assert [int(example["b"][0]) for example in again] == seen[-len(again) :]
    assert [int(e["b"][0]) for e in batches.at(step)[0]] != seen[: len(batches.at(step)[0])]


def test_ranks_share_a_batch() -> None:
    batches = ExampleBatches([(ragged([3] * 40), 1.0)], budget=30, seed=0)
    whole = {int(example["b"][0]) for example in batches.at(5)[0]}
    parts = [{int(example["b"][0]) for example in batches.at(5, rank, 2)[0]} for rank in range(2)]
    assert parts[0] | parts[1] == whole
    assert not parts[0] & parts[1]


def test_sources_have_their_shares() -> None:
    small, large = ragged([2] * 10), ragged([2] * 90)
    batches = ExampleBatches([(small, 1.0), (large, 1.0)], budget=20, seed=0)
    where = [bool(len(b) and 1) for b in [batches.at(0)[0]]]
    assert where == [True]
    assert batches.draws == [50, 50]
    counts = np.zeros(10)
    for step in range(10):
        for example, _ in zip(*batches.at(step), strict=True):
            if int(example["b"][0]) < 10:
                counts[int(example["b"][0])] += 1
    assert counts.max() - counts.min() <= 12


def test_cuts_keep_the_budget_and_lose_nothing() -> None:
    lengths = np.sort(np.random.default_rng(1).integers(1, 20, 100))
    cuts = bundles(lengths, 40)
    assert (cuts[0], cuts[-1]) == (0, 100)
    for start, stop in pairwise(cuts):
        assert (stop - start) * lengths[stop - 1] <= 40
    assert bundles(np.array([5]), 40, least=3) == [0, 1]


def test_examples_are_saved_and_read_back(tmp_path: Path) -> None:
    examples = ragged([1, 5, 2])
    examples.save(tmp_path / "e.safetensors")
    back = Examples.load(tmp_path / "e.safetensors")
    assert back.where == ["line 0", "line 1", "line 2"]
    assert [len(back[i]["a"]) for i in range(3)] == [1, 5, 2]
    (tmp_path / "e.safetensors").write_bytes((tmp_path / "e.safetensors").read_bytes()[:60])
    with pytest.raises(InputError, match="not a file of examples"):
        Examples.load(tmp_path / "e.safetensors")


# --- whole runs ---

SMALL = {"dim": 32, "layers": 1, "heads": 2, "hidden": 48}
TINY_RUN: dict[str, Any] = {
    "eval": {"every": 40, "tokens": 500},
    "save": {"every": 40},
    "schedule": {"warmup": 5},
    "optimizer": {"kind": "adamw", "rate": 0.01},
}


def carry_out(tmp_path: Path, **sections: Any) -> Result:
    return train(run_of(TINY_RUN | {"out": str(tmp_path / "out")} | sections))


def lines(path: Path, records: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


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


# --- alignments ---


def family(folder: Path, structure: bool = False) -> str:
    """Sequences of one amino acid or of another, so that a cell is told by its row; but for two at the end, by which
    sequences differ."""
    draw = np.random.default_rng(0)
    text = "\n".join(
        f"n{i}  {'AM'[i % 2] * 22}{''.join(draw.choice(list('ARNDCQEGHILKMFPSTWYV'), 2))}" for i in range(60)
    )
    path = folder / "family.sto"
    path.write_text(f"# STOCKHOLM 1.0\n{text}\n//\n")
    if structure:
        np.save(folder / "family.npy", np.arange(72.0).reshape(24, 3))
    return str(path)


def one_crop(count: int = 40, columns: int = 200) -> Crops:
    cells = np.random.default_rng(0).integers(0, 22, (count, columns)).astype(np.uint8)
    cells[0] = 0
    profile = np.zeros((columns, 22), np.float32)
    profile[:, 21] = 1.0  # what is drawn from a column is told by it: a gap
    asked = np.arange(count) > 0
    return gathered([Crop(cells, asked, profile, None, "here")])


def test_cells_are_masked_as_alphafold_masks_them() -> None:
    """15% of the cells; of those 70% hidden, 10% any amino acid, 10% drawn from the column, 10% kept."""
    crops = one_crop()
    batch = MaskedAlignment().collate(crops, generator())
    shown, cells, asked = batch.inputs["msa"], crops.msa, batch.labels["msa"] != -100
    assert not asked[:, 0].any(), "the target is given"
    assert torch.equal(shown[~asked], cells[~asked])
    assert torch.equal(batch.labels["msa"][asked], cells[asked])
    assert float(asked[:, 1:].float().mean()) == pytest.approx(0.15, abs=0.01)
    shares = MaskedAlignment(hidden=0.7, uniform=0.0, profile=0.3).collate(crops, generator())
    drawn = shares.inputs["msa"][shares.labels["msa"] != -100]
    assert float((drawn == MASKED).float().mean()) == pytest.approx(0.7, abs=0.04)
    assert set(drawn[drawn != MASKED].tolist()) == {GAP}
    found, was = shown[asked], cells[asked]
    assert float((found == MASKED).float().mean()) == pytest.approx(0.7, abs=0.04)
    assert float(((found == GAP) & (was != GAP)).float().mean()) == pytest.approx(0.1 * 21 / 22, abs=0.03)
    other = (found < 20) & (found != was)
    assert float(other.float().mean()) == pytest.approx(0.1 * (1 - 1 / 22), abs=0.03)
    assert len(found[other].unique()) == 20
    kept = (found == was) & (was != GAP)
    assert float(kept.float().mean()) == pytest.approx((0.1 + 0.1 / 20) * 21 / 22, abs=0.03)
    again = MaskedAlignment().collate(crops, generator())
    assert torch.equal(again.inputs["msa"], shown)


def test_a_column_gives_its_classes_as_often_as_they_stand_in_it() -> None:
    crops = one_crop(60, 400)
    profile = torch.zeros(22)
    profile[torch.tensor([0, 3, 21])] = torch.tensor([0.5, 0.3, 0.2])
    crops = crops._replace(profile=profile.expand_as(crops.profile))
    batch = MaskedAlignment(share=0.9, hidden=0.0, uniform=0.0, profile=1.0).collate(crops, generator())
    drawn = batch.inputs["msa"][batch.labels["msa"] != -100]
    assert [float((drawn == i).float().mean()) for i in (0, 3, 21)] == pytest.approx([0.5, 0.3, 0.2], abs=0.02)


def test_distances_are_binned_as_alphafold_bins_them() -> None:
    """64 bins between 2.3125 and 21.6875 Å, pair by pair; pairs of which one is not known count for nothing."""
    logits = torch.randn(1, 4, 4, 64, generator=generator(), dtype=torch.float64)
    apart = torch.tensor([[0.0, 2.4, 21.5, 99.0], [2.4, 0.0, 10.0, 2.3], [21.5, 10.0, 0.0, torch.nan],
                          [99.0, 2.3, torch.nan, 0.0]], dtype=torch.float64)  # fmt: skip
    width, nats = (21.6875 - 2.3125) / 62, []
    for i in range(4):
        for j in range(4):
            if apart[i, j].isfinite():
                number = min(max(int((float(apart[i, j]) - 2.3125) // width) + 1, 0), 63)
                nats.append(-logits[0, i, j].log_softmax(-1)[number])
    torch.testing.assert_close(distance_loss(logits, apart[None]), torch.stack(nats).mean())
    assert distance_loss(logits, torch.full((1, 4, 4), torch.nan)) == 0


def test_the_loss_of_an_alignment_is_its_two_parts_weighed() -> None:
    model = evoformer(**TINY).build(seed=0)
    roughen(model)
    known = np.arange(36, dtype=np.float32).reshape(12, 3)
    cells = np.random.default_rng(1).integers(0, 20, (5, 12)).astype(np.uint8)
    profile = np.full((12, 22), 1 / 22, np.float32)
    crops = gathered([Crop(cells, np.arange(5) > 0, profile, known, "here")])
    objective = MaskedAlignment(msa_weight=3.0, distogram_weight=0.5)
    batch = objective.collate(crops, generator())
    loss, answer = objective(model, batch), model(batch.inputs, batch.step)
    labels = batch.labels["msa"]
    cells_nats = F.cross_entropy(answer["msa"].flatten(0, 2), labels.flatten(), reduction="sum")
    count = int((labels != -100).sum())
    pairs = distance_loss(answer["distogram"], batch.labels["distances"])
    torch.testing.assert_close(loss.sum, 3 * cells_nats + 0.5 * count * pairs)
    torch.testing.assert_close(loss.nats, cells_nats.detach())
    assert loss.tokens == count
    alone = objective.replace(distogram_weight=0.0)(model, batch)
    torch.testing.assert_close(alone.sum, 3 * cells_nats)


def test_an_alignment_and_its_structure_are_learned(tmp_path: Path) -> None:
    """By its column alone half of the cells of a held-out sequence are told right; a distance told by nothing is one of
    six, 1.79 nats."""
    sections: dict[str, Any] = {
        "objective": "masked_msa",
        "model": {"recipe": "evoformer", **TINY | {"layers": 1}},
        "data": {"paths": family(tmp_path, structure=True), "length": 12, "depth": 8, "held": 0.3},
        "train": {"steps": 100, "batch": 4, "micro": 3},
    }
    result = carry_out(tmp_path, **sections)
    assert result.score.accuracy > 0.8
    feed = AlignmentFeed(run_of({"out": "x"} | sections), tmp_path, Quiet())
    feed.open()
    batch, _ = feed.at(1000)
    with torch.no_grad():
        answer = sublayer.load(result.folder)(batch.inputs, batch.step)
    assert distance_loss(answer["distogram"], batch.labels["distances"]) < 0.5


def test_alignments_are_held_out_by_their_files_too(tmp_path: Path) -> None:
    path = family(tmp_path)
    data = {"paths": path, "judge": path, "length": 24, "depth": 8}
    run = run_of({"out": "x", "objective": "masked_msa", "model": {"recipe": "evoformer", **TINY}, "data": data,
                  "train": {"steps": 1, "batch": 2}})  # fmt: skip
    feed = AlignmentFeed(run, tmp_path, Quiet())
    feed.open()
    count, batches = feed.held(None)
    asked = [batch.labels["msa"] for batch, _ in batches]
    assert len(asked) == count == 5  # of 2 crops, each with 7 of the 59 sequences
    assert feed.held(60)[0] == 2
    assert sum(int((labels != -100).sum()) for labels in asked) == pytest.approx(0.15 * 59 * 24, rel=0.3)


def test_models_of_something_else_are_refused() -> None:
    with pytest.raises(UsageError, match="trains models of alignments"):
        MaskedAlignment().fits(llama(16, 1, 2, 1, 16, 32))
    with pytest.raises(UsageError, match="features=0"):
        MaskedAlignment().fits(evoformer(**TINY | {"features": 2}))
    with pytest.raises(SpecError, match="shares of one whole"):
        MaskedAlignment(hidden=0.9, uniform=0.2)


@pytest.mark.assets
def test_a_real_family_is_told_better_than_by_how_often_amino_acids_occur(tmp_path: Path) -> None:
    """Fibronectin type III, 98 sequences of Pfam's seed: masked cells of those held out cost fewer nats than by the
    frequencies in the others, gaps counted as cells, and without gaps."""
    path = next(debian("hmmer-examples").rglob("fn3.sto"))
    sizes = {"dim": 32, "layers": 2, "heads": 4, "pair": 16, "pair_heads": 2, "head_size": 8, "rank": 8, "widening": 2}
    sections: dict[str, Any] = {
        "objective": "masked_msa",
        "model": {"recipe": "evoformer", **sizes},
        "data": {"paths": str(path), "length": 100, "depth": 24, "held": 0.3},
        "train": {"steps": 60, "batch": 2},
    }
    result = carry_out(tmp_path, **sections)
    feed = AlignmentFeed(run_of({"out": "x"} | sections), tmp_path, Quiet())
    feed.open()
    train, _ = parted(read_alignments(path)[0], 0.3)
    model, background = sublayer.load(result.folder), torch.from_numpy(train.profile).mean(0)
    for classes in (22, 20):
        nats: list[torch.Tensor] = []
        for batch, _ in feed.held(None)[1]:
            with torch.no_grad():
                logits = model(batch.inputs, batch.step)["msa"]
            asked = (batch.labels["msa"] >= 0) & (batch.labels["msa"] < classes)
            labels, told = batch.labels["msa"][asked], logits[asked][:, :classes].log_softmax(-1)
            frequency = background[:classes] / background[:classes].sum()
            nats.append(torch.stack([-told.gather(1, labels[:, None])[:, 0], -frequency[labels].log()]))
        ours, theirs = torch.cat(nats, 1).mean(1).tolist()
        assert ours < theirs - 0.1, classes
