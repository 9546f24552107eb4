"""A whole run: text → tokenizer → shards → a trained model, in one folder that no interruption spoils.

    out/run.json         the configuration
    out/tokenizer/       the tokenizer, trained on the run's text or copied
    out/data/            each source's tokens, to train on and held out
    out/checkpoints/     step-XXXXXXXX: models that the run goes on from
    out/metrics.jsonl    a line a step; evaluations and samples too
    out/loss.png         the same as a picture
    out/model/           the result
    out/result.json      what the result was judged at

The rows and the dropout of a step are pure functions of seed and step, so that a resumed run is, on a CPU, the
uninterrupted one to the last bit.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..data.batches import Batches, Rows, windows
from ..data.readers import Seen, documents, measure
from ..data.shards import Progress, prepare
from ..data.tokens import Tokens
from ..decoding import generate
from ..errors import SublayerError, UsageError, WeightsError
from ..files import replacing
from ..nn.sublayer import Model, ModelOp
from ..text import Bytes, Characters, Tokenizer, Words, load_tokenizer
from ..text.train import train_bpe
from ..weights import load, save
from ..weights.load import load_into, read_json
from . import checkpoint
from .average import Ema, average_into
from .blame import blame
from .config import FREE, Run, RunSource
from .evaluate import Score, evaluate
from .flops import flops_per_token, gemm_rate
from .loss import IGNORED
from .metrics import Evaluated, Metrics, MetricsFile, Record, Sample, TensorBoard, read_metrics
from .objectives import Batch, objective
from .plot import plot_loss
from .process import Interrupted, Stop, first, lock, rank, ranks, world
from .recompute import recompute
from .update import AUTOCAST, Precision, Scaler, Update, update
from .view import Quiet, View

END = "<|endoftext|>"
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
    view = view if view is not None else Quiet()
    out = Path(run.out)
    with ranks(run.train.device) as device, lock(out):
        first(lambda: _settle(run, out, restart=restart))
        result = _finished(out)
        if result is not None:
            view.note(f"finished already, at step {result.step}: {result.folder} (--restart begins anew)")
            return result
        tokenizer = first(lambda: _tokenizer(run, out, view))
        spec = _spec(run, tokenizer)
        sources = first(lambda: [_tokens(run, source, out, tokenizer, view) for source in run.data.all_sources()])
        training = _Training(run, out, device, spec, tokenizer, sources, view)
        try:
            return training.carry_out()
        finally:
            training.close()


def _settle(run: Run, out: Path, *, restart: bool) -> None:
    """Writes run.json, or finds the same run there."""
    path = out / "run.json"
    if restart and path.exists():
        number = next(i for i in count(1) if not out.with_name(f"{out.name}.{i}").exists())
        aside = out.with_name(f"{out.name}.{number}")
        aside.mkdir()
        for inner in sorted(out.iterdir()):  # the folder itself stays: it is locked
            if inner.name != ".lock":
                inner.rename(aside / inner.name)
    if path.exists():
        before, now = _flat(read_json(path)), _flat(run.to_json())
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        bound = [key for key in changed if not any(key == free or key.startswith(f"{free}.") for free in FREE)]
        if bound:
            key = bound[0]
            raise UsageError(
                f"out: {out} holds another run, with {key} = {before.get(key)} and not {now.get(key)}; "
                "choose another out, or --restart, which moves that run aside"
            )
    with replacing(path) as beside:
        beside.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")


def _flat(data: Any, path: str = "") -> dict[str, Any]:
    """{"train.batch": 16, …}"""
    if not isinstance(data, dict) or not data:
        return {path: data}
    items = [_flat(value, f"{path}.{key}" if path else key) for key, value in data.items()]
    return {key: value for item in items for key, value in item.items()}


def _finished(out: Path) -> Result | None:
    path = out / "result.json"
    if not path.exists() or not (out / "model" / "spec.json").exists():
        return None
    found = read_json(path)
    try:
        score = Score(found["nats"], found["tokens"], found["bytes"])
        return Result(out / "model", found["step"], score, found["seconds"])
    except KeyError as error:
        raise WeightsError(f"{path}: {error} is missing; remove the file to judge the run again") from None


def _tokenizer(run: Run, out: Path, view: View) -> Tokenizer:
    """The tokenizer in the run's folder, put there first where it is not."""
    folder, config = out / "tokenizer", run.tokenizer
    if (folder / "tokenizer.json").exists():
        tokenizer = load_tokenizer(folder)
        view.note(f"tokenizer: {tokenizer.size} ids, reused from {folder}")
        return tokenizer
    source = config.path or run.model.start
    specials = (END,) if config.end else ()
    if source is not None:
        tokenizer = load_tokenizer(Path(source))
    elif config.kind == "bytes":
        tokenizer = Bytes(specials)
    else:
        texts = _watched(run, out, view, "reading for the tokenizer")

        def merged(stage: str, done: int, total: int | None) -> None:
            if stage == "merge":
                view.progress("joining byte pairs", done, total or 0)

        if config.kind == "bpe":
            tokenizer = train_bpe(texts, config.vocab, pattern=config.pattern, end=END, progress=merged)
        elif config.kind == "characters":
            tokenizer = Characters.train(texts, end=END if config.end else None)
        else:
            tokenizer = Words.train(texts, config.vocab, end=END)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    view.note(f"tokenizer: {tokenizer.size} ids, {source or config.kind}")
    return load_tokenizer(folder)


def _watched(run: Run, out: Path, view: View, label: str) -> Iterator[str]:
    """The texts of all sources, but for what this run writes, with progress by bytes read."""
    sources, before = run.data.all_sources(), 0
    total = sum(measure(source.paths, without=out).bytes for source in sources)
    for source in sources:
        seen, options = Seen(), {"field": source.field, "bad_bytes": run.data.bad_bytes, "without": out}
        for document in documents(source.paths, seen=seen, **options):
            yield document.text
            view.progress(label, before + seen.bytes, total)
        before += seen.bytes
    view.progress(label, total, total)


def _spec(run: Run, tokenizer: Tokenizer) -> Model:
    """The architecture, checked against the tokenizer and the rows."""
    spec = run.model.build_spec(tokenizer.size)
    if spec.vocab is not None and spec.vocab < tokenizer.size:
        raise UsageError(f"tokenizer: it has {tokenizer.size} ids, and the model a table of {spec.vocab}")
    if spec.context is not None and spec.context < run.data.length:
        raise UsageError(f"data.length: {run.data.length} is more than the model's {spec.context} positions")
    return spec


def _tokens(run: Run, source: RunSource, out: Path, tokenizer: Tokenizer, view: View) -> tuple[Tokens, Tokens]:
    """A source's tokens, to train on and held out; encoded first where they are not there."""
    sources = run.data.all_sources()
    name = source.name or (f"source-{sources.index(source)}" if len(sources) > 1 else "")
    label = f"encoding {name}".strip()

    def progress(made: Progress) -> None:
        if made.share is not None:
            view.progress(label, made.share, 1.0)

    return prepare(
        source.paths, tokenizer, out / "data" / name, held=run.data.held, field=source.field,
        bad_bytes=run.data.bad_bytes, without=out, progress=progress, say=view.note,
    )  # fmt: skip


class _Training:
    """What a step changes, and the loop that changes it."""

    def __init__(
        self,
        run: Run,
        out: Path,
        device: torch.device,
        spec: Model,
        tokenizer: Tokenizer,
        sources: Sequence[tuple[Tokens, Tokens]],
        view: View,
    ) -> None:
        self.run, self.out, self.tokenizer, self.view = run, out, tokenizer, view
        self.precision: Precision = _precision(run.train.precision, device)
        self.model = _model(run, spec, device)
        self.optimizer = run.optimizer.build(self.model)
        self.ema = Ema(self.model, run.train.ema) if run.train.ema else None
        self.scaler = Scaler() if self.precision == "fp16" else None
        weighted = [
            (tokens, source.weight) for (tokens, _), source in zip(sources, run.data.all_sources(), strict=True)
        ]
        self.batches = Batches(weighted, run.data.length, run.train.batch, run.seed)
        self.held = [held for _, held in sources]
        self.objective, collate = objective(run.train.objective, z_loss=run.train.z_loss, smoothing=run.train.smoothing)
        self.judged, _ = objective(run.train.objective)  # by its code length alone
        end = tokenizer.eos[0] if tokenizer.eos else None
        self.collate = partial(collate, end=end, segments=run.data.segments)
        self.step, self.seconds, self.score = 0, 0.0, Score(0.0, 0, 0)
        self.metrics = MetricsFile(out / "metrics.jsonl")
        self.board: TensorBoard | None = None

    def carry_out(self) -> Result:
        """Goes on from the newest checkpoint, to the end."""
        self._resume()
        run, steps = self.run, self.run.steps
        with self.view, Stop() as stop:
            self._begin()
            while self.step < steps:
                self._advance()
                number, last = stop.agreed(), self.step == steps
                if rank() == 0:
                    if last or self.step % run.eval.every == 0:
                        self._judge()
                    if last or number is not None or self.step % run.save.every == 0:
                        self._save(needed=last or number is not None)
                if number is not None and not last:
                    where = f"step {self.step} of {steps}, which is saved"
                    raise Interrupted(f"stopped at {where}; the same command goes on from there", number)
            result = first(lambda: self._finish() if rank() == 0 else _finished(self.out))
            assert result is not None
            return result

    def close(self) -> None:
        """Closes the files that are open while it runs."""
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def _begin(self) -> None:
        """Tells the view what speed is to be measured by."""
        device = next(self.model.parameters()).device
        rate = gemm_rate(device, AUTOCAST.get(self.precision, torch.float32)) * world()
        tokens, size = (sum(map(f, self.batches.sources)) for f in (len, lambda tokens: tokens.bytes))
        flops = flops_per_token(self.model, self.run.data.length)
        self.view.begin(self.run.steps, done=self.step, flops=flops, gemm=rate, bytes_per_token=size / tokens)

    def _resume(self) -> None:
        for found in reversed(checkpoint.saved(self.out / "checkpoints")):
            try:
                self._take(found.load_into(self.model), found.facts)
            except WeightsError as error:  # damaged from outside: an older one will do
                self.view.note(f"{found.path.name} is passed over: {error}")
                continue
            self.step = found.step
            self.view.note(f"goes on from step {found.step} of {self.run.steps}")
            break
        if rank() == 0:
            self.metrics.cut(self.step)
            if self.run.save.tensorboard:
                self.board = TensorBoard(self.out / "tensorboard", self.step)

    def _take(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        parts: dict[str, dict[str, Tensor]] = {"optimizer": {}, "ema": {}}
        for key, value in tensors.items():
            part, _, name = key.partition("/")
            parts[part][name] = value
        self.optimizer.load_state_tensors(parts["optimizer"])
        if self.ema is not None:
            self.ema.load_state_tensors(parts["ema"])
        if self.scaler is not None:
            self.scaler = Scaler(*facts["scaler"])
        self.seconds, self.score = facts["seconds"], Score(*facts["score"])

    def _advance(self) -> None:
        """One optimiser step."""
        run, began = self.run, time.monotonic()
        self.optimizer.set_rate(run.schedule.factor(self.step, run.steps))
        with _seeded(run.seed, self.step):
            made = update(
                self.model, self._micro(), self.objective, self.optimizer,
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

    def _rows(self) -> list[Rows]:
        mine = self.batches.at(self.step, rank(), world())
        return mine.split(self.run.train.micro or len(mine.ids))

    def _micro(self) -> Iterator[Batch]:
        return (self.collate(rows) for rows in self._rows())

    def _report(self, made: Update) -> None:
        """Says what was not finite, where it came from and in which rows; raises NotFinite if the run is to stop."""
        with _seeded(self.run.seed, self.step):
            culprit = blame(self.model, self._micro(), self.objective, self.precision)
        places = [place for rows in self._rows() for place in rows.where]
        rows = "; ".join(places[:3]) + (f" and {len(places) - 3} more" if len(places) > 3 else "")
        what = "gradient" if math.isfinite(made.loss) else "loss"
        said = f"step {self.step + 1}: the {what} is not finite: {culprit}; rows: {rows}"
        if self.run.train.non_finite == "stop":
            raise NotFinite(f"{said}. Lower the rate, or pass over such steps with train.non_finite=skip")
        self.view.note(f"{said}; the step is passed over")

    def _judge(self) -> None:
        """Evaluates on the first held-out tokens, and writes a sample."""
        began = time.monotonic()
        with self._averaged():
            self.score = self._score(self.run.data.length, self.run.eval.tokens)
            text = self._sample()
        self.seconds += time.monotonic() - began
        score = self.score
        self._tell(Evaluated(self.step, score.loss, score.perplexity, score.bits_per_byte))
        if text is not None:
            self._tell(Sample(self.step, text))

    def _score(self, stride: int, limit: int | None, *, shown: bool = False) -> Score:
        """The score on the held-out text of all sources; with a limit, on the first tokens of each, so many in all."""
        length, total = self.run.data.length, Score(0.0, 0, 0)
        share = min(1.0, limit / sum(map(len, self.held))) if limit is not None else 1.0
        rows = max(1, 8192 // length)
        for held in self.held:
            count = math.ceil(share * len(held) / stride / rows)
            chosen = islice(windows(held, length, stride, rows), count)
            batches = (self._labelled(*one) for one in (self._watched(chosen, count) if shown else chosen))
            nats, tokens = evaluate(self.model, batches, self.judged, self.precision)
            text = round(held.bytes * min(1.0, tokens / max(len(held) - 1, 1)))
            total = Score(total.nats + nats, total.tokens + tokens, total.bytes + text)
        return total

    def _watched(self, batches: Iterator[T], total: int) -> Iterator[T]:
        """The same, with progress."""
        for done, batch in enumerate(batches):
            self.view.progress("judging the result", done, total)
            yield batch
        self.view.progress("judging the result", total, total)

    def _labelled(self, rows: Rows, counted: Tensor) -> Batch:
        """A batch that asks what `windows` counts, and no more than the collator allows."""
        batch = self.collate(rows)
        return replace(batch, labels=batch.labels.masked_fill(counted == IGNORED, IGNORED))

    def _sample(self) -> str | None:
        """How the model goes on; the same at a step however often it is asked."""
        config, tokenizer = self.run.eval, self.tokenizer
        prompt = [*tokenizer.eos[:1], *tokenizer.encode(config.sample)]
        if not config.sample_tokens or not prompt:
            return None
        options: dict[str, Any] = {"max_tokens": config.sample_tokens, "temperature": 0.8, "top_p": 0.95}
        (made,) = generate(self.model, [prompt], tokenizer=tokenizer, seed=self.run.seed, **options)
        return config.sample + (made.text or "")

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
        """loss.png, of all that metrics.jsonl holds."""
        plot_loss(self.out / "loss.png", read_metrics(self.metrics.path))

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
        if self.score.tokens:
            facts["held_loss"] = self.score.loss
        if self.scaler is not None:
            facts["scaler"] = [self.scaler.scale, self.scaler.good]
        folder = self.out / "checkpoints"
        try:
            checkpoint.write(folder, self.step, self.model, self.tokenizer, tensors, facts)
            checkpoint.prune(folder, self.run.save.keep, "held_loss")
            self._draw()
        except (OSError, WeightsError) as error:
            said = f"step {self.step} could not be saved: {error}"
            if needed:
                raise SublayerError(f"{said}. Make room, then give the same command: nothing saved is lost") from None
            self.view.note(f"{said}; training goes on")

    def _finish(self) -> Result:
        """Judges the result on all held-out text, and writes it."""
        run, found = self.run, checkpoint.saved(self.out / "checkpoints")
        if run.save.best:
            chosen = checkpoint.best(found, "held_loss")
            if chosen is not None:
                load_into(self.model, chosen.path)
        elif run.save.average > 1:
            average_into(self.model, [one.path for one in found[-run.save.average :]])
        began = time.monotonic()
        with self._averaged():
            stride = run.eval.stride or max(1, run.data.length // 4)
            score = self._score(min(stride, run.data.length), run.eval.final, shown=True)
            save(self.model, self.out / "model")
        self.tokenizer.save(self.out / "model")
        seconds = self.seconds + time.monotonic() - began
        about = {**asdict(score), "loss": score.loss, "perplexity": score.perplexity}
        about |= {"bits_per_byte": score.bits_per_byte if score.bytes else None, "step": self.step, "seconds": seconds}
        with replacing(self.out / "result.json") as path:
            path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        self._draw()
        return Result(self.out / "model", self.step, score, seconds)


def _model(run: Run, spec: Model, device: torch.device) -> ModelOp:
    """The model as it begins, with the passes that the run asks for."""
    if run.model.start is None:
        model = spec.build(run.seed, device=device)
    else:
        model = load(Path(run.model.start), device=device)
    if run.train.recompute:
        recompute(model)
    if run.train.compile:
        model.compile()
    return model


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
