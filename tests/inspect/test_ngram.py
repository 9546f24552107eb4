import math
import random
from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sublayer.errors import InputError, UsageError
from sublayer.inspect import ngram
from sublayer.inspect.ngram import END, Ngram, ngram_bits

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "rat", "ran", "at", "a", "hat", "with", "ümlauts"]
RANDOM = random.Random(5)
TRAIN = [" ".join(RANDOM.choices(WORDS, k=RANDOM.randrange(1, 40))) for _ in range(60)]
HELD = [" ".join(RANDOM.choices(WORDS, k=12)) for _ in range(6)]


class ByHand:
    """The same model from its definition, with dictionaries."""

    def __init__(self, texts: Sequence[str], order: int) -> None:
        self.order = order
        counts: Counter[tuple[int, ...]] = Counter()
        for text in texts:
            symbols = [END] * (order - 1) + list(text.encode()) + [END]
            counts.update(tuple(symbols[i - order + 1 : i + 1]) for i in range(order - 1, len(symbols)))
        self.counts = {order: counts}
        for size in range(order - 1, 0, -1):
            before: defaultdict[tuple[int, ...], set[int]] = defaultdict(set)
            for gram in self.counts[size + 1]:
                before[gram[1:]].add(gram[0])
            self.counts[size] = Counter({gram: len(seen) for gram, seen in before.items()})

    def discount(self, size: int, count: int) -> float:
        n = Counter(self.counts[size].values())
        if count == 0:
            return 0.0
        count = min(count, 3)
        if all(n[i] for i in (1, 2, 3, 4)):
            y = n[1] / (n[1] + 2 * n[2])
            three = [i - (i + 1) * y * n[i + 1] / n[i] for i in (1, 2, 3)]
            if all(0 < d < i for i, d in enumerate(three, 1)):
                return three[count - 1]
        return count / 2

    def probability(self, gram: tuple[int, ...]) -> float:
        if not gram:
            return 1 / 257
        shorter = self.probability(gram[1:])
        counts = self.counts[len(gram)]
        follow = [counts[(*gram[:-1], symbol)] for symbol in range(257) if (*gram[:-1], symbol) in counts]
        if not follow:
            return shorter
        count = counts.get(gram, 0)
        spare = sum(self.discount(len(gram), c) for c in follow)
        return (count - self.discount(len(gram), count) + spare * shorter) / sum(follow)

    def bits(self, texts: Sequence[str]) -> float:
        bits = 0.0
        for text in texts:
            symbols = [END] * (self.order - 1) + list(text.encode()) + [END]
            grams = [tuple(symbols[i - self.order + 1 : i + 1]) for i in range(self.order - 1, len(symbols))]
            bits -= sum(math.log2(self.probability(gram)) for gram in grams)
        return bits / sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_bits_are_those_of_the_definition(order: int) -> None:
    assert ngram_bits(TRAIN, HELD, order) == pytest.approx(ByHand(TRAIN, order).bits(HELD), rel=1e-12)


def test_probabilities_are_those_of_the_definition_where_few_counts_leave_no_estimate() -> None:
    ours, theirs = Ngram.count(["abab"], 3), ByHand(["abab"], 3)
    for history in (b"", b"a", b"ab", b"ba", b"zz"):
        symbols = ([END] * 2 + list(history))[-2:]
        expected = [theirs.probability((*symbols, symbol)) for symbol in range(257)]
        np.testing.assert_allclose(ours.distribution(history), expected, rtol=1e-12)


@pytest.mark.parametrize("history", [b"", b"t", b"the ", b"the cat", b"\xc3", b"\x00\xff\x00\xff", b"zebra"])
@pytest.mark.parametrize("texts", [TRAIN, ["a"], ["ab" * 500], ["x" * 300, "y"]])
def test_the_257_probabilities_sum_to_1_and_none_is_0(texts: list[str], history: bytes) -> None:
    found = Ngram.count(texts).distribution(history)
    assert found.sum() == pytest.approx(1, abs=1e-12)
    assert found.min() > 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(), min_size=1).filter(any), st.text(max_size=6), st.integers(1, 7))
def test_every_text_gives_a_distribution_after_every_history(texts: list[str], history: str, order: int) -> None:
    found = Ngram.count(texts, order).distribution(history.encode())
    assert found.sum() == pytest.approx(1, abs=1e-9)
    assert found.min() > 0


def test_the_end_of_a_document_is_predicted_and_charged() -> None:
    """In 200 copies of "ab" nothing is left open but where the document ends: the bits go to 0, and END is likely."""
    model = Ngram.count(["ab"] * 200)
    assert model.distribution(b"ab").argmax() == END
    assert model.distribution(b"a").argmax() == ord("b")
    assert model.distribution(b"").argmax() == ord("a")
    assert ngram_bits(["ab"] * 200, ["ab"]) < 0.05
    assert (
        ngram_bits(["ab"] * 200, ["aba"]) > 2
    )  # the bytes alone would be cheaper than that: the end is in the wrong place


def test_portions_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ngram_bits(TRAIN, HELD)
    monkeypatch.setattr(ngram, "PORTION", 7)  # within documents too
    assert ngram_bits(iter(TRAIN), iter(HELD)) == pytest.approx(whole, rel=1e-12)


def test_documents_without_text_count_for_nothing() -> None:
    assert ngram_bits(["", *TRAIN, ""], ["", *HELD]) == ngram_bits(TRAIN, HELD)


def test_longer_histories_predict_text_better_until_the_data_runs_out() -> None:
    bits = [ngram_bits(TRAIN, HELD, order) for order in (1, 2, 3)]
    assert bits == sorted(bits, reverse=True)


def test_nothing_to_count_or_judge_is_said() -> None:
    with pytest.raises(InputError, match="no text to count"):
        ngram_bits([""], HELD)
    with pytest.raises(InputError, match="no held-out text"):
        ngram_bits(TRAIN, [])
    with pytest.raises(InputError, match="lone surrogate"):
        ngram_bits(["\ud800"], HELD)
    for order in (0, 8):
        with pytest.raises(UsageError, match="1 to 7 bytes"):
            ngram_bits(TRAIN, HELD, order)
