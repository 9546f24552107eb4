"""What a run shows: the numbers, the frame at any size of terminal, lines elsewhere, and text that means harm."""

import io
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from sublayer.train import view as module
from sublayer.train.evaluate import Score
from sublayer.train.metrics import Evaluated, Metrics, Sample
from sublayer.train.view import Curve, Frame, Lines, Quiet, View, clock, harmless, live, operations, picture

HARM = "[bold]no markup[/] \x1b[2J\x1b]0;title\x07\r\x08\u202e\u200b\ud800\x9b31m\tend"


class Time:
    """A clock that stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr(module.time, "monotonic", lambda: self.now)


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    return Time(monkeypatch)


def terminal(width: int = 80, height: int = 24, **options: Any) -> Console:
    given = {"highlight": False, "file": io.StringIO(), "force_terminal": True, "legacy_windows": False} | options
    return Console(width=width, height=height, **given)


def paper() -> Console:
    return terminal(force_terminal=False)


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def step(number: int, **changes: Any) -> Metrics:
    return Metrics(**{"step": number, "loss": 2.0, "norm": 0.5, "rate": 1e-3, "tokens": 100, "seconds": 0.5} | changes)


def shown(frame: Frame) -> list[str]:
    """The rows of the frame as they stand in the terminal, without styles."""
    options = frame.console.options
    lines = frame.console.render_lines(frame.frame(), options, pad=False)
    return ["".join(segment.text for segment in line if not segment.control) for line in lines]


# --- numbers ---


def test_loss_and_speed_are_those_of_the_last_steps_by_their_tokens() -> None:
    view = Quiet()
    assert math.isnan(view.recent_loss())
    for number in range(1, 6):
        view.show(step(number, loss=100.0))
    for number in range(6, 26):
        view.show(step(number, loss=float(number), tokens=number, seconds=2.0))
    tokens = sum(range(6, 26))
    assert view.recent_loss() == pytest.approx(sum(n * n for n in range(6, 26)) / tokens)
    assert view.speed() == pytest.approx(tokens / 40)
    view.show(step(26, loss=math.nan, tokens=1000))
    assert view.recent_loss() == pytest.approx(sum(n * n for n in range(7, 26)) / (tokens - 6))


def test_bits_and_utilisation_need_what_they_follow_from() -> None:
    view = Quiet()
    view.begin(10)
    view.show(step(1))
    assert math.isnan(view.bits_per_byte())
    assert math.isnan(view.utilisation())
    view.begin(10, flops=6e6, gemm=4e9, bytes_per_token=4.0)
    assert view.bits_per_byte() == pytest.approx(2 / math.log(2) / 4)
    assert view.utilisation() == pytest.approx(200 * 6e6 / 4e9)


def test_the_time_left_counts_all_between_steps_but_not_the_first(time: Time) -> None:
    view = Quiet()
    assert math.isnan(view.left())
    view.begin(20, done=10)
    assert math.isnan(view.left())
    time.now += 60  # the first step compiles
    view.show(step(11))
    assert view.left() == pytest.approx(60 * 9)
    time.now += 3
    view.show(step(12))
    time.now += 5  # with an evaluation
    view.show(step(13))
    assert view.left() == pytest.approx(4 * 7)
    time.now += 100  # nothing is known of a step that has not ended
    assert view.left() == pytest.approx(4 * 7)
    view.begin(40, done=20)
    assert math.isnan(view.left())


def test_where_time_ends_a_run_the_time_left_is_what_is_left_of_it(time: Time) -> None:
    view = Quiet()
    view.begin(0, done=7, seconds=90.0)
    time.now += 30
    assert view.left() == pytest.approx(60)
    time.now += 100
    assert view.left() == 0


def test_clocks_and_rates() -> None:
    assert [clock(seconds) for seconds in (0, 59.6, 245, 3723, -1, math.nan, math.inf)] == [
        "0:00", "1:00", "4:05", "1:02:03", "0:00", "-:--", "-:--"
    ]  # fmt: skip
    assert [operations(rate) for rate in (1.04e11, 9.89e14, 2e15, 5e7)] == [
        "104 GFLOP/s", "989 TFLOP/s", "2 PFLOP/s", "0.05 GFLOP/s"
    ]  # fmt: skip


@pytest.mark.parametrize("count", [0, 1, 7, 63, 64, 65, 1000])
def test_a_curve_keeps_the_means_of_a_series_of_any_length(count: int) -> None:
    curve = Curve(64)
    for value in range(count):
        curve.add(float(value))
        curve.add(math.nan)
    assert len(curve.means) < 64
    bins = curve.bins(10)
    assert len(bins) == min(count, 10)
    assert bins == sorted(bins)
    if count:
        assert sum(bins) / len(bins) == pytest.approx((count - 1) / 2, rel=0.05, abs=0.6)
        assert bins[0] <= max(0.1 * count, 1)


def test_a_curve_weighs_every_value_alike() -> None:
    curve = Curve(64)
    for i in range(1000):
        curve.add(float(i % 2))
    assert curve.bins(10) == [0.5] * 10
    curve.add(1e6)  # the last ones count before their run is full
    assert curve.bins(10)[-1] > 1e4


def test_a_picture_of_a_curve() -> None:
    rows = picture([8.0, 4.0, 2.0, 1.0], 2, "blocks")
    assert rows == [("   8.000 ┤", "█   "), ("   1.000 ┤", "█▇▃▁")]
    assert picture([1.0, 2.0], 1, "ascii") == [("   2.000 +", ".#")]
    assert picture([], 3) == []
    assert [row for _, row in picture([3.0, 3.0], 2)] == ["  ", "▁▁"]
    falling = picture([100.0, 50.0, *(2 - i / 18 for i in range(18))], 3)
    assert falling[0] == ("   2.000 ┤", falling[0][1])  # the fall from the first height does not set the scale
    assert falling[0][1].startswith("███")


# --- harm ---


@settings(max_examples=300)
@given(st.text())
def test_nothing_that_is_not_printable_is_left(text: str) -> None:
    safe = harmless(text)
    assert all(c.isprintable() or c == "\n" for c in safe)
    assert safe.count("\n") == text.count("\n")
    if text.isprintable():
        assert safe == text
    assert harmless(text, "ascii").isascii()


def test_what_is_not_printable_is_written_out() -> None:
    assert harmless("a\x1b[31m\u202eb\r\n\tc\ud800") == r"a\x1b[31m\u202eb" + "\\r\n    c\\ud800"
    assert harmless("é²", "latin-1") == "é²"
    assert harmless("日é", "latin-1") == "?é"


@pytest.mark.parametrize("width", [80, 120])
def test_a_frame_shows_hostile_text_letter_by_letter(width: int) -> None:
    frame = Frame(terminal(width, 40))
    frame.begin(100)
    frame.show(step(1))
    frame.show(Sample(1, HARM))
    text = "\n".join(shown(frame))
    assert r"[bold]no markup[/] \x1b[2J\x1b]0;title\x07\r\x08\u202e\u200b\ud800\x9b31m" in text
    with frame:
        frame.note(HARM)
        frame.progress(HARM, 1, 2)
        assert r"[bold]no markup[/] \x1b[2J" in "\n".join(shown(frame))
        frame.progress(HARM, 2, 2)
    assert "\x1b]" not in printed(frame.console)
    assert "\x1b[2J" not in printed(frame.console)
    lines = Lines(paper())
    for tell in (lambda: lines.note(HARM), lambda: lines.show(Sample(1, HARM)), lambda: lines.progress(HARM, 1, 2)):
        tell()
    assert harmless(printed(lines.console)) == printed(lines.console)
    assert printed(lines.console).count("[bold]no markup[/]") == 3


# --- the frame ---


@settings(max_examples=60, deadline=None)
@given(st.integers(10, 200), st.integers(1, 60), st.text(max_size=400), st.text(max_size=30))
def test_a_frame_fits_its_terminal(width: int, height: int, text: str, label: str) -> None:
    frame = Frame(terminal(width, height))
    frame.begin(10**7, flops=6e9, gemm=1e15, bytes_per_token=3.5)
    for number in range(1, 50):
        frame.show(step(10**6 + number, loss=100 / number))
    frame.show(Evaluated(10**6, 12.3456, 230000.0, 2.345))
    frame.show(Sample(10**6, text))
    frame.progress(label, 3, 10)
    rows = shown(frame)
    assert all(cell_len(row) <= width for row in rows)
    # In a terminal that is lower than its least, rich leaves the rest of it out.
    assert len(rows) <= max(height, 12)


def test_a_frame_shows_everything(time: Time) -> None:
    frame = Frame(terminal(100, 40))
    frame.begin(4000, flops=6e7, gemm=2e10, bytes_per_token=3.0)
    for number in range(1, 1001):
        frame.show(step(number, loss=3.0 + 5 / number, norm=0.123, rate=5.4e-4, tokens=200))
        time.now += 0.25
    frame.show(Evaluated(900, 2.5, math.exp(2.5), 1.25))
    frame.show(Sample(900, "def f():\n    return"))
    text = "\n".join(shown(frame))
    for part in (
        "step 1,000 of 4,000", "25%  4:10 gone, 12:30 left", "━━", "3.0050 nats/token", "1.445", "5.40e-04", "0.123",
        "400 tokens/s", "120.0% of 20 GFLOP/s", "2.5000 at step 900", "1.250", "█", "3.005 ┤", "written after step 900",
        "def f():\n    return",
    ):  # fmt: skip
        assert part in text, part


def test_a_long_label_leaves_room_for_how_far_it_is() -> None:
    frame = Frame(terminal(60))
    frame.progress("a\nlong\x07 " * 30, 3, 10)
    (row,) = shown(frame)
    assert row.startswith(r"a long\x07 a long")
    assert row.endswith("30%  0:00 left")


def test_what_is_not_known_is_a_dash() -> None:
    frame = Frame(terminal())
    frame.show(step(1))
    text = "\n".join(shown(frame))
    assert "nan" not in text
    assert text.count(" - ") == 4


def test_a_low_terminal_has_numbers_first_and_then_the_curve_and_then_the_sample() -> None:
    found = {}
    for height in range(1, 40):
        frame = Frame(terminal(80, height))
        frame.begin(10)
        frame.show(step(1))
        frame.show(Sample(1, "a sample\n" * 20))
        text = "\n".join(shown(frame))
        found[height] = ("gradient norm" in text, "loss since" in text, text.count("a sample"))
        assert ("written after" in text) == ("a sample" in text)
        # A row is kept for the cursor, and one for work that goes on beside.
        assert len(text.split("\n")) + 2 <= max(height, 9)
    assert found[1] == (True, False, 0)
    assert found[16] == (True, True, 0)
    assert found[24] == (True, True, 6)
    assert sorted(found.values()) == list(found.values())


def test_a_long_line_of_a_sample_is_folded() -> None:
    frame = Frame(terminal(50, 40))
    frame.show(step(1))
    frame.show(Sample(1, "x" * 120))
    assert shown(frame)[-3:] == ["x" * 50, "x" * 50, "x" * 20]


@pytest.mark.parametrize("width", [80, 24])
def test_a_terminal_without_unicode_gets_ascii(width: int) -> None:
    frame = Frame(terminal(width, file=io.TextIOWrapper(io.BytesIO(), encoding="ascii")))
    frame.begin(10)
    frame.show(step(1))
    frame.show(step(2, loss=1.0))
    frame.show(Sample(1, "日本 é"))
    with frame:
        frame.note("é")  # nothing raises
    text = "\n".join(shown(frame))
    assert text.isascii()
    assert "2.000 +#" in text
    assert "?? ?" in text


def test_steps_do_not_wait_for_the_terminal() -> None:
    """Only the thread that refreshes draws, however many steps there are."""
    frame = Frame(terminal())
    frame.begin(1000)
    for number in range(1, 1001):
        frame.show(step(number))
    frame.progress("encoding", 1, 2)
    assert printed(frame.console) == ""


def test_evaluations_and_notes_stay_above_the_frame() -> None:
    frame = Frame(terminal())
    with frame:
        frame.begin(10)
        frame.show(step(1))
        frame.show(Evaluated(1, 2.0, 7.39, math.nan))
        frame.note("saved")
        frame.progress("encoding", 0, 3)
        assert "encoding" in "\n".join(shown(frame))
        frame.progress("encoding", 3, 3)
        assert "encoding" not in "\n".join(shown(frame))
        frame.progress("encoding", 3, 3)
    text = printed(frame.console)
    assert text.count("step 1: held out 2.0000 nats/token  perplexity 7.39") == 1
    assert text.count("saved") == 1
    assert text.count("encoding: done in") == 1
    assert "step 1 of 10" in text  # the last frame


def test_a_view_may_be_entered_again_inside() -> None:
    frame = Frame(terminal())
    with frame:
        outer = frame.live
        with frame:
            frame.begin(10)
        assert frame.live is outer
        assert frame.live.is_started
        with pytest.raises(KeyError), frame:
            raise KeyError
        assert frame.live.is_started
    assert not frame.live.is_started


# --- lines ---


def test_lines_come_at_intervals_with_rate_and_time_left(time: Time) -> None:
    lines = Lines(paper(), every=10.0)
    lines.begin(100, flops=6e6, gemm=1e10, bytes_per_token=4.0)
    for number in range(1, 101):
        time.now += 1
        lines.show(step(number, loss=200.0 / number, rate=number / 1000))
    rows = printed(lines.console).splitlines()
    assert [row.split()[1] for row in rows] == ["1/100", *(f"{n}/100" for n in range(11, 100, 10)), "100/100"]
    assert rows[0] == (
        "step 1/100  loss 200.0000  72.135 bits/byte  rate 1.00e-03  norm 0.5  200 tokens/s  12% of 10 GFLOP/s"
        "  1:39 left"
    )
    assert rows[1].endswith("  1:29 left")
    assert rows[-1].endswith("  0:00 left")


def test_a_resumed_run_has_a_line_at_once() -> None:
    lines = Lines(paper())
    lines.due = math.inf
    lines.begin(100, done=50)
    for number in (51, 52):
        lines.show(step(number))
    assert [row.split()[1] for row in printed(lines.console).splitlines()] == ["51/100"]


def test_evaluations_samples_and_notes_are_whole_lines() -> None:
    lines = Lines(paper())
    long = "word " * 60
    lines.show(Evaluated(5, 2.0, 7.389, 1.5))
    lines.show(Sample(5, f"a\n{long}"))
    lines.note(long)
    assert printed(lines.console).splitlines() == [
        "step 5: held out 2.0000 nats/token  1.5000 bits/byte  perplexity 7.39", "  | a", f"  | {long}", long
    ]  # fmt: skip


def test_work_before_training_is_told_at_intervals_and_at_its_end(time: Time) -> None:
    lines = Lines(paper())
    for done in range(41):
        lines.progress("encoding", done, 40)
        time.now += 1
    lines.progress("encoding", 40, 40)
    lines.progress("nothing", 0, 0)
    assert printed(lines.console).splitlines() == [
        "encoding: 0%", "encoding: 25%, 0:30 left", "encoding: 50%, 0:20 left", "encoding: 75%, 0:10 left",
        "encoding: done in 0:40",
    ]  # fmt: skip


def test_training_ends_the_work_before_it() -> None:
    frame = Frame(terminal())
    frame.progress("encoding", 1, 2)
    frame.begin(10)
    assert "encoding" not in "\n".join(shown(frame))


# --- which ---


def test_the_view_fits_what_stdout_is() -> None:
    assert isinstance(live(terminal()), Frame)
    assert isinstance(live(paper()), Lines)
    assert isinstance(live(terminal(_environ={"TERM": "dumb"})), Lines)


def test_a_quiet_view_shows_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    view: View = Quiet()
    with view:
        view.begin(2)
        view.progress("encoding", 1, 2)
        view.show(step(1))
        view.show(Sample(1, "text"))
        view.note("line")
    assert capfd.readouterr() == ("", "")


def test_losses_are_told_in_the_objectives_words() -> None:
    lines = Lines(paper())
    lines.begin(10, unit="squared error", answer="value")
    lines.show(step(1))
    lines.show(Evaluated(1, 0.5, math.exp(0.5), math.nan))
    lines.begin(10, answer="image")
    lines.show(Evaluated(1, 0.5, math.exp(0.5), math.nan, 0.75))
    first, *rows = printed(lines.console).splitlines()
    assert "values/s" in first
    assert rows == [
        "step 1: held out 0.5000 squared error/value", "step 1: held out 0.5000 nats/image  accuracy 75.00%"
    ]  # fmt: skip
    assert Score(5.0, 10, 0).described("squared error", "value") == "0.5000 squared error a value, held out"
