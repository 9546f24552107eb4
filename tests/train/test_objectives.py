"""Objectives: what each asks, held to counts and formulas; and a run of each, from files to a judged model."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import sublayer
from sublayer.data.batches import Rows
from sublayer.data.examples import ExampleBatches, Examples, bundles
from sublayer.errors import InputError, UsageError
from sublayer.step import Step
from sublayer.text import Bytes
from sublayer.train import train
from sublayer.train.batch import Batch
from sublayer.train.config import run_of
from sublayer.train.examples import Contrastive, Tagging, TextToText, contrast
from sublayer.train.language import END, MASK, SENTINELS, Masked, SpanCorruption, Words, corrupt_spans
from sublayer.train.run import Result

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
    result = carry_out(
        tmp_path,
        objective="masked",
        model={"recipe": "bert", "dim": 32, "layers": 1, "heads": 2, "hidden": 48, "context": 64},
        tokenizer={"kind": "bytes"},
        data={"paths": str(tmp_path / "text"), "length": 32},
        train={"steps": 150, "batch": 8},
    )
    assert result.score.loss < 1.0
    assert result.score.bytes == 0
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
