import math
import warnings
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from sublayer.decoding.sample import Sampling, best, filtered, log_probabilities, sample, uniform
from sublayer.errors import SublayerError, UsageError

NAN, INF = math.nan, math.inf


def kept(logits: list[float], **options) -> set[int]:
    return set(filtered(torch.tensor(logits), Sampling(**options)).isfinite().nonzero()[:, 0].tolist())


# --- one order: repetition penalty → temperature → top-k → top-p → min-p ---


def test_temperature_comes_before_top_p() -> None:
    # Camelid PR#534: after the temperature the probabilities are .867, .117, .016; before it .665, .245, .090.
    assert kept([3, 2, 1], top_p=0.8, temperature=0.5) == {0}
    assert kept([3, 2, 1], top_p=0.8) == {0, 1}


def test_the_repetition_penalty_comes_before_everything() -> None:
    # 4 / 4 = 1 drops token 0 behind the others: top-k and top-p then keep what would have been second and third.
    logits, sampling = torch.tensor([4.0, 2.5, 2.0]), Sampling(repetition_penalty=4.0, top_k=2)
    assert filtered(logits, sampling, seen={0}).isfinite().tolist() == [False, True, True]
    assert sample(logits, Sampling(repetition_penalty=4.0, temperature=0.0), seen={0}) == 1


def test_top_p_counts_what_top_k_left() -> None:
    # Of all, .4 and .3 are needed to reach .55; of the two that top-k leaves, the first is .4 / .7 = .571 already.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, top_p=0.55) == {0, 1}
    assert kept(logits, top_p=0.55, top_k=2) == {0}


def test_min_p_is_a_share_of_the_best_after_the_temperature() -> None:
    logits = torch.tensor([0.8, 0.15, 0.05]).log().tolist()
    assert kept(logits, min_p=0.1) == {0, 1}  # .15 / .8 = .19, .05 / .8 = .06
    assert kept(logits, min_p=0.1, temperature=2.0) == {0, 1, 2}  # their square roots: .43 and .25


def test_min_p_comes_after_top_p() -> None:
    # If min-p came first, it would leave .444, .333 and .222, of which top-p would take two.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert kept(logits, top_p=0.75, min_p=0.4) == {0, 1, 2}
    assert kept(torch.tensor([0.4, 0.3, 0.2, 0.0]).log().tolist(), top_p=0.75) == {0, 1}


def test_penalty_divides_logits_above_zero_and_multiplies_others() -> None:
    logits = torch.tensor([2.0, -1.0, 0.0, 1.5])
    values = filtered(logits, Sampling(repetition_penalty=2.0), seen=[0, 1, 2])
    torch.testing.assert_close(values, torch.tensor([1.0, -2.0, 0.0, 1.5]).double() - 1.5)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 7},
        {"top_p": 0.6},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 30, "top_p": 0.8, "min_p": 0.05, "repetition_penalty": 1.3},
        {"temperature": 0.3, "top_p": 0.95, "repetition_penalty": 0.5},
    ],
)
def test_filters_are_those_of_transformers_in_its_order(options) -> None:
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=300, n_positions=8)
    generation = GenerationConfig(do_sample=True, **{"top_k": 0, **options})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = GPT2LMHeadModel(config)
        theirs = model._get_logits_processor(generation, input_ids_seq_length=4)
    prompt, logits = torch.tensor([[5, 17, 5, 200]]), 3 * torch.randn(50, 300, dtype=torch.float64)
    for row in logits:
        expected = theirs(prompt, row[None].clone())[0].log_softmax(0)
        ours = filtered(row, Sampling(**options), seen=set(prompt[0].tolist())).log_softmax(0)
        torch.testing.assert_close(ours, expected)


# --- edges ---


def test_temperature_zero_takes_the_best() -> None:
    assert sample(torch.tensor([1.0, 2.0]), Sampling(temperature=0.0)) == 1  # google-deepmind/gemma#562


def test_top_p_zero_keeps_the_best() -> None:
    assert kept([1, 3, 2], top_p=0.0) == {1}  # hf PR#19839, PR#24453
    assert all(sample(torch.tensor([1.0, 3.0, 2.0]), Sampling(top_p=0.0), draw=draw) == 1 for draw in range(20))


def test_top_k_above_the_vocabulary_keeps_all() -> None:
    assert kept([1, 3, 2], top_k=50257) == {0, 1, 2}


def test_ties_rank_by_id() -> None:
    tied = [1.0, 2.0, 2.0, 2.0, 0.0]
    assert sample(torch.tensor(tied), Sampling(temperature=0.0)) == 1
    assert kept(tied, top_k=2) == {1, 2}
    assert kept([0.0] * 1000, top_k=3) == {0, 1, 2}
    assert kept([0.0] * 4, top_p=0.5) == {0, 1}
    assert best(torch.tensor(tied), 4).tolist() == [1, 2, 3, 0]
    assert best(torch.tensor([0.0] * 1000), 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("spread", [0.0, 0.3, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("grain", [0.0, 0.5])
def test_top_p_over_a_large_vocabulary_is_what_sorting_all_of_it_gives(spread, grain) -> None:
    logits = spread * torch.randn(20_000, dtype=torch.float64)
    logits = (logits / grain).round() * grain if grain else logits  # with many ties
    order = logits.sort(descending=True, stable=True).indices
    sums = logits.softmax(0)[order].cumsum(0)
    for top_p in (0.0, 0.01, 0.3, 0.5, 0.9, 0.999):
        count = 1 + int((sums < top_p - 1e-12).sum())
        assert kept(logits.tolist(), top_p=top_p) == set(order[:count].tolist())


@pytest.mark.parametrize("bad", [[1.0, NAN], [NAN, NAN], [1.0, INF], [-INF, -INF]])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_distribution_are_refused(bad, temperature) -> None:
    with pytest.raises(SublayerError, match="no distribution: their maximum is"):
        sample(torch.tensor(bad), Sampling(temperature=temperature))
    with pytest.raises(SublayerError, match="no distribution"):
        log_probabilities(torch.tensor(bad))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"temperature": -1.0}, "Sampling: temperature is 0 (take the best token) or above, got -1.0"),
        ({"temperature": NAN}, "Sampling.temperature: expected float, got nan"),
        ({"top_p": 1.5}, "Sampling: top_p is a probability from 0 to 1, got 1.5"),
        ({"top_k": 0}, "Sampling: top_k=0 would keep nothing; give 1 or more, or None"),
        ({"min_p": -0.1}, "Sampling: min_p is a share from 0 to 1, got -0.1"),
        ({"repetition_penalty": 0.0}, "Sampling: repetition_penalty is from 0.01 to 100 (1: none), got 0.0"),
    ],
)
def test_options_that_cannot_be_meant_are_refused_in_one_line(options, line) -> None:
    with pytest.raises(UsageError) as error:
        Sampling(**options)
    assert str(error.value) == line


finite32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
share = st.floats(0, 1)
LARGEST = torch.finfo(torch.float32).max


@given(
    st.lists(finite32 | st.just(-INF) | st.integers(-3, 3).map(float), min_size=1, max_size=40),
    st.floats(0, allow_infinity=False),
    st.none() | st.integers(1, 50),
    share,
    share,
    st.floats(0.01, 100),
    st.integers(0, 2**64 - 1),
)
@example([LARGEST, -LARGEST, -INF], 5e-324, None, 1.0, 0.0, 100.0, 0)
@example([-LARGEST, -LARGEST], 1.7e308, 1, 0.0, 5e-324, 0.01, 1)
@example([-INF, -1.0, -INF], 1.7e308, None, 0.999, 1.0, 1.0, 2)
def test_whatever_the_filters_a_token_of_the_kept_ones_is_chosen(
    logits, temperature, top_k, top_p, min_p, repetition_penalty, draw
) -> None:
    if max(logits) == -INF:
        return
    values, seen = torch.tensor(logits), set(range(0, len(logits), 2))
    sampling = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    token = sample(values, sampling, seen=seen, seed=7, draw=draw)
    assert 0 <= token < len(logits)
    assert logits[token] > -INF
    if temperature == 0:
        return
    left = filtered(values, sampling, seen)
    assert not left.isnan().any()
    assert left.max() == 0  # the best one always stays
    assert left[token].exp() > 0
    assert top_k is None or left.isfinite().sum() <= top_k


# --- draws ---


@pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.6, "top_p": 0.9}, {"top_k": 5, "repetition_penalty": 2.0}, {"min_p": 0.1}]
)
def test_frequencies_are_the_probabilities_that_the_filters_leave(options) -> None:
    logits, seen, draws = 2 * torch.randn(12), {1, 2, 3}, 5_000
    sampling = Sampling(**options)
    expected = filtered(logits, sampling, seen).softmax(0)
    counts = torch.zeros(12, dtype=torch.float64)
    for draw in range(draws):
        counts[sample(logits, sampling, seen=seen, seed=1, draw=draw)] += 1
    assert (counts[expected == 0] == 0).all()
    left = expected > 0
    chi_square = float(((counts - draws * expected)[left] ** 2 / (draws * expected[left])).sum())
    degrees = int(left.sum()) - 1
    # Wilson and Hilferty: the cube root of chi-square / degrees is nearly normal. 4 deviations: 3 in 100,000.
    z = ((chi_square / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / (2 / (9 * degrees)) ** 0.5
    assert z < 4


def test_a_draw_depends_on_seed_and_number_alone() -> None:
    # Pinned: a seed written down today gives the same text in every later version.
    assert [uniform(0, 0), uniform(0, 1), uniform(1, 0)] == [
        0.0564663990004608,
        0.44008326622012284,
        0.6487508310490744,
    ]
    numbers = torch.tensor([uniform(seed, draw) for seed in range(100) for draw in range(100)], dtype=torch.float64)
    assert 0 <= numbers.min() < numbers.max() < 1
    assert len(numbers.unique()) == 10_000
    assert abs(float(numbers.mean()) - 0.5) < 4 / (12 * 10_000) ** 0.5


@pytest.mark.parametrize("number", [0.0, 1 - 2.0**-53])
def test_the_first_and_the_last_number_stay_inside(number, monkeypatch) -> None:
    module = import_module("sublayer.decoding.sample")  # the package exports the function of that name
    monkeypatch.setattr(module, "uniform", lambda seed, draw: number)
    for _ in range(200):
        logits = torch.randn(50)
        logits[:10] = logits[-10:] = -INF
        assert 10 <= sample(logits, Sampling()) < 40


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_filtered_in_fp64(dtype) -> None:
    logits = torch.randn(100).to(dtype)
    sampling = Sampling(temperature=0.7, top_p=0.9)
    torch.testing.assert_close(filtered(logits, sampling), filtered(logits.double(), sampling), rtol=0, atol=0)
