"""metrics.jsonl: read as written, nothing lost to a kill, and the same file after a resume; TensorBoard's curves."""

import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sublayer.errors import SublayerError, UsageError
from sublayer.train.metrics import Evaluated, Metrics, MetricsFile, Sample, TensorBoard, read_metrics

LINES = [
    Metrics(1, 5.5, 1.25, 1e-3, 4096, 0.5),
    Metrics(2, 5.25, 1.0, 2e-3, 4000, 0.25),
    Evaluated(2, 5.125, 168.2, 2.5),
    Sample(2, 'def f():\n\t"¹ 🙂 \x1b[31m\ud800"'),
    Metrics(3, 5.0, 0.5, 1e-3, 4096, 0.5),
]


def written(path: Path, records: list[Any]) -> MetricsFile:
    file = MetricsFile(path)
    for record in records:
        file.write(record)
    return file


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    for count, record in enumerate(LINES, 1):
        file.write(record)
        assert read_metrics(path) == LINES[:count]  # at once, though the file is open
    assert json.loads(path.read_text().splitlines()[0]) == {
        "step": 1, "loss": 5.5, "norm": 1.25, "rate": 1e-3, "tokens": 4096, "seconds": 0.5
    }  # fmt: skip


def test_values_that_are_not_finite_are_null_and_nan_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, [Metrics(1, math.nan, math.inf, 1e-3, 0, 0.0), Evaluated(1, 2.0, 7.4, math.nan)])
    for line in path.read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    step, evaluated = read_metrics(path)
    assert isinstance(step, Metrics)
    assert isinstance(evaluated, Evaluated)
    assert all(math.isnan(value) for value in (step.loss, step.norm, evaluated.bits_per_byte))


def test_a_whole_number_is_read_as_the_float_it_was(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "held_loss": 2, "perplexity": 7, "bits_per_byte": 1, "accuracy": null}\n')
    (record,) = read_metrics(path)
    assert [type(value) for value in vars(record).values()] == [int, float, float, float, float]


def test_a_resumed_run_leaves_the_file_of_an_uninterrupted_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = written(path, LINES)
    whole = path.read_bytes()
    for step in (0, 1, 2, 3, 9):
        file.cut(step)
        assert read_metrics(path) == [record for record in LINES if record.step <= step]
        for record in LINES:
            if record.step > step:
                file.write(record)
        assert path.read_bytes() == whole
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, LINES)
    whole = path.read_bytes()
    for end in range(len(whole) - 5, len(whole)):
        path.write_bytes(whole[:end])
        assert read_metrics(path) == LINES[:-1]
    written(path, []).cut(9)
    assert path.read_bytes() == whole[: whole.rstrip(b"\n").rindex(b"\n") + 1]


def test_a_file_that_needs_no_cut_is_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = written(path, LINES)
    before = path.stat().st_ino
    file.cut(3)
    assert path.stat().st_ino == before
    MetricsFile(tmp_path / "none.jsonl").cut(3)
    assert not (tmp_path / "none.jsonl").exists()


@pytest.mark.parametrize(
    "line",
    [
        b"not json",
        b"[1, 2]",
        b"7",
        b'{"step": 1}',
        b'{"step": 1, "sample": 7}',
        b'{"step": true, "sample": "x"}',
        b'{"step": 1.0, "sample": "x"}',
        b'{"step": 1, "held_loss": "2", "perplexity": 1, "bits_per_byte": 1, "accuracy": null}',
        b'{"step": null, "held_loss": 2, "perplexity": 1, "bits_per_byte": 1, "accuracy": null}',
        b"\xff\xfe",
        b"[" * 100_000,
    ],
)
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "metrics.jsonl"
    written(path, LINES[:2])
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(SublayerError, match=re.escape(f"{path}:3: not a line of metrics")):
        read_metrics(path)


def test_a_line_without_end_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"x" * ((1 << 20) + 2))
    with pytest.raises(SublayerError, match=":1: a line of more than"):
        read_metrics(path)


def test_no_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SublayerError, match="none.jsonl: cannot be read: No such file"):
        read_metrics(tmp_path / "none.jsonl")
    (tmp_path / "file").write_text("")
    with pytest.raises(SublayerError, match="metrics.jsonl: cannot be written"):
        MetricsFile(tmp_path / "file" / "metrics.jsonl").write(LINES[0])


def test_a_full_disk_leaves_whole_lines(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk: the write that crosses it is cut short."""
    import resource
    import signal

    path = tmp_path / "metrics.jsonl"
    file = written(path, LINES[:2])
    before, soft = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 20, soft[1]))
    try:
        with pytest.raises(SublayerError, match="metrics.jsonl: cannot be written"):
            file.write(LINES[2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, soft)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    file.write(LINES[2])  # there is room again
    assert read_metrics(path) == LINES[:3]


def test_tensorboard_shows_the_same_numbers(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board = TensorBoard(tmp_path)
    for record in LINES:
        board.write(record)
    board.close()
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    curves = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curves.keys() == {
        *(f"training/{name}" for name in ("loss", "gradient norm", "learning rate", "tokens a second")),
        *(f"held out/{name}" for name in ("held_loss", "perplexity", "bits_per_byte")),
    }
    assert curves["training/loss"] == [(1, 5.5), (2, 5.25), (3, 5.0)]
    assert curves["training/tokens a second"][:2] == [(1, 8192), (2, 16000)]
    assert curves["held out/bits_per_byte"] == [(2, 2.5)]
    assert found.Tags()["tensors"] == ["sample/text_summary"]


def test_tensorboard_passes_over_what_was_after_the_resumed_step(tmp_path: Path) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for start, loss in ((0, 5.0), (2, 3.0)):
        board = TensorBoard(tmp_path, start)
        for step in range(start + 1, 5):
            board.write(Metrics(step, loss, 1.0, 1e-3, 10, 0.0))
        board.close()
        os.rename(next(tmp_path.glob("events.*")), tmp_path / f"{start}.tfevents.{start}")
    found = event_accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in found.Scalars("training/loss")] == [(1, 5), (2, 5), (3, 3), (4, 3)]


def test_tensorboard_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'sublayer\[tensorboard\]'"):
        TensorBoard(tmp_path)
