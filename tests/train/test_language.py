"""Masked tokens and corrupted spans, held to counts."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sublayer.data.batches import Rows
from sublayer.errors import UsageError
from sublayer.text import Bytes
from sublayer.train.language import END, SENTINELS, Masked, SpanCorruption, Words, corrupt_spans
from tests.train.objectives import BYTES, generator


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
