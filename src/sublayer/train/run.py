"""A whole run: text → tokenizer → shards → a trained model, in one folder that no interruption spoils.

    out/run.json         the configuration
    out/tokenizer/       the tokenizer, trained on the run's text or copied
    out/data/            each source's tokens, to train on and held out
    out/checkpoints/     step-00000200 and so on: models that the run goes on from
    out/metrics.jsonl    a line a step; evaluations and samples too
    out/loss.png         the same as a picture
    out/model/           the result
    out/result.json      what the result was judged at

The rows and the dropout of a step are pure functions of seed and step, so that a resumed run is, on a CPU, the
uninterrupted one to the last bit.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..decoding import generate
from ..errors import SublayerError, UsageError, WeightsError
from ..files import write_json
from ..nn.sublayer import Model, ModelOp
from ..weights import load, save
from ..weights.context import trained_length, write_trained_length
from ..weights.load import load_into, read_json, read_spec
from . import checkpoint
from .average import Ema, average_into
from .batch import Batch
from .blame import blame
from .config import Run
from .evaluate import Score, evaluate
from .feeds import Feed, feed_of
from .flops import flops_per_token, gemm_rate
from .language import NextToken
from .metrics import Evaluated, Metrics, MetricsFile, Record, Sample, TensorBoard, read_metrics
from .plot import plot_loss
from .prepare import leave, look, settle, spec_of
from .process import Interrupted, Stop, agreed, ended_by_signal, first, lock, rank, ranks, world
from .recompute import recompute
from .update import AUTOCAST, Precision, Scaler, Update, update
from .view import Quiet, View

T = TypeVar("T")


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    """The model: `sublayer generate` opens it."""
    step: int
    score: Score
    """On the held-out text, at the end."""
    seconds: float
    """Of training, evaluations included, over all of its parts."""


class NotFinite(SublayerError):
    """A loss or a gradient that is NaN or infinite, where the configuration says "stop"."""


def train(run: Run, view: View | None = None, *, restart: bool = False) -> Result:
    """Carries a run out, or on from where it was interrupted; a finished one is only reported.

    restart: a run that stands in the folder is first moved aside (out.1, out.2, …).
    Raises UsageError for a folder that holds another run, Interrupted after Ctrl-C or SIGTERM (all is saved then),
    NotFinite, and what reading text and writing files raise.
    """
    out = Path(run.out)
    look(run, out)
    said = "stopped before the first step; the same command goes on with what is there"
    with ranks(run.train.device) as device, lock(out), ended_by_signal(said):
        view = view if view is not None and rank() == 0 else Quiet()
        first(lambda: settle(run, out, view, restart=restart) if rank() == 0 else None)
        result = _finished(out)
        if result is not None:
            view.note(f"finished already, at step {result.step}: {result.folder} (--restart begins anew)")
            return result
        try:
            feed = first(lambda: feed_of(run, out, view))
        except SublayerError:
            if rank() == 0:
                leave(out)
            raise
        spec = spec_of(run, feed.tokenizer, feed.sizes)
        first(feed.open)
        training = _Training(run, out, device, spec, feed, view)
        try:
            return training.carry_out()
        finally:
            training.close()


def _finished(out: Path) -> Result | None:
    path = out / "result.json"
    if not path.exists() or not (out / "model" / "spec.json").exists():
        return None
    found = read_json(path)
    try:
        right = found.get("right")
        score = Score(float(found["nats"]), int(found["tokens"]), int(found["bytes"]), right and int(right))
        return Result(out / "model", int(found["step"]), score, float(found["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: damaged ({error}); remove the file, and the result is judged again") from None


class _Training:
    """What a step changes, and the loop that changes it."""

    def __init__(
        self,
        run: Run,
        out: Path,
        device: torch.device,
        spec: Model,
        feed: Feed,
        view: View,
    ) -> None:
        self.run, self.out, self.feed, self.view = run, out, feed, view
        self.precision: Precision = _precision(run.train.precision, device)
        self.model = _model(run, spec, device)
        self.optimizer = run.optimizer.build(self.model)
        self.ema = Ema(self.model, run.train.ema) if run.train.ema else None
        self.scaler = Scaler() if self.precision == "fp16" else None
        self.step, self.seconds, self.score, self.judged_at = 0, 0.0, Score(0.0, 0, 0), 0
        self.over = False  # whether the last step is done
        self.metrics = MetricsFile(out / "metrics.jsonl")
        self.board: TensorBoard | None = None

    def carry_out(self) -> Result:
        """Goes on from the newest checkpoint, to the end."""
        self._resume()
        with self.view:
            self._begin()
            self._advance_all()
            result = first(lambda: self._finish() if rank() == 0 else _finished(self.out))
            assert result is not None
            return result

    def _advance_all(self) -> None:
        """The loop over the steps that are left."""
        run = self.run
        self._look_whether_over()
        with Stop() as stop:
            while not self.over:
                self._advance()
                number = stop.agreed()
                self._look_whether_over()
                if rank() == 0 and (self.over or self.step % run.eval.every == 0):
                    self._judge()
                self._look_whether_over()  # judging takes time too
                if rank() == 0 and (self.over or number is not None or self.step % run.save.every == 0):
                    self._save(needed=self.over or number is not None)
                if number is not None and not self.over:
                    where = f"{self._reached()}, which is saved"
                    raise Interrupted(f"stopped at {where}; the same command goes on from there", number)

    def _look_whether_over(self) -> None:
        steps, seconds = self.run.steps, self.run.train.seconds
        if steps is not None:
            self.over = self.step >= steps
        else:
            assert seconds is not None
            self.over = agreed(self.seconds >= seconds)

    def _reached(self) -> str:
        return f"step {self.step}" + (f" of {self.run.steps}" if self.run.steps else "")

    def close(self) -> None:
        """Closes the files that are open while it runs."""
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def _begin(self) -> None:
        """Tells the view what speed is to be measured by."""
        device = next(self.model.parameters()).device
        rate = gemm_rate(device, AUTOCAST.get(self.precision, torch.float32)) * world()
        length = self.feed.length
        whole = isinstance(
            self.run.objective, NextToken
        )  # where a part of what is read is asked, speed counts that part
        flops = flops_per_token(self.model, length) if length is not None and whole else 0.0
        warmup, steps = self.run.schedule.warmup, self.run.steps
        if steps is not None and warmup > steps // 2:
            self.view.note(f"schedule.warmup: {warmup} of {steps} steps, so the rate hardly reaches its peak")
        self._try_sample()
        self.view.begin(
            steps or 0, done=self.step, seconds=max(0.0, (self.run.train.seconds or 0.0) - self.seconds),
            flops=flops, gemm=rate, bytes_per_token=self.feed.bytes_per_token,
            unit=self.run.objective.unit, answer=self.run.objective.answer,
        )  # fmt: skip

    def _resume(self) -> None:
        found = checkpoint.saved(self.out / "checkpoints")
        for one in reversed(found):
            try:
                self._take(one)
            except WeightsError as error:  # damaged from outside: an older one will do
                self.view.note(f"{one.path.name} is passed over: {error}")
                continue
            self.step = one.step
            self.view.note(f"goes on from {self._reached()}")
            break
        else:
            if found:
                raise WeightsError(f"{self.out}: no checkpoint is whole; --restart begins anew and keeps what is there")
        if rank() == 0:
            try:
                self.metrics.cut(self.step)
            except SublayerError as error:
                os.replace(self.metrics.path, self.metrics.path.with_suffix(".damaged"))
                self.view.note(f"{error}; kept as {self.metrics.path.stem}.damaged")
            if self.run.save.tensorboard:
                self.board = TensorBoard(self.out / "tensorboard", self.step)

    def _take(self, found: checkpoint.Saved) -> None:
        """Takes a checkpoint over. Raises WeightsError for a damaged one."""
        facts, parts = found.facts, {"optimizer": dict[str, Tensor](), "ema": dict[str, Tensor]()}
        try:
            for key, value in found.tensors().items():
                part, _, name = key.partition("/")
                parts[part][name] = value
            self.seconds, self.score = float(facts["seconds"]), Score(*facts["score"])
            if self.scaler is not None and "scaler" in facts:  # not there if it was saved on another device
                self.scaler = Scaler(*facts["scaler"])
        except (KeyError, TypeError, ValueError) as error:
            raise WeightsError(f"{found.path}: not what a run has written ({error})") from None
        self.optimizer.load_state_tensors(parts["optimizer"])
        if self.ema is not None:
            self.ema.load_state_tensors(parts["ema"])
        found.load_into(self.model)

    def _advance(self) -> None:
        """One optimiser step."""
        run, began = self.run, time.monotonic()
        self.optimizer.set_rate(run.schedule.factor(self.step, run.steps or 0))
        with _seeded(run.seed, self.step):
            made = update(
                self.model, self._micro()[0], run.objective, self.optimizer,
                limit=run.train.clip, precision=self.precision, scaler=self.scaler,
            )  # fmt: skip
        if not made.finite and (self.scaler is None or self.scaler.scale < Scaler.LEAST):
            self._report(made)
        if made.taken and self.ema is not None:
            self.ema.update()
        self.step += 1
        seconds = time.monotonic() - began
        self.seconds += seconds
        self._tell(Metrics(self.step, made.loss, made.norm, self.optimizer.rate, made.tokens, seconds))

    def _micro(self) -> tuple[list[Batch], Sequence[str]]:
        """(the step's batches on this rank, where its rows come from)."""
        batch, where = self.feed.at(self.step, rank(), world())
        return batch.split(self.run.train.micro or batch.rows), where

    def _report(self, made: Update) -> None:
        """Says what was not finite, where it came from and in which rows; raises NotFinite if the run is to stop."""
        batches, where = self._micro()
        with _seeded(self.run.seed, self.step):
            culprit, which = blame(self.model, batches, self.run.objective, self.precision)
        first_row = sum(batch.rows for batch in batches[: which or 0])
        places = list(where if which is None else where[first_row : first_row + batches[which].rows])
        shown = "; ".join(places[:4]) + (f" and {len(places) - 4} more" if len(places) > 4 else "")
        what = "gradient" if math.isfinite(made.loss) else "loss"
        said = f"step {self.step + 1}: the {what} is not finite: {culprit}; rows: {shown}"
        if self.run.train.non_finite == "stop":
            raise NotFinite(f"{said}. Lower the rate, or pass over such steps with train.non_finite=skip")
        self.view.note(f"{said}; the step is passed over")

    def _judge(self) -> None:
        """Evaluates on the first held-out tokens, and writes a sample."""
        began = time.monotonic()
        with self._averaged():
            self.score = self._score(self.run.eval.tokens)
            text = self._sample()
        self.seconds += time.monotonic() - began
        score = self.score
        self.judged_at = self.step
        self._tell(Evaluated(self.step, score.loss, score.perplexity, score.bits_per_byte, score.accuracy))
        if text is not None:
            self._tell(Sample(self.step, text))

    def _score(self, limit: int | None, stride: int | None = None, *, shown: bool = False) -> Score:
        """The score on held-out data; with a limit, on about so many tokens of it."""
        size = 0

        def batches(chosen: Iterable[tuple[Batch, int]]) -> Iterator[Batch]:
            nonlocal size
            for batch, text in chosen:
                size += text
                yield batch

        count, chosen = self.feed.held(limit, stride)
        asked = batches(self._watched(chosen, count) if shown else chosen)
        found = evaluate(self.model, asked, self.run.objective.judged, self.precision)
        return replace(found, bytes=size)

    def _watched(self, batches: Iterator[T], total: int) -> Iterator[T]:
        """The same, with progress."""
        for done, batch in enumerate(batches):
            self.view.progress("judging the result", done, total)
            yield batch
        self.view.progress("judging the result", total, total)

    def _sample(self) -> str | None:
        """How the model goes on; the same at a step however often it is asked."""
        config, tokenizer = self.run.eval, self.feed.tokenizer
        if not isinstance(self.run.objective, NextToken) or tokenizer is None:
            return None
        prompt = [*tokenizer.eos[:1], *tokenizer.encode(config.sample)]
        if not config.sample_tokens or not prompt:
            return None
        options: dict[str, Any] = {"max_tokens": config.sample_tokens, "temperature": 0.8, "top_p": 0.95}
        (made,) = generate(self.model, [prompt], tokenizer=tokenizer, seed=self.run.seed, **options)
        return config.sample + (made.text or "")

    def _try_sample(self) -> None:
        """A sample that cannot be written is told before the first step."""
        if self.run.eval.sample_tokens:
            try:
                self._sample()
            except SublayerError as error:
                raise UsageError(f"eval.sample: {self.run.eval.sample!r} cannot be gone on with: {error}") from None

    def _tell(self, record: Record) -> None:
        """Writes a line and shows it; where it cannot be written, training matters more."""
        if rank() == 0:
            try:
                self.metrics.write(record)
            except SublayerError as error:
                self.view.note(f"step {self.step}: {error}; training goes on")
            if self.board is not None:
                self.board.write(record)
            self.view.show(record)

    def _draw(self) -> None:
        """loss.png, of all that metrics.jsonl holds; a picture that cannot be drawn stops nothing."""
        try:
            plot_loss(
                self.out / "loss.png", read_metrics(self.metrics.path), bytes_per_token=self.feed.bytes_per_token,
                unit=self.run.objective.unit, answer=self.run.objective.answer,
            )  # fmt: skip
        except (OSError, SublayerError) as error:
            self.view.note(f"loss.png is not drawn: {error}")

    @contextmanager
    def _averaged(self) -> Iterator[None]:
        """The weights that are judged: the moving average, where there is one."""
        with self.ema.swapped_in() if self.ema is not None else nullcontext():
            yield

    def _save(self, *, needed: bool) -> None:
        """Writes a checkpoint. One that is not needed yet may fail, as on a full disk; the next is tried then."""
        tensors = {f"optimizer/{name}": t for name, t in self.optimizer.state_tensors().items()}
        if self.ema is not None:
            tensors |= {f"ema/{name}": t for name, t in self.ema.state_tensors().items()}
        facts: dict[str, Any] = {"seconds": self.seconds, "score": [*asdict(self.score).values()]}
        if self.judged_at == self.step:
            facts["held_loss"] = self.score.loss
        if self.scaler is not None:
            facts["scaler"] = [self.scaler.scale, self.scaler.good]
        folder = self.out / "checkpoints"
        try:
            checkpoint.write(folder, self.step, self.model, self.feed.tokenizer, tensors, facts)
            checkpoint.prune(folder, self.run.save.keep, "held_loss", self._regular)
        except (OSError, SublayerError) as error:
            said = f"step {self.step} could not be saved: {error}"
            if needed:
                raise SublayerError(f"{said}. Make room, then give the same command: nothing saved is lost") from None
            self.view.note(f"{said}; training goes on")
            return
        self._draw()

    def _regular(self, one: checkpoint.Saved) -> bool:
        """Whether a checkpoint would be there without any interruption."""
        return one.step % self.run.save.every == 0 or (self.over and one.step == self.step)

    def _finish(self) -> Result:
        """Judges the result on all held-out text, and writes it."""
        run, found = self.run, checkpoint.saved(self.out / "checkpoints")
        if run.save.best:
            chosen = checkpoint.best(found, "held_loss")
            if chosen is not None:
                load_into(self.model, chosen.path)
        elif run.save.average > 1:
            chosen = [one.path for one in found if self._regular(one)][-run.save.average :]
            if len(chosen) < run.save.average:
                self.view.note(f"save.average: there are only {len(chosen)} checkpoints to average")
            average_into(self.model, chosen)
        began = time.monotonic()
        with self._averaged():
            stride = run.eval.stride or max(1, run.data.length // 4)
            score = self._score(run.eval.final, stride, shown=True)
            if self.feed.tokenizer is not None:
                self.feed.tokenizer.save(self.out / "model")
            save(self.model, self.out / "model")
            if self.feed.tokenizer is not None and self.feed.length is not None and self.model.encoder is None:
                write_trained_length(self.out / "model", max(self.feed.length, _trained_before(run)))
            for name in ("labels.json", "bins.json"):
                if (self.out / name).exists():
                    shutil.copyfile(self.out / name, self.out / "model" / name)
        seconds = self.seconds + time.monotonic() - began
        about = {**asdict(score), "loss": score.loss, "perplexity": score.perplexity}
        about |= {"bits_per_byte": score.bits_per_byte if score.bytes else None, "step": self.step, "seconds": seconds}
        about |= {} if score.right is None else {"accuracy": score.accuracy}
        self._draw()
        write_json(self.out / "result.json", about)  # the last: with it, the run is over
        return Result(self.out / "model", self.step, score, seconds)


def _trained_before(run: Run) -> int:
    """Tokens that the model which the run starts from was trained on at once; 0: none, or unknown."""
    start = Path(run.model.start) if run.model.start is not None else None
    if start is None or not start.exists():  # it may be gone since
        return 0
    return trained_length(start, read_spec(start)[0]) or 0


def _model(run: Run, spec: Model, device: torch.device) -> ModelOp:
    """The model as it begins, with the passes that the run asks for."""
    model = spec.build(run.seed, device=device)
    if run.model.start is not None:
        _begin_from(model, load(Path(run.model.start), device=device))
    if run.train.recompute:
        recompute(model)
    if run.train.compile:
        model.compile()
    return model


@torch.no_grad()
def _begin_from(model: ModelOp, start: ModelOp) -> None:
    """Takes a trained model's weights over; a head of another kind, and only a head, begins anew.

    Raises UsageError for a parameter that the trained model does not have.
    """
    theirs = dict(start.named_parameters())
    anew = (model.spec.head, model.spec.tied) != (start.spec.head, start.spec.tied)
    for name, parameter in model.named_parameters():
        own = theirs.get(name)
        if name.startswith("head.") and anew:
            continue
        if own is None or own.shape != parameter.shape:
            what = "has none" if own is None else f"has it of shape {list(own.shape)}, not {list(parameter.shape)}"
            raise UsageError(f"model.start: {name}: the trained model {what}")
        parameter.copy_(own)


def _precision(asked: str, device: torch.device) -> Precision:
    if asked != "auto":
        return cast(Precision, asked)
    if device.type != "cuda":
        return "fp32"
    return "bf16" if torch.cuda.is_bf16_supported() else "fp16"


@contextmanager
def _seeded(seed: int, step: int) -> Iterator[None]:
    """torch's random numbers as a function of seed, step and rank: what dropout draws needs no state to go on."""
    text = f"{seed} {step} {rank()}".encode()
    with torch.random.fork_rng():
        torch.manual_seed(int.from_bytes(blake2b(text, digest_size=8).digest(), "little") >> 1)
        yield
