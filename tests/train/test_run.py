"""Whole runs: from text to a model, interrupted and gone on with, spoiled and refused."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import sublayer
from sublayer.errors import SublayerError, UsageError
from sublayer.text import load_tokenizer
from sublayer.train import checkpoint
from sublayer.train.config import Run, run_of
from sublayer.train.language import NextToken
from sublayer.train.metrics import Evaluated, Metrics, Record, Sample, read_metrics
from sublayer.train.process import Interrupted
from sublayer.train.run import NotFinite, Result, train
from sublayer.train.view import View

Tensors = dict[str, torch.Tensor]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(24):
        (folder / f"{i:02}.txt").write_text("".join(f"line {j} of {i}: {j * i % 7} and so on\n" for j in range(12)))
    return folder


def tiny(texts: Path, out: Path, **sections: Any) -> Run:
    """A run of eight steps, with all that draws or remembers: dropout, Muon, a moving average, two micro-batches."""
    table: dict[str, dict[str, Any]] = {
        "model": {"recipe": "llama", "dim": 16, "layers": 1, "heads": 2, "kv_heads": 1, "hidden": 24, "dropout": 0.2},
        "tokenizer": {"kind": "bytes"},
        "data": {"paths": str(texts), "length": 16, "held": 0.2},
        "train": {"steps": 8, "batch": 4, "micro": 2, "ema": 0.9},
        "optimizer": {"kind": "muon", "rate": 1e-2},
        "schedule": {"warmup": 2},
        "eval": {"every": 3, "tokens": 200, "final": 200, "sample_tokens": 4},
        "save": {"every": 2, "keep": 3},
    }
    for name, values in sections.items():
        table[name] = table[name] | values
    return run_of({"out": str(out), **table})


def weights(path: Path) -> Tensors:
    return {name: p.detach() for name, p in sublayer.load(path).named_parameters()}


def told(out: Path) -> list[tuple[Any, ...]]:
    """metrics.jsonl without the times."""
    values: list[tuple[Any, ...]] = []
    for record in read_metrics(out / "metrics.jsonl"):
        if isinstance(record, Metrics):
            values.append((record.step, record.loss, record.norm, record.rate, record.tokens))
        elif isinstance(record, Evaluated):
            values.append((record.step, record.held_loss, record.bits_per_byte))
        else:
            values.append((record.step, record.sample))
    return values


def same(a: Path, b: Path) -> None:
    """Two runs came to the same, to the last bit."""
    first, second = weights(a / "model"), weights(b / "model")
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
    assert told(a) == told(b)


class Acting(View):
    """Does something after a step."""

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.act, self.lines = step, act, list[str]()

    def show(self, record: Record) -> None:
        if isinstance(record, Metrics) and record.step == self.at:
            self.act()

    def note(self, line: str) -> None:
        self.lines.append(line)


def noting() -> Acting:
    return Acting(-1, lambda: None)


def test_text_becomes_a_model_that_writes(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = train(tiny(texts, out, tokenizer={"kind": "bpe", "vocab": 280}, train={"ema": None}))
    assert isinstance(result, Result)
    model, tokenizer = sublayer.load(result.folder), load_tokenizer(result.folder)
    assert (model.spec.vocab, tokenizer.size) == (280, 280)
    assert model.generate("line 3", tokenizer=tokenizer, max_tokens=5, seed=0)[0].text
    records = read_metrics(out / "metrics.jsonl")
    assert [r.step for r in records if isinstance(r, Metrics)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [r.step for r in records if isinstance(r, Evaluated)] == [3, 6, 8]
    assert [r.step for r in records if isinstance(r, Sample)] == [3, 6, 8]
    assert json.loads((out / "result.json").read_text())["bits_per_byte"] == result.score.bits_per_byte
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    newest = checkpoint.saved(out / "checkpoints")[-1].path
    assert all(torch.equal(t, weights(newest)[name]) for name, t in weights(result.folder).items())


def test_the_score_is_the_code_length_of_the_held_out_text(texts: Path, tmp_path: Path) -> None:
    """Against the documents one by one, given whole to the model."""
    out = tmp_path / "out"
    run = tiny(texts, out, data={"length": 600}, train={"ema": None}, eval={"final": None})
    result = train(run)
    model = sublayer.load(result.folder)
    from sublayer.data.tokens import Tokens

    held, nats, tokens = Tokens.open(out / "data" / "held"), 0.0, 0
    for i in range(held.documents):
        ids = torch.tensor(held.document(i).astype(int))
        following = torch.cat([ids[1:], ids[:1]]) if i + 1 < held.documents else ids[1:]  # its end: the next one's mark
        logits = model(ids[None])[0, : len(following)]
        nats += torch.nn.functional.cross_entropy(logits, following, reduction="sum").item()
        tokens += len(following)
    assert result.score.tokens == tokens
    assert result.score.nats == pytest.approx(nats, rel=1e-4)
    assert result.score.bytes == held.bytes
    assert result.score.bits_per_byte == pytest.approx(nats / math.log(2) / held.bytes, rel=1e-4)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_run_that_was_stopped_comes_to_the_same(at: int, number: int, texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "whole"))
    run = tiny(texts, tmp_path / "parts")
    with pytest.raises(Interrupted, match=f"stopped at step {at} of 8, which is saved") as caught:
        train(run, Acting(at, lambda: os.kill(os.getpid(), number)))
    assert caught.value.exit_code == 128 + number
    view = noting()
    train(run, view)
    assert f"goes on from step {at} of 8" in view.lines
    same(tmp_path / "whole", tmp_path / "parts")


def test_a_run_that_was_killed_loses_the_steps_since_the_last_save(texts: Path, tmp_path: Path) -> None:
    """An exception that nothing catches stands for the kill; a slow test really kills."""

    def die() -> None:
        raise MemoryError

    train(tiny(texts, tmp_path / "whole"))
    run = tiny(texts, tmp_path / "parts")
    with pytest.raises(MemoryError):
        train(run, Acting(5, die))
    assert told(tmp_path / "parts")[-1][0] == 5
    view = noting()
    train(run, view)
    assert "goes on from step 4 of 8" in view.lines
    same(tmp_path / "whole", tmp_path / "parts")


def test_micro_batches_change_no_more_than_rounding(texts: Path, tmp_path: Path) -> None:
    for micro in (1, 4):
        train(tiny(texts, tmp_path / str(micro), model={"dropout": 0.0}, train={"micro": micro, "ema": None}))
    one, four = (weights(tmp_path / name / "model") for name in ("1", "4"))
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-3, atol=1e-4)


def test_recomputation_changes_nothing(texts: Path, tmp_path: Path) -> None:
    """Dropout included."""
    for name, recompute in (("kept", False), ("again", True)):
        train(tiny(texts, tmp_path / name, train={"recompute": recompute}))
    same(tmp_path / "kept", tmp_path / "again")


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_precisions_train(precision: str, texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "out", train={"precision": precision, "steps": 4}))
    facts = checkpoint.saved(tmp_path / "out" / "checkpoints")[-1].facts
    assert ("scaler" in facts) == (precision == "fp16")
    assert all(math.isfinite(line[1]) for line in told(tmp_path / "out") if len(line) == 5)


def test_a_finished_run_is_only_reported(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, tmp_path / "out")
    result = train(run)
    before = (tmp_path / "out" / "metrics.jsonl").read_bytes()
    view = noting()
    assert train(run, view) == result
    assert "finished already, at step 8" in view.lines[0]
    assert (tmp_path / "out" / "metrics.jsonl").read_bytes() == before


def test_a_run_that_was_killed_while_it_drew_its_last_picture_draws_it_again(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    out = tmp_path / "out"

    def draw(path: Path, *_: object, **__: object) -> None:
        if (out / "model").exists():
            path.with_name(f".{path.name}.{2**22 + 1}.partial").touch()  # a process that is no more
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("sublayer.train.run.plot_loss", draw)
        with pytest.raises(Killed):
            train(tiny(texts, out))
    train(tiny(texts, out))
    assert (out / "loss.png").exists()
    assert [path.name for path in out.rglob("*partial*")] == []


def test_another_run_in_the_folder_is_refused_or_moved_aside(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(tiny(texts, out))
    other = tiny(texts, out, train={"batch": 8})
    with pytest.raises(UsageError, match="holds another run, with train.batch = 4 and not 8"):
        train(other)
    train(other, restart=True)
    assert json.loads((out / "run.json").read_text())["train"]["batch"] == 8
    assert json.loads((tmp_path / "out.1" / "run.json").read_text())["train"]["batch"] == 4
    assert (tmp_path / "out.1" / "model" / "model.safetensors").exists()


def test_how_often_a_run_is_saved_may_change_on_the_way(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "whole"))
    with pytest.raises(Interrupted):
        train(tiny(texts, tmp_path / "parts"), Acting(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    train(tiny(texts, tmp_path / "parts", save={"every": 5}, train={"recompute": True}))
    same(tmp_path / "whole", tmp_path / "parts")


def test_two_processes_cannot_train_in_one_folder(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, tmp_path / "out")

    def again() -> None:
        train(run)

    with pytest.raises(UsageError, match="another process is training in"):
        train(run, Acting(1, again))


def test_a_damaged_checkpoint_is_passed_over(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "whole"))
    run, out = tiny(texts, tmp_path / "parts"), tmp_path / "parts"
    with pytest.raises(Interrupted):
        train(run, Acting(6, lambda: os.kill(os.getpid(), signal.SIGINT)))
    for name, keep in (("training.safetensors", 100), ("training.json", 3)):
        path = checkpoint.saved(out / "checkpoints")[-1 if keep == 100 else -2].path / name
        path.write_bytes(path.read_bytes()[:keep])
    view = noting()
    train(run, view)
    assert sum("is passed over" in line for line in view.lines) == 2
    assert "goes on from step 2 of 8" in view.lines
    same(tmp_path / "whole", out)


def test_a_full_disk_is_survived(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save that fails is told and tried again; one that is needed ends the run, and the next command mends it."""
    train(tiny(texts, tmp_path / "whole"))
    inner, full = checkpoint.write_tensors, [True]

    def write(path: Path, *rest: Any) -> None:
        inner(path, *rest)
        if full[0]:
            path.write_bytes(path.read_bytes()[:50])
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tensors", write)
    run, view = tiny(texts, tmp_path / "parts"), Acting(5, lambda: full.__setitem__(0, False))
    train(run, view)
    assert next(line for line in view.lines if "No space left" in line).startswith("step 2 could not be saved")
    same(tmp_path / "whole", tmp_path / "parts")
    full[0] = True
    with pytest.raises(SublayerError, match="step 8 could not be saved: .*No space left"):
        train(tiny(texts, tmp_path / "last"))
    assert not list((tmp_path / "last" / "checkpoints").glob(".*"))
    full[0] = False
    train(tiny(texts, tmp_path / "last"))
    same(tmp_path / "whole", tmp_path / "last")


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Makes the objective infinite in one step of the run."""
    inner, calls = NextToken.__call__, [0]

    def loss(self: NextToken, model: Any, batch: Any) -> Any:
        made = inner(self, model, batch)
        calls[0] += model.training
        return (
            made._replace(sum=made.sum * math.inf) if model.training and calls[0] in (2 * step - 1, 2 * step) else made
        )

    monkeypatch.setattr(NextToken, "__call__", loss)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_rows(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 5)
    with pytest.raises(NotFinite, match=r"step 5: the (loss|gradient) is not finite: .*; rows: .*\.txt") as caught:
        train(tiny(texts, tmp_path / "out"))
    assert "train.non_finite=skip" in str(caught.value)
    assert [one.step for one in checkpoint.saved(tmp_path / "out" / "checkpoints")] == [2, 4]


def test_a_loss_that_is_not_finite_is_passed_over_if_that_is_asked(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, 5)
    view = noting()
    train(tiny(texts, tmp_path / "out", train={"non_finite": "skip"}), view)
    assert [line for line in view.lines if "is passed over" in line and line.startswith("step 5")]
    assert all(bool(t.isfinite().all()) for t in weights(tmp_path / "out" / "model").values())


def test_a_weight_that_blows_up_is_named(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, tmp_path / "out", optimizer={"kind": "adamw", "rate": 1e30}, train={"clip": None})
    with pytest.raises(NotFinite, match=r"step \d: the (loss|gradient) is not finite: .*decoder\."):
        train(run)


def test_the_result_is_the_best_or_an_average_if_that_is_asked(texts: Path, tmp_path: Path) -> None:
    out = tmp_path / "average"
    train(tiny(texts, out, save={"average": 3, "every": 1, "keep": 3}, train={"ema": None}))
    parts = [weights(one.path) for one in checkpoint.saved(out / "checkpoints")[-3:]]
    for name, t in weights(out / "model").items():
        torch.testing.assert_close(t, torch.stack([p[name].double() for p in parts]).mean(0).float())
    out = tmp_path / "best"
    rates = {"kind": "adamw", "rate": 0.3}
    train(tiny(texts, out, save={"best": True, "every": 3}, train={"ema": None}, optimizer=rates))
    best = checkpoint.best(checkpoint.saved(out / "checkpoints"), "held_loss")
    assert best is not None
    losses = {r.step: r.held_loss for r in read_metrics(out / "metrics.jsonl") if isinstance(r, Evaluated)}
    assert best.step == min(losses, key=losses.__getitem__)
    assert all(torch.equal(t, weights(best.path)[name]) for name, t in weights(out / "model").items())


def test_a_run_starts_from_a_model(texts: Path, tmp_path: Path) -> None:
    """Its weights, its spec and its tokenizer."""
    first = train(tiny(texts, tmp_path / "first"))
    table: dict[str, Any] = {"model": {"start": str(first.folder)}, "data": {"paths": str(texts), "length": 16}}
    table |= {"train": {"steps": 1, "batch": 4}, "optimizer": {"kind": "adamw", "rate": 1e-12}}
    second = train(run_of({"out": str(tmp_path / "second"), **table}))
    for name, t in weights(second.folder).items():
        torch.testing.assert_close(t, weights(first.folder)[name], rtol=0, atol=1e-9)


def test_rows_longer_than_the_model_reads_are_refused(texts: Path, tmp_path: Path) -> None:
    table = {"model": {"size": "gpt2-124m"}, "train": {"steps": 1}, "tokenizer": {"kind": "bytes"}}
    run = run_of({"out": str(tmp_path / "o"), "data": {"paths": str(texts), "length": 2000}, **table})
    with pytest.raises(UsageError, match="data.length: 2000 is more than the model's 1024 positions"):
        train(run)


def test_a_tokenizer_larger_than_the_model_is_refused(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="it has 257 ids, and the model a table of 200"):
        train(tiny(texts, tmp_path / "out", model={"vocab": 200}))


@pytest.mark.parametrize("text", ["", b"\x00\x01\x02" * 50])
def test_text_that_is_none_is_told(text: Any, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(SublayerError) as caught:
        train(tiny(path, tmp_path / "out"))
    assert "text.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_tensorboard_gets_the_curves_too(texts: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    train(tiny(texts, tmp_path / "out", save={"tensorboard": True}))
    assert list((tmp_path / "out" / "tensorboard").glob("events*"))


@pytest.mark.parametrize("at", [3, 5])
def test_an_average_is_that_of_an_uninterrupted_run(at: int, texts: Path, tmp_path: Path) -> None:
    """The checkpoint of the interruption is none that it averages, and pushes none of them out."""
    sections: dict[str, Any] = {"save": {"average": 2, "keep": 2, "every": 2}, "train": {"ema": None}}
    train(tiny(texts, tmp_path / "whole", **sections))
    run = tiny(texts, tmp_path / "parts", **sections)
    with pytest.raises(Interrupted):
        train(run, Acting(at, lambda: os.kill(os.getpid(), signal.SIGINT)))
    train(run)
    same(tmp_path / "whole", tmp_path / "parts")


def test_only_a_loss_of_this_very_step_makes_a_checkpoint_the_best(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "out", save={"every": 2, "keep": 9}, eval={"every": 3}))
    facts = {one.step: one.facts.get("held_loss") for one in checkpoint.saved(tmp_path / "out" / "checkpoints")}
    assert [step for step, loss in facts.items() if loss is not None] == [6, 8]


def test_where_no_checkpoint_is_whole_nothing_begins_by_itself(texts: Path, tmp_path: Path) -> None:
    run, out = tiny(texts, tmp_path / "out"), tmp_path / "out"
    with pytest.raises(Interrupted):
        train(run, Acting(4, lambda: os.kill(os.getpid(), signal.SIGINT)))
    for one, damage in zip(
        checkpoint.saved(out / "checkpoints"), ('{"step": 2}', '{"step": 4, "seconds": []}'), strict=True
    ):
        (one.path / "training.json").write_text(damage)
    with pytest.raises(SublayerError, match="no checkpoint is whole; --restart begins anew"):
        train(run)


def test_a_tokenizer_is_there_whole_or_not_at_all(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between its two files would leave one that knows no end of text."""
    from sublayer.text import BytePairs

    run = tiny(texts, tmp_path / "out", tokenizer={"kind": "bpe", "vocab": 280})
    inner = BytePairs.save

    def killed(self: Any, folder: Path) -> None:
        inner(self, folder)
        (folder / "tokenizer_config.json").unlink()
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(BytePairs, "save", killed)
        with pytest.raises(MemoryError):
            train(run)
    train(run)
    train(tiny(texts, tmp_path / "whole", tokenizer={"kind": "bpe", "vocab": 280}))
    assert load_tokenizer(tmp_path / "out" / "tokenizer").eos == (279,)
    same(tmp_path / "whole", tmp_path / "out")


def test_a_run_goes_on_where_the_text_has_changed_or_gone(texts: Path, tmp_path: Path) -> None:
    train(tiny(texts, tmp_path / "whole"))
    run = tiny(texts, tmp_path / "parts")
    with pytest.raises(Interrupted):
        train(run, Acting(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    texts.rename(tmp_path / "elsewhere")
    train(run)
    same(tmp_path / "whole", tmp_path / "parts")


def test_runs_are_no_text(texts: Path, tmp_path: Path) -> None:
    """A run inside the folder that it reads, and one that was moved aside there."""
    out = texts / "model"
    train(tiny(texts, out))
    train(tiny(texts, out, train={"batch": 2}), restart=True)
    assert (texts / "model.1" / "run.json").exists()
    train(tiny(texts, tmp_path / "other", train={"batch": 2}))
    assert told(out) == told(tmp_path / "other")


def test_bytes_are_counted_where_the_judgement_ends(tmp_path: Path) -> None:
    """Characters of one byte first and of three later: half of the characters are a quarter of the bytes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i % 10}" for i in range(4000)) + "漢" * 1000)
    run = tiny(
        text, tmp_path / "out", tokenizer={"kind": "characters"}, data={"held": 0.4}, eval={"final": 500, "sample": "1"}
    )
    score = train(run).score
    assert score.bytes == pytest.approx(score.tokens + 1, abs=17)


def test_a_sample_that_cannot_be_is_told_before_the_first_step(texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, tmp_path / "out", tokenizer={"kind": "characters"}, eval={"sample": "漢"})
    with pytest.raises(UsageError, match="eval.sample: '漢' cannot be gone on with"):
        train(run)


@pytest.mark.parametrize(
    ("change", "said"),
    [("decoder.blocks.*.attn.op.causal=false", "not causal"), ('head={"spec": "Head", "bias": true}', "")],
)
def test_a_model_that_sees_the_answer_is_refused(change: str, said: str, texts: Path, tmp_path: Path) -> None:
    run = tiny(texts, tmp_path / "out", model={"change": [change]}, train={"steps": 1})
    if said:
        with pytest.raises(UsageError, match=said):
            train(run)
    else:
        train(run)


def test_a_change_that_moves_the_last_bits_is_said(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(Interrupted):
        train(tiny(texts, tmp_path / "out"), Acting(3, lambda: os.kill(os.getpid(), signal.SIGINT)))
    view = noting()
    train(tiny(texts, tmp_path / "out", train={"micro": 4}), view)
    assert "train.micro is 4 now: the run goes on, but no longer as it was to the last bit" in view.lines


def test_what_changes_before_the_first_step_is_not_told(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(SublayerError, match="no_such_place"):
        train(tiny(texts, tmp_path / "out", model={"change": ["no_such_place=1"]}))
    view = noting()
    train(tiny(texts, tmp_path / "out", train={"micro": 4}), view)
    assert not [line for line in view.lines if "now:" in line]


def test_a_termination_before_the_first_step_is_one_line(texts: Path, tmp_path: Path) -> None:
    class Ending(Acting):
        def note(self, line: str) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted, match="stopped before the first step") as caught:
        train(tiny(texts, tmp_path / "out"), Ending(-1, lambda: None))
    assert caught.value.exit_code == 143
    train(tiny(texts, tmp_path / "out"))


class Clock:
    """Half a second passes each time somebody looks."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 0.5
        return self.now


def timed(texts: Path, out: Path, seconds: float) -> Run:
    return tiny(texts, out, train={"steps": "none", "seconds": seconds}, schedule={"shape": "inverse_sqrt"})


@pytest.mark.parametrize(("seconds", "steps"), [(0.1, 1), (1.0, 2), (1.2, 3), (2.0, 3), (2.1, 4), (3.0, 5)])
def test_a_run_ends_with_its_time(
    seconds: float, steps: int, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step takes half a second, and so does the evaluation after step 3, which counts."""
    monkeypatch.setattr("sublayer.train.run.time", Clock())
    result = train(timed(texts, tmp_path / "out", seconds))
    assert result.step == steps
    assert result.seconds >= seconds
    records = read_metrics(tmp_path / "out/metrics.jsonl")
    assert [record.step for record in records if isinstance(record, Metrics)] == [*range(1, steps + 1)]
    judged = [record.step for record in records if isinstance(record, Evaluated)]
    assert judged == sorted({3, steps} if steps > 3 else {steps})
    assert checkpoint.saved(tmp_path / "out/checkpoints")[-1].step == steps
    assert train(timed(texts, tmp_path / "out", seconds)) == result


@pytest.mark.parametrize("at", [1, 4])
def test_the_time_of_a_run_counts_over_its_parts(
    at: int, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sublayer.train.run.time", Clock())
    whole = train(timed(texts, tmp_path / "whole", 3.0))
    with pytest.raises(Interrupted, match=f"stopped at step {at}, which is saved"):
        train(timed(texts, tmp_path / "parts", 3.0), Acting(at, lambda: os.kill(os.getpid(), signal.SIGINT)))
    assert train(timed(texts, tmp_path / "parts", 3.0)).step == whole.step == 5
    same(tmp_path / "whole", tmp_path / "parts")
