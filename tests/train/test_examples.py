"""Objectives on examples, held to what they are to ask; and batches of examples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sublayer.data.examples import ExampleBatches, Examples, bundles
from sublayer.errors import InputError
from sublayer.step import Step
from sublayer.text import Bytes, Characters
from sublayer.train.batch import Batch
from sublayer.train.examples import Contrastive, Tagging, TextToText, contrast
from sublayer.train.language import END, MASK, Words
from tests.train.objectives import BYTES, generator

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
