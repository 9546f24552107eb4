"""The bench of mixers: what it measures is what it says, and its smallest form runs."""

import json
from pathlib import Path

import pytest
import torch

from bench import harness, mixers
from bench.harness import Options
from sublayer.errors import StateError


@pytest.mark.parametrize("name", mixers.MIXERS)
def test_a_mixer_is_about_as_large_as_attention(name: str) -> None:
    count = sum(parameter.numel() for parameter in mixers.model(name).parameters())
    low = 0.6 if name.startswith("S4") else 0.95  # whose maps into the state have no width of their own
    assert low * 4 * mixers.DIM**2 <= count <= 1.1 * 4 * mixers.DIM**2


def test_each_mixer_has_a_line_of_its_own() -> None:
    assert mixers.STYLES.keys() == mixers.MIXERS.keys()
    assert len({str(style) for style in mixers.STYLES.values()}) == len(mixers.MIXERS)


@pytest.mark.parametrize("name", mixers.MIXERS)
def test_a_pass_goes_forward_and_back_and_decoding_takes_its_tokens(name: str) -> None:
    forward, backward = mixers.training(name, 16)
    y = forward()
    assert y.shape == (1, 16, mixers.DIM)
    assert y.requires_grad
    backward(y)
    decode = mixers.decoding(name, 16, mixers.TOKENS)
    decode()
    with pytest.raises(StateError, match="do not fit"):  # the state had room for so many and no more
        decode()


def test_the_smallest_form_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "LENGTHS", (16, 32, 64))
    monkeypatch.setattr(
        mixers, "peaks", lambda target, name, lengths: [x << 20 for length in lengths for x in (length, 3 * length)]
    )
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    mixers.main(Options(quick=True))
    found = json.loads((tmp_path / "mixers.json").read_text())
    assert set(found["seconds"]["forward"]) == set(mixers.MIXERS)
    assert found["bytes"]["forward and backward"]["LSTM"] == {"16": 3 << 24, "32": 3 << 25}
    tables = (tmp_path / "mixers.md").read_text()
    assert "| LSTM | 16 | 32 | 1.00 |" in tables
    assert "| attention | 32 | 64 | 262,144 |" in tables  # KiB: a key and a value of 256 numbers a token
    assert (tmp_path / "mixers.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_peak_that_was_not_seen_is_shown_and_not_fitted() -> None:
    assert mixers._table("MiB", {"LSTM": {16: 0.0, 32: 1.0}}).splitlines()[2] == "| LSTM | 0 | 1 |  |"


def test_goals_are_for_scans_within_three_times_and_then_faster() -> None:
    passes = {name: {1024: [2.0], 4096: [1.5], 8192: [1.5]} for name in mixers.MIXERS}
    passes["attention"] = {1024: [1.0], 4096: [1.0], 8192: [1.0]}
    passes["S4"] = {1024: [3.5], 4096: [1.5], 8192: [0.5]}
    goals = {row.name: row.goal for row in mixers._rows(passes)}
    assert (goals["1024: Mamba"], goals["4096: Mamba"], goals["8192: Mamba"]) == ("≤ 3: met", None, "≤ 1: missed")
    assert (goals["1024: S4"], goals["8192: S4"]) == ("≤ 3: missed", "≤ 1: met")
    assert goals["8192: LSTM"] is None
    assert "1024: attention" not in goals


@pytest.mark.slow
def test_memory_is_of_each_pass_by_itself() -> None:
    found = mixers._peaks("gated convolution", [1024, 2048])
    for kind, numbers in zip(found, (4, 6), strict=True):  # the taps, what is gated and gates, what is kept
        assert kind[2048] > numbers * 2048 * mixers.DIM * 4
        assert 1.8 * kind[1024] < kind[2048] < 2.2 * kind[1024]


def test_seconds_are_of_the_processor_where_torch_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.process_time", lambda: 1.0)
    monkeypatch.setattr("time.perf_counter", lambda: 2.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(harness.clock())
    assert found == [1.0, 2.0]
