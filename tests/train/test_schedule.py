"""Schedules: published values, the first and the last step, the shapes, and what a resumed run sees."""

import math

import pytest

from sublayer.errors import SpecError
from sublayer.train.schedule import Schedule, inverse_sqrt, transformer_rate

SHAPES = ["constant", "linear", "cosine", "wsd", "inverse_sqrt"]


def test_the_first_step_moves_and_the_peak_comes_right_after_the_warm_up() -> None:
    schedule = Schedule("cosine", warmup=2000)
    assert 6e-4 * schedule.factor(0, 100_000) == pytest.approx(2.9985e-7, rel=1e-4)
    assert 6e-4 * schedule.factor(1999, 100_000) == pytest.approx(6e-4 * 2000 / 2001)
    assert schedule.factor(2000, 100_000) == 1


def test_the_rate_of_2017() -> None:
    peak = transformer_rate(512, 4000)
    assert peak * inverse_sqrt(0, 4000) == pytest.approx(1.746928e-7, rel=1e-6)
    assert peak * inverse_sqrt(3999, 4000) == pytest.approx(6.987712e-4, rel=1e-6)
    assert peak * inverse_sqrt(99_999, 4000) == pytest.approx(1.397543e-4, rel=1e-6)
    schedule = Schedule("inverse_sqrt", warmup=4000)
    assert [schedule.factor(step, 7) for step in (0, 3999, 99_999)] == [
        inverse_sqrt(step, 4000) for step in (0, 3999, 99_999)
    ]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("warmup", [0, 1, 10, 200])
def test_no_step_has_rate_0_and_none_exceeds_the_peak(shape, warmup) -> None:
    factors = [Schedule(shape, warmup=warmup).factor(step, 100) for step in range(100)]
    assert all(0 < factor <= 1 for factor in factors)
    top = factors.index(max(factors))
    assert factors[: top + 1] == sorted(factors[: top + 1])
    assert factors[top:] == sorted(factors[top:], reverse=True)


def test_linear_and_cosine_against_their_formulas() -> None:
    """From the peak at step 10 to a tenth at step 110, which is the end of the run."""
    linear, cosine = (Schedule(shape, warmup=10, final=0.1) for shape in ("linear", "cosine"))
    for step in (10, 35, 60, 109):
        share = (step - 10) / 100
        assert linear.factor(step, 110) == pytest.approx(1 - 0.9 * share)
        assert cosine.factor(step, 110) == pytest.approx(0.55 + 0.45 * math.cos(math.pi * share))
    assert linear.factor(110, 110) == pytest.approx(0.1)
    assert cosine.factor(500, 110) == pytest.approx(0.1)  # past the end it does not rise again
    assert cosine.factor(10, 10) == 1  # a run no longer than its warm-up


def test_wsd_is_flat_until_the_cooldown_and_falls_as_one_minus_a_root() -> None:
    schedule = Schedule("wsd", warmup=10, cooldown=0.25)
    assert {schedule.factor(step, 400) for step in range(10, 301)} == {1.0}
    assert schedule.factor(325, 400) == pytest.approx(1 - math.sqrt(0.25))
    assert schedule.factor(399, 400) == pytest.approx(1 - math.sqrt(0.99))
    assert schedule.replace(final=0.2).factor(325, 400) == pytest.approx(0.2 + 0.8 * 0.5)
    assert Schedule("wsd", warmup=0).factor(79, 100) == 1 > Schedule("wsd", warmup=0).factor(81, 100)  # a fifth


def test_a_cooldown_does_not_begin_within_the_warm_up() -> None:
    schedule = Schedule("wsd", warmup=50, cooldown=1.0)
    assert schedule.factor(50, 100) == 1
    assert schedule.factor(75, 100) == pytest.approx(1 - math.sqrt(0.5))


def test_constant_stays() -> None:
    assert {Schedule("constant", warmup=3).factor(step, 10) for step in range(3, 20)} == {1.0}


def test_a_longer_run_of_wsd_leaves_the_flat_part_as_it_was() -> None:
    """What makes it worth having: a run may be extended after the fact."""
    schedule = Schedule("wsd", warmup=10)
    assert [schedule.factor(step, 100) for step in range(80)] == [schedule.factor(step, 1000) for step in range(80)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"shape": "cosin"}, "Schedule.shape"),
        ({"warmup": -1}, "warmup is a number of steps"),
        ({"final": 1.5}, "final is a share"),
        ({"shape": "constant", "final": 0.1}, "final=0.1 has no meaning for shape='constant'"),
        ({"shape": "inverse_sqrt", "final": 0.1}, "has no meaning"),
        ({"shape": "wsd", "cooldown": 0.0}, "cooldown is a share"),
        ({"shape": "linear", "cooldown": 0.2}, "no meaning but for shape='wsd'"),
    ],
)
def test_what_means_nothing_is_refused(settings, message) -> None:
    with pytest.raises(SpecError, match=message):
        Schedule(**settings)
