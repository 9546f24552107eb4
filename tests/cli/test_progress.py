"""What a long job tells: after two seconds, with rate and time left, in a terminal of any width and elsewhere."""

import os
import sys

import pytest

from sublayer.cli import progress

AFTER = progress.AFTER  # which is another while tests run


class Now:
    """A clock that stands until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 0.0
        monkeypatch.setattr(progress, "AFTER", AFTER)
        monkeypatch.setattr(progress.time, "monotonic", lambda: 100.0 + self.seconds)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> Now:
    return Now(monkeypatch)


def in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """stderr is one of 30 columns; for the test alone, for fixtures have another stderr."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys.stderr, "fileno", lambda: 2, raising=False)
    monkeypatch.setattr(os, "get_terminal_size", lambda number: os.terminal_size((30 if number == 2 else 99, 24)))


def translating(now: Now) -> None:
    with progress.telling("translating") as tell:
        for seconds, done in ((1.0, 2), (4.0, 10), (5.0, 12), (15.0, 30), (20.0, 40)):
            now.seconds = seconds
            tell(done, 40, done / 40)


def test_elsewhere_it_is_a_line_now_and_then(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    translating(now)
    assert capsys.readouterr().err == (
        "translating: 10 of 40, 2.5/s, 0:12 left\n"
        "translating: 30 of 40, 2.0/s, 0:05 left\n"
        "translating: 40 of 40, 2.0/s, done in 0:20\n"
    )


def test_a_job_of_less_than_two_seconds_tells_nothing(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.telling("translating") as tell:
        now.seconds = 1.9
        tell(40, 40, 1.0)
    assert capsys.readouterr().err == ""


def test_in_a_terminal_it_is_one_line_that_fits(
    now: Now, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_a_terminal(monkeypatch)
    translating(now)
    assert capsys.readouterr().err == (
        "\rtranslating: 10 of 40, 2.5/s,"
        "\rtranslating: 12 of 40, 2.4/s,"
        "\rtranslating: 30 of 40, 2.0/s,"
        "\rtranslating: 40 of 40, 2.0/s,\n"
    )


def test_a_job_that_breaks_off_leaves_no_half_line(
    now: Now, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    in_a_terminal(monkeypatch)

    def job() -> None:
        with progress.telling("a") as tell:
            now.seconds = 5.0
            tell(1, 5, 0.2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job()
    assert capsys.readouterr().err == f"\ra: 1 of 5, 0.2/s, 0:20 left\r{27 * ' '}\r"


def test_stages_are_told_one_by_one(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    line = progress.Line()
    told = (
        ("read", 1.0, 5),
        ("read", 4.0, 20),
        ("read", 4.5, 20),
        ("write", 5.0, 0),
        ("write", 15.0, 10),
        ("write", 16.0, 40),
    )
    for what, seconds, done in told:
        now.seconds = seconds
        line.stage(what, done, 20 if what == "read" else 40, lambda count: f"{count:.1f} MB")
    assert capsys.readouterr().err == (
        "read: 20.0 MB of 20.0 MB, 5.0 MB/s, done in 0:04\n"
        "write: 10.0 MB of 40.0 MB, 1.0 MB/s, 0:30 left\n"
        "write: 40.0 MB of 40.0 MB, 3.6 MB/s, done in 0:11\n"
    )


def test_prompts_are_counted_with_their_tokens(now: Now, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = progress.Progress(1001)
    prompts.skip()
    prompts.count(50, 10)
    assert capsys.readouterr().err == ""
    now.seconds = 10
    prompts.count(50)
    prompts.count(50)
    assert capsys.readouterr().err == "10 of 1,000 prompts, 10.0 tokens/s, 16:30 left\n"
    now.seconds = 70
    prompts.count(0, 690)
    assert capsys.readouterr().err == "700 of 1,000 prompts, 2.1 tokens/s, 0:30 left\n"
