"""Rows of tokens: packed as a naive packer packs them, in an order that the seed alone decides."""

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.data import batches as module
from sublayer.data.batches import Batches, Place, Places, Rows, permuted, turns, windows
from sublayer.data.readers import Document
from sublayer.data.shards import write
from sublayer.data.tokens import Tokens
from sublayer.errors import InputError, UsageError
from tests.data.tokenizer import END, Letters

# Each of its first ids names a place: a row shows where it came from.
PLACES = Letters("".join(chr(0x4E00 + number) for number in range(500)), 501, eos=(500,))
UNMARKED = Letters(PLACES.alphabet, 501)


def source(folder: Path, lengths: Sequence[int], tokenizer: Letters = PLACES) -> Tokens:
    """Documents of so many letters, no letter twice."""
    texts, at = [], 0
    for length in lengths:
        texts.append(PLACES.alphabet[at : at + length])
        at += length
    return write([Document(text, f"{n}.txt") for n, text in enumerate(texts)], tokenizer, folder, shard_tokens=7)


def circle(tokens: Tokens) -> tuple[list[int], list[int]]:
    """(ids, numbers of documents) of all tokens."""
    documents = [tokens.document(number).tolist() for number in range(tokens.documents)]
    return list(chain.from_iterable(documents)), [number for number, document in enumerate(documents) for _ in document]


def naive(stream: tuple[list[int], list[int]], start: int, count: int, length: int) -> tuple[list[int], list[int]]:
    """A row of a circle, token by token: (ids, segment)."""
    ids, documents = stream
    row: list[int] = []
    segment: list[int] = []
    last = None
    for step in range(count):
        at = (start + step) % len(ids)
        row.append(ids[at])
        new = last is None or documents[at] != documents[last] or at <= last
        segment.append((segment[-1] if segment else 0) + new)
        last = at
    return row + [0] * (length + 1 - count), segment + [0] * (length + 1 - count)


def labels(rows: Rows) -> list[int]:
    """What is predicted: a token for each that something stands before."""
    return rows.ids[:, 1:][rows.segment[:, 1:] > 0].tolist()


# Rows


def test_rows_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_epoch", lambda seed, source, epoch: ((), 2 + epoch))  # in order, from token 2 on
    tokenizer = Letters("abcdef", 7, eos=(6,))
    tokens = write([Document("ab", "x"), Document("c", "y"), Document("def", "z")], tokenizer, tmp_path)
    assert tokens.read(0, 9).tolist() == [6, 0, 1, 6, 2, 6, 3, 4, 5]
    rows = Batches([(tokens, 1)], 4, 4).at(0)
    assert rows.ids.dtype == rows.segment.dtype == torch.int64
    assert rows.ids.tolist() == [[1, 6, 2, 6, 3], [3, 4, 5, 6, 0], [0, 1, 0, 0, 0], [6, 2, 6, 3, 4]]
    assert rows.segment.tolist() == [[1, 2, 2, 3, 3], [1, 1, 1, 2, 2], [1, 1, 0, 0, 0], [1, 1, 2, 2, 2]]
    assert list(rows.where) == [
        "x, token 2 of 3, to z, token 1 of 4",
        "z, token 1 of 4, to x, token 1 of 3",
        "x, token 1 of 3",
        "y, token 0 of 2, to z, token 2 of 4",
    ]


@given(st.lists(st.integers(1, 20), min_size=1, max_size=8), st.integers(1, 30), st.integers(0, 5), st.booleans())
def test_an_epoch_predicts_every_token_once_in_rows_of_the_naive_packer(
    tmp_path_factory, lengths: list[int], length: int, seed: int, marked: bool
) -> None:
    tokens = source(tmp_path_factory.mktemp("any"), lengths, PLACES if marked else UNMARKED)
    stream = ids, _ = circle(tokens)
    epoch = math.ceil(len(ids) / length)
    batches = Batches([(tokens, 1)], length, 1, seed=seed)
    assert batches.windows == [epoch]
    for number in range(3):
        rows = batches.take(number * epoch, epoch)
        assert Counter(labels(rows)) == Counter(ids)
        counts = (rows.segment > 0).sum(1).tolist()
        assert sorted(counts)[1:] == [length + 1] * (epoch - 1)  # only one may be short
        for row, segment, where, count in zip(
            rows.ids.tolist(), rows.segment.tolist(), rows.where, counts, strict=True
        ):
            alike = [at for at in range(len(ids)) if [ids[at], ids[(at + 1) % len(ids)]] == row[:2]]
            found = [at for at in alike if naive(stream, at, count, length) == (row, segment)]
            assert any(where.startswith(tokens.where(at)) for at in found)


def test_a_source_shorter_than_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_epoch", lambda seed, source, epoch: ((), epoch))
    tokens = write([Document("a", "x")], Letters("ab", 3, eos=(2,)), tmp_path)
    rows = Batches([(tokens, 1)], 5, 3).at(0)
    assert rows.ids.tolist() == [[2, 0, 2, 0, 0, 0], [0, 2, 0, 0, 0, 0], [2, 0, 2, 0, 0, 0]]
    assert rows.segment.tolist() == [[1, 1, 2, 0, 0, 0], [1, 2, 2, 0, 0, 0], [1, 1, 2, 0, 0, 0]]


def test_ids_that_the_vocabulary_lacks_stop_the_run(tmp_path: Path) -> None:
    tokens = source(tmp_path, [5])
    (tokens.files / "tokens-00000.bin").write_bytes(np.array([500, 1, 501, 3, 4, 0], "<u2").tobytes())
    with pytest.raises(InputError, match="token 2 is 501, and the vocabulary has 501 ids"):
        Batches([(Tokens.open(tmp_path), 1)], 6, 1).at(0)


# Order


@given(st.integers(1, 3000), st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
def test_a_permutation_is_one(size: int, keys: list[int]) -> None:
    assert sorted(permuted(index, size, keys) for index in range(size)) == list(range(size))


def test_a_permutation_of_more_than_memory_holds() -> None:
    size, keys = 10**15, (1, 2, 3, 4, 5, 6)
    found = [permuted(index, size, keys) for index in range(1000)]
    assert len(set(found)) == 1000
    assert max(found) < size
    assert 0.4 * size < sum(found) / 1000 < 0.6 * size


def test_a_permutation_mixes() -> None:
    """Each place is taken by each index about equally often, over keys."""
    counts = np.zeros((12, 12))
    rng = np.random.default_rng(0)
    for _ in range(2400):
        keys = [int(key) for key in rng.integers(0, 2**63, 6)]
        for index in range(12):
            counts[index, permuted(index, 12, keys)] += 1
    assert abs(counts - 200).max() < 5 * math.sqrt(200)  # five deviations


def test_the_order_is_the_same_for_ever(tmp_path: Path) -> None:
    """A run that was begun by one version is gone on with by the next."""
    batches = Batches([(source(tmp_path, [40, 59]), 1)], 4, 6, seed=7)
    assert batches.at(0).ids[:, 1].tolist() == [14, 41, 89, 85, 22, 18]
    assert batches.at(1000).ids[:, 1].tolist() == [60, 13, 1, 97, 29, 17]


@settings(max_examples=10)
@given(st.integers(0, 10**9), st.integers(-(10**9), 10**9))
def test_a_step_needs_none_before_it(tmp_path_factory, step: int, seed: int) -> None:
    tokens = source(tmp_path_factory.mktemp("any"), [30, 50, 7])
    used = Batches([(tokens, 1), (tokens, 2)], 8, 6, seed=seed)
    used.at(3)
    used.at(step + 1)
    fresh = Batches([(Tokens.open(tokens.folder), 1), (tokens, 2)], 8, 6, seed=seed)
    for ours, theirs in zip(used.at(step)[:2], fresh.at(step)[:2], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert list(used.at(step).where) == list(fresh.at(step).where)


def test_seeds_and_epochs_differ_in_order_and_in_where_rows_are_cut(tmp_path: Path) -> None:
    tokens = source(tmp_path, [99, 99, 99, 99])
    firsts = []
    for seed in range(3):
        batches = Batches([(tokens, 1)], 8, 50, seed=seed)  # 400 tokens: an epoch a step
        firsts += [tuple(batches.at(step).ids[:, 0].tolist()) for step in range(3)]
    assert len(set(firsts)) == 9
    assert len({tuple(sorted(first)) for first in firsts}) == 5  # of the 8 places to begin


def test_ranks_share_what_one_would_have(tmp_path: Path) -> None:
    batches = Batches([(source(tmp_path, [30, 50]), 1)], 8, 12)
    whole = batches.at(5)
    for ranks in (1, 2, 3, 4, 6, 12):
        parts = [batches.at(5, rank, ranks) for rank in range(ranks)]
        torch.testing.assert_close(torch.cat([part.ids for part in parts]), whole.ids, rtol=0, atol=0)
        torch.testing.assert_close(torch.cat([part.segment for part in parts]), whole.segment, rtol=0, atol=0)
        assert [place for part in parts for place in part.where] == list(whole.where)
    for rank, ranks in ((0, 5), (2, 2), (-1, 2), (0, 24)):
        with pytest.raises(UsageError, match="a batch of 12 rows cannot be shared|rank"):
            batches.at(5, rank, ranks)


def test_another_batch_size_goes_on_by_rows(tmp_path: Path) -> None:
    sources = [(source(tmp_path / "a", [30, 50]), 0.7), (source(tmp_path / "b", [40]), 0.3)]
    small, large = Batches(sources, 8, 4), Batches(sources, 8, 6)
    torch.testing.assert_close(large.take(12, 8).ids, torch.cat([small.at(3).ids, small.at(4).ids]), rtol=0, atol=0)
    torch.testing.assert_close(large.take(12, 6).ids, large.at(2).ids, rtol=0, atol=0)


def test_rows_in_parts(tmp_path: Path) -> None:
    rows = Batches([(source(tmp_path, [30, 50]), 1)], 8, 5).at(0)
    parts = rows.split(2)
    assert [len(part.ids) for part in parts] == [len(part.where) for part in parts] == [2, 2, 1]
    torch.testing.assert_close(torch.cat([part.ids for part in parts]), rows.ids, rtol=0, atol=0)
    torch.testing.assert_close(torch.cat([part.segment for part in parts]), rows.segment, rtol=0, atol=0)
    assert [place for part in parts for place in part.where] == list(rows.where)


# Several sources


@settings(max_examples=20)
@given(
    st.lists(
        st.one_of(st.integers(1, 20), st.floats(0.01, 100), st.sampled_from([0.1, 0.7, 1e-3])), min_size=1, max_size=6
    )
)
def test_after_any_number_of_turns_each_has_had_its_share_to_less_than_one(weights: list[float]) -> None:
    order = turns(weights)
    period = len(order)
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [Fraction(int((order == number).sum()), period) for number in range(len(weights))]
    for share, weight in zip(shares, exact, strict=True):
        assert share > 0
        assert abs(share - weight / sum(exact)) <= Fraction(len(weights), 2**16) * (period == 2**16)
    counts = np.cumsum(order[:, None] == np.arange(len(weights)), 0)
    had = np.arange(1, period + 1)[:, None]
    wanted = np.array([int(share * period) for share in shares])
    assert (abs(counts * period - had * wanted) < period).all()


def test_turns_by_hand() -> None:
    assert turns([1]).tolist() == [0]
    assert turns([2, 2]).tolist() == [0, 1]
    assert turns([0.5, 0.25, 0.25]).tolist() == [0, 1, 0, 2]
    assert turns([3, 4, 1]).tolist() == [1, 0, 1, 0, 1, 0, 1, 2]
    assert Counter(turns([0.7, 0.2, 0.1]).tolist()) == {0: 7, 1: 2, 2: 1}
    assert Counter(turns([1, 1e-9]).tolist()) == {0: 2**16 - 1, 1: 1}  # never less than one


def test_sources_are_mixed_by_weight_and_each_has_its_own_epochs(tmp_path: Path) -> None:
    small, large = source(tmp_path / "small", [31]), source(tmp_path / "large", [99, 99, 99])
    batches = Batches([(small, 1), (large, 3)], 8, 4, seed=3)
    assert batches.windows == [4, 38]
    firsts: list[int] = []
    for step in range(76):
        rows = batches.at(step)
        assert sum("small" in place or "0.txt" in place for place in rows.where) >= 1
        firsts += labels(rows)
    assert batches.epochs(76) == [19.0, 6.0]
    assert batches.epochs(1) == [1 / 4, 3 / 38]
    counts = Counter(firsts)
    ids = Counter({token: 19 * n for token, n in Counter(circle(small)[0]).items()})
    ids.update({token: 6 * n for token, n in Counter(circle(large)[0]).items()})
    assert counts == ids


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    tokens = source(tmp_path / "a", [9])
    other = write([Document("ab", "x")], END, tmp_path / "b")
    for options, line in (
        (([(tokens, 1)], 0, 1), "batches of 1 rows of 0 tokens: both are at least 1"),
        (([(tokens, 1)], 1, 0), "batches of 0 rows"),
        (([], 1, 1), "batches: no sources"),
        (([(tokens, 0)], 1, 1), "the weight of a source is a number above 0"),
        (([(tokens, math.nan)], 1, 1), "the weight of a source is a number above 0"),
        (([(tokens, math.inf)], 1, 1), "the weight of a source is a number above 0"),
    ):
        with pytest.raises(UsageError, match=line):
            Batches(*options)
    with pytest.raises(InputError, match="a and .*b: not written with the same tokenizer"):
        Batches([(tokens, 1), (other, 1)], 4, 4)
    with pytest.raises(UsageError, match="rows are counted from 0"):
        Batches([(tokens, 1)], 4, 4).at(-1)


# Where


def test_where_rows_come_from(tmp_path: Path) -> None:
    tokens = source(tmp_path, [5, 4])
    places = Places([Place(tokens, 2, 3), Place(tokens, 4, 4), Place(tokens, 9, 4)])
    assert list(places) == [
        "0.txt, token 2 of 6",
        "0.txt, token 4 of 6, to 1.txt, token 1 of 5",
        "1.txt, token 3 of 5, to 0.txt, token 1 of 6",
    ]
    assert (len(places), places[-1]) == (3, "1.txt, token 3 of 5, to 0.txt, token 1 of 6")
    assert list(places[1:]) == list(places)[1:]


# Windows


@given(
    st.lists(st.integers(1, 20), min_size=1, max_size=6),
    st.integers(1, 25),
    st.integers(1, 25),
    st.integers(1, 5),
)
def test_windows_predict_every_token_but_the_first_once_with_the_context_promised(
    tmp_path_factory, lengths: list[int], length: int, stride: int, rows: int
) -> None:
    tokens = source(tmp_path_factory.mktemp("any"), lengths, UNMARKED)  # each id is there once: it names its place
    stride = min(stride, length)
    stream = ids, _ = circle(tokens)
    found = []
    for batch, counted in windows(tokens, length, stride, rows):
        assert batch.ids.shape == (len(batch.where), length + 1)
        assert counted.shape == (len(batch.where), length)
        assert len(batch.where) <= rows
        for row in range(len(batch.where)):
            start = int(batch.ids[row, 0])
            count = int((batch.segment[row] > 0).sum())
            assert (batch.ids[row].tolist(), batch.segment[row].tolist()) == naive(stream, start, count, length)
            assert batch.where[row].startswith(tokens.where(start))
            for at in (counted[row] != -100).nonzero().flatten().tolist():
                place = int(counted[row, at])
                found.append(place)
                assert place == start + at + 1
                assert at + 1 >= min(place, length - stride + 1)  # how many tokens stand before it in the row
    assert found == ids[1:]


def test_windows_by_hand(tmp_path: Path) -> None:
    tokens = source(tmp_path, [9], UNMARKED)
    found = list(windows(tokens, 4, 2, rows=3))
    assert [rows.ids.tolist() for rows, _ in found] == [[[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [4, 5, 6, 7, 8]]]
    assert found[0][1].tolist() == [[1, 2, 3, 4], [-100, -100, 5, 6], [-100, -100, 7, 8]]
    found = list(windows(tokens, 3))
    assert [counted.tolist() for _, counted in found] == [[[1, 2, 3]], [[4, 5, 6]], [[7, 8, -100]]]
    assert found[2][0].segment.tolist() == [[1, 1, 1, 0]]


def test_a_single_token_has_nothing_to_predict(tmp_path: Path) -> None:
    [(rows, counted)] = windows(source(tmp_path, [1], UNMARKED), 3)
    assert (rows.ids.tolist(), rows.segment.tolist(), counted.tolist()) == ([[0] * 4], [[1, 0, 0, 0]], [[-100] * 3])


@pytest.mark.parametrize(("length", "stride", "rows"), [(4, 0, 1), (4, 5, 1), (4, 2, 0), (0, None, 1)])
def test_windows_that_cannot_be_are_refused(tmp_path: Path, length: int, stride: int | None, rows: int) -> None:
    with pytest.raises(UsageError, match="1 ≤ stride ≤ length, 1 ≤ rows"):
        next(windows(source(tmp_path, [9]), length, stride, rows))
