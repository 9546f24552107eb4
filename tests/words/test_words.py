"""Word vectors: gradients against the written formulas, what is learned, files, and going on."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sublayer.errors import InputError, UsageError
from sublayer.words import Corpus, Glove, SkipGram, Vectors, fit
from sublayer.words.corpus import neighbours, words_of
from sublayer.words.glove import co_occurrences, least_squares
from sublayer.words.skipgram import negative_sampling
from sublayer.words.tables import UNFINISHED, Tables, adagrad
from sublayer.words.vectors import search

GENERATOR = torch.Generator().manual_seed(1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def text(sentences: int = 1500, seed: int = 0) -> list[str]:
    """A cat and a dog do eight things in eight places, a car and a truck do eight others, each pair without a
    difference between its two."""
    draw = np.random.default_rng(seed)
    verbs, places = ([[f"{what}{kind}{letter}" for letter in "abcdefgh"] for kind in "xy"] for what in ("does", "at"))
    found: list[str] = []
    for _ in range(sentences):
        kind = int(draw.integers(2))
        subject = draw.choice([("cat", "dog"), ("car", "truck")][kind])
        found.append(f"the {subject} {draw.choice(verbs[kind])} it {draw.choice(places[kind])}")
    return found


def made(method: str, corpus: Corpus, **changes: Any) -> Tables:
    settings: dict[str, Any] = {"dim": 12, "window": 4, "batch": 256} | changes
    return SkipGram(corpus, **settings, sample=0) if method == "skipgram" else Glove(corpus, **settings)


EPOCHS = {"skipgram": 12, "glove": 100}
METHODS = list(EPOCHS)


def test_words_are_runs_of_letters() -> None:
    assert words_of("The KING's 2 sons, naïve; it’s_so\u0301") == ["the", "king's", "sons", "naïve", "it’s", "so\u0301"]


def test_a_corpus_numbers_words_by_count_and_knows_its_documents() -> None:
    corpus = Corpus.read(["b a b c", "a b rare"], least=2)
    assert corpus.words == ("b", "a")
    assert corpus.counts.tolist() == [3, 2]
    assert corpus.ids.tolist() == [0, 1, 0, 1, 0]
    assert corpus.document.tolist() == [0, 0, 0, 1, 1]
    assert Corpus.read(["a b", "a b"], least=1, most=2).words == ("a", "b")
    assert corpus.stamp != Corpus.read(["b a b c a", "b rare"], least=2).stamp


def test_windows_reach_both_ways_and_never_over_documents() -> None:
    document = np.array([0, 0, 0, 1, 1])
    pairs = set(zip(*(x.tolist() for x in neighbours(document, 2, 0, 5)), strict=True))
    assert pairs == {(0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)}
    reach = np.array([1, 1, 2, 1, 1])
    pairs = set(zip(*(x.tolist() for x in neighbours(document, 2, 0, 5, reach)), strict=True))
    assert pairs == {(0, 1), (1, 0), (1, 2), (2, 0), (2, 1), (3, 4), (4, 3)}


def test_the_gradient_of_negative_sampling_is_that_of_the_formula_and_of_differences() -> None:
    u, v = drawn(3, 5), drawn(3, 4, 5)
    counted = torch.tensor([[True, True, False], [True] * 3, [False, True, True]])

    def written(u: Tensor, v: Tensor) -> Tensor:
        """Eq. 4, word by word."""
        total = torch.zeros((), dtype=torch.float64)
        for i in range(3):
            total = total - torch.log(torch.sigmoid(u[i] @ v[i, 0]))
            for j in range(3):
                if counted[i, j]:
                    total = total - torch.log(torch.sigmoid(-u[i] @ v[i, 1 + j]))
        return total

    loss, d_u, d_v = negative_sampling(u, v, counted)
    a, b = u.clone().requires_grad_(), v.clone().requires_grad_()
    written(a, b).backward()
    torch.testing.assert_close(loss, written(u, v), rtol=1e-12, atol=0)
    torch.testing.assert_close((d_u, d_v), (a.grad, b.grad), rtol=1e-10, atol=1e-12)
    for table, gradient in ((u, d_u), (v, d_v)):
        for place in range(0, table.numel(), 7):
            ends = []
            for h in (1e-6, -1e-6):
                table.view(-1)[place] += h
                ends.append(float(written(u, v)))
                table.view(-1)[place] -= h
            assert math.isclose((ends[0] - ends[1]) / 2e-6, float(gradient.view(-1)[place]), abs_tol=1e-7)


def test_gloves_loss_and_gradient_are_those_of_the_formula() -> None:
    w, c, b, d = drawn(4, 6), drawn(4, 6), drawn(4), drawn(4)
    count = torch.tensor([0.5, 3.0, 100.0, 250.0], dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (w, c, b, d)]
    total = torch.zeros((), dtype=torch.float64)
    for i in range(4):
        weight = (float(count[i]) / 100) ** 0.75 if count[i] < 100 else 1.0
        error = leaves[0][i] @ leaves[1][i] + leaves[2][i] + leaves[3][i] - math.log(float(count[i]))
        total = total + weight * error**2 / 2
    total.backward()
    loss, gradients = least_squares(w, c, b, d, count, 100.0, 0.75)
    torch.testing.assert_close(loss, total.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(gradients, tuple(x.grad for x in leaves), rtol=1e-10, atol=1e-12)


def test_co_occurrences_are_weighted_by_distance() -> None:
    corpus = Corpus.read(["a b a", "b c"], least=1)
    number = {word: i for i, word in enumerate(corpus.words)}
    pairs, counts = co_occurrences(corpus, window=2)
    found = {tuple(pair): count for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True)}
    a, b, c = (number[word] for word in "abc")
    assert found == {(a, b): 2.0, (b, a): 2.0, (a, a): 1.0, (b, c): 1.0, (c, b): 1.0}


def test_adagrad_adds_up_the_gradients_of_a_row() -> None:
    table, squares = torch.zeros(3, 2), torch.ones(3, 2)
    adagrad(table, squares, torch.tensor([2, 0, 2]), torch.tensor([[1.0, 0.0], [2.0, 1.0], [2.0, -1.0]]), rate=0.5)
    expected = torch.tensor([[-1 / 5**0.5, -0.5 / 2**0.5], [0.0, 0.0], [-1.5 / 10**0.5, 0.5 / 2**0.5]])
    torch.testing.assert_close(table, expected)
    assert squares.tolist() == [[5.0, 2.0], [1.0, 1.0], [10.0, 2.0]]


@pytest.mark.parametrize("method", METHODS)
def test_words_used_alike_become_nearest_neighbours(method: str) -> None:
    vectors = fit(made(method, Corpus.read(text()), batch=256 if method == "skipgram" else 16), EPOCHS[method])
    for a, b in (("cat", "dog"), ("car", "truck")):
        assert vectors.near(a, 1)[0][0] == b
        assert vectors.near(b, 1)[0][0] == a


@pytest.mark.parametrize("method", METHODS)
def test_a_seed_gives_one_result_and_losses_fall(method: str) -> None:
    corpus, losses = Corpus.read(text(300)), list[float]()
    a, b, c = (
        fit(made(method, corpus, seed=seed), 4, tell=lambda epoch, loss: losses.append(loss)) for seed in (1, 1, 2)
    )
    assert torch.equal(a.table, b.table)
    assert not torch.equal(a.table, c.table)
    assert losses[3] < losses[0]


@pytest.mark.parametrize("method", METHODS)
def test_a_stopped_training_goes_on_to_the_same_vectors(method: str, tmp_path: Path) -> None:
    corpus = Corpus.read(text(200))
    whole = fit(made(method, corpus), 3)

    def stop(epoch: int, loss: float) -> None:
        if epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(made(method, corpus), 3, tmp_path, stop)
    assert [path.name for path in tmp_path.iterdir()] == [UNFINISHED]
    for other in (made(method, corpus, seed=5), made(method, Corpus.read(text(200, seed=3)))):
        with pytest.raises(UsageError, match="other text or settings"):
            fit(other, 3, tmp_path)
    epochs = list[int]()
    vectors = fit(made(method, corpus), 3, tmp_path, lambda epoch, loss: epochs.append(epoch))
    assert epochs == [3]
    assert torch.equal(vectors.table, whole.table)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["vectors.safetensors", "vectors.txt", "vocabulary.json"]


def test_what_is_unfinished_may_be_broken(tmp_path: Path) -> None:
    (tmp_path / UNFINISHED).write_bytes(b"torn")
    with pytest.raises(InputError, match="remove it to begin anew"):
        fit(made("glove", Corpus.read(text(50))), 2, tmp_path)


def test_noise_follows_counts_to_three_quarters_and_frequent_words_are_passed_over() -> None:
    corpus = Corpus.read(["a " * 81 + "b " * 16 + "c"], least=1)
    model = SkipGram(corpus, sample=0.04)
    np.testing.assert_allclose(np.diff(model.noise, prepend=0), np.array([27, 8, 1]) / 36)
    np.testing.assert_allclose(model.keep, np.minimum(1, np.sqrt(0.04 / (corpus.counts / 98))))


def test_a_negative_that_is_the_context_itself_is_passed_over() -> None:
    model = SkipGram(Corpus.read(["a b c"], least=1), 4)
    loss = model.step(torch.tensor([0]), torch.tensor([[1, 1, 2]]))  # contexts begin at 0, so every score is 0
    assert loss == pytest.approx(2 * math.log(2))
    assert torch.equal(model.tensors["context"][1], -model.tensors["context"][2])


def vectors() -> Vectors:
    rows = torch.tensor([[1.0, 0.0, 0.1], [1.0, 1.0, 0.1], [0.0, 0.0, 1.0], [0.0, 1.0, 1.0], [-3.0, 0.0, 0.0]])
    return Vectors(("man", "king", "woman", "queen", "stone"), np.array([9, 8, 7, 6, 5]), rows, {"method": "hand"})


def test_neighbours_and_analogies() -> None:
    assert vectors().analogy("man", "king", "woman", 1)[0][0] == "queen"
    near = vectors().near("man", 10)
    assert [word for word, _ in near] == ["king", "woman", "queen", "stone"]
    assert near[0][1] == pytest.approx(1.01 / (1.01 * 2.01) ** 0.5)
    with pytest.raises(UsageError, match="did you mean 'queen'"):
        vectors().near("quen")


def test_saved_and_loaded_and_in_the_format_of_word2vec(tmp_path: Path) -> None:
    vectors().save(tmp_path)
    back = Vectors.load(tmp_path)
    assert back.words == vectors().words
    assert back.counts.tolist() == vectors().counts.tolist()
    assert back.about == {"method": "hand"}
    assert torch.equal(back.table, vectors().table)
    lines = (tmp_path / "vectors.txt").read_text(encoding="utf-8").splitlines()
    assert lines[:2] == ["5 3", "man 1 0 0.1"]


def test_broken_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"vocabulary\.json is missing"):
        Vectors.load(tmp_path)
    vectors().save(tmp_path)
    path = tmp_path / "vocabulary.json"
    kept = json.loads(path.read_text())
    path.write_text(json.dumps(kept | {"words": kept["words"][1:]}))
    with pytest.raises(InputError, match="4 words, 5 counts and 5 vectors"):
        Vectors.load(tmp_path)
    path.write_text("{")
    with pytest.raises(InputError, match="broken word vectors"):
        Vectors.load(tmp_path)


def test_texts_are_searched_by_the_mean_of_their_words() -> None:
    texts = ["stone", "king man", "queen woman", "unknown"]
    assert [number for number, _ in search(vectors(), texts, "queen", 2)] == [2, 1]
    with pytest.raises(UsageError, match="no word"):
        search(vectors(), texts, "nothing")


def test_tfidf_finds_and_classifies() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed")
    from sublayer.words.baselines import tfidf_classify, tfidf_search

    texts = ["the cat sat on the mat", "the dog sat", "stock prices fell", "prices of cat food"]
    found = tfidf_search(texts, "cat food")
    assert [number for number, _ in found] == [3, 0]
    assert found[0][1] > found[1][1] > 0
    assert tfidf_classify(texts, ["pets", "pets", "money", "money"], ["a cat and a dog", "prices rose"]) == [
        "pets",
        "money",
    ]
    with pytest.raises(UsageError, match="two kinds"):
        tfidf_classify(texts, ["pets"] * 4, texts)
    with pytest.raises(InputError, match="empty vocabulary"):
        tfidf_search(["1 2 3"], "cat")


def test_numbers_that_cannot_be_meant() -> None:
    corpus = Corpus.read(["a b", "c d"], least=1)
    for wrong in ({"dim": 0}, {"window": 0}, {"rate": -1.0}):
        for method in METHODS:
            with pytest.raises(UsageError, match="at least 1"):
                made(method, corpus, **wrong)
    with pytest.raises(UsageError, match="epochs=0"):
        fit(made("glove", corpus), 0)
    with pytest.raises(UsageError, match="counts are at least 1"):
        Corpus.read(["a b"], least=0)
    with pytest.raises(InputError, match="0 of 2 words occur 5 times"):
        Corpus.read(["a b"])
    with pytest.raises(InputError, match="stand together"):
        Glove(Corpus.read(["a", "b"], least=1))
