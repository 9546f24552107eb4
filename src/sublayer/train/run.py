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
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import count, islice
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from ..data.batches import Batches, Rows, windows
from ..data.readers import Seen, documents, measure
from ..data.shards import Progress, prepare
from ..data.tokens import Tokens, fingerprint
from ..decoding import generate
from ..errors import SublayerError, UsageError, WeightsError
from ..files import replacing
from ..nn.attention import Attention
from ..nn.sublayer import Model, ModelOp
from ..spec import Spec
from ..text import Bytes, Characters, Tokenizer, Words, load_tokenizer
from ..text.train import train_bpe
from ..weights import load, save
from ..weights.load import load_into, read_json
from . import checkpoint
from .average import Ema, average_into
from .blame import blame
from .config import LOOSE, Run, RunSource, free
from .evaluate import Score, evaluate
from .flops import flops_per_token, gemm_rate
from .loss import IGNORED
from .metrics import Evaluated, Metrics, MetricsFile, Record, Sample, TensorBoard, read_metrics
from .objectives import Batch, objective
from .plot import plot_loss
from .process import MARK, Interrupted, Stop, ended_by_signal, first, lock, rank, ranks, world
from .recompute import recompute
from .update import AUTOCAST, Precision, Scaler, Update, update
from .view import Quiet, View

END = "<|endoftext|>"
BAD_BYTES = {"replace": "they are U+FFFD now", "skip": "their documents are left out"}
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
    _look(run, out)
    said = "stopped before the first step; the same command goes on with what is there"
    with ranks(run.train.device) as device, lock(out), ended_by_signal(said):
        view = view if view is not None and rank() == 0 else Quiet()
        first(lambda: _settle(run, out, view, restart=restart) if rank() == 0 else None)
        result = _finished(out)
        if result is not None:
            view.note(f"finished already, at step {result.step}: {result.folder} (--restart begins anew)")
            return result
        try:
            tokenizer = first(lambda: _tokenizer(run, out, view))
        except SublayerError:
            if rank() == 0:
                _leave(out)
            raise
        spec = _spec(run, tokenizer)
        sources = first(lambda: [_tokens(run, source, out, tokenizer, view) for source in run.data.all_sources()])
        training = _Training(run, out, device, spec, tokenizer, sources, view)
        try:
            return training.carry_out()
        finally:
            training.close()


def _settle(run: Run, out: Path, view: View, *, restart: bool) -> None:
    """Writes run.json, or finds the same run there."""
    path = out / "run.json"
    if restart and path.exists():
        _move_aside(out)
    if path.exists():
        before, now = _flat(read_json(path)), _flat(run.to_json())
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        changed = [key for key in changed if not _under(key, free(run))]
        bound = next((key for key in changed if not _under(key, LOOSE)), None)
        if bound is not None and not checkpoint.saved(out / "checkpoints"):
            shutil.rmtree(out / "tokenizer", ignore_errors=True)  # it has not begun, and the text is still there
        elif bound is not None:
            raise UsageError(
                f"out: {out} holds another run, with {bound} = {before.get(bound)} and not {now.get(bound)}; "
                "choose another out, or --restart, which moves that run aside"
            )
        for key in changed:
            view.note(f"{key} is {now.get(key)} now: the run goes on, but no longer as it was to the last bit")
    with replacing(path) as beside:
        beside.write_text(json.dumps(run.to_json(), indent=1) + "\n", encoding="utf-8")


def _look(run: Run, out: Path) -> None:
    """Raises, before anything is made or read, what can be told from the configuration and the names of files."""
    for source in run.data.all_sources() if not checkpoint.saved(out / "checkpoints") else ():
        measure(source.paths)
        for path in (source.paths,) if isinstance(source.paths, str) else source.paths:
            if Path(path).is_dir() and out.exists() and Path(path).samefile(out):
                raise UsageError(f"out: {out} is the folder of the text; choose another")
    if run.model.start is None:
        _spec_for(run, run.tokenizer.vocab).empty(device="meta")  # the vocabulary may still be another


def _leave(out: Path) -> None:
    """Takes a run's folder away that nothing has come into yet."""
    if {path.name for path in out.iterdir()} <= {MARK, "run.json"}:
        for path in out.iterdir():
            path.unlink()
        out.rmdir()


def _under(key: str, names: Sequence[str]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _move_aside(out: Path) -> None:
    """All of a run into a folder beside it; the folder itself stays, for it is locked."""
    whole = out.resolve()
    number = next(i for i in count(1) if not whole.with_name(f"{whole.name}.{i}").exists())
    aside = whole.with_name(f"{whole.name}.{number}")
    try:
        aside.mkdir()
        (aside / MARK).touch()
        for inner in sorted(out.iterdir()):
            if inner.name != MARK:
                inner.rename(aside / inner.name)
    except OSError as error:
        raise UsageError(f"--restart: {out} cannot be moved to {aside}: {error.strerror}") from None


def _flat(data: Any, path: str = "", depth: int = 0) -> dict[str, Any]:
    """{"train.batch": 16, …}"""
    if not isinstance(data, dict) or not data or depth > 10:
        return {path: data}
    items = [_flat(value, f"{path}.{key}" if path else key, depth + 1) for key, value in data.items()]
    return {key: value for item in items for key, value in item.items()}


def _finished(out: Path) -> Result | None:
    path = out / "result.json"
    if not path.exists() or not (out / "model" / "spec.json").exists():
        return None
    found = read_json(path)
    try:
        score = Score(float(found["nats"]), int(found["tokens"]), int(found["bytes"]))
        return Result(out / "model", int(found["step"]), score, float(found["seconds"]))
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(f"{path}: damaged ({error}); remove the file, and the result is judged again") from None


def _tokenizer(run: Run, out: Path, view: View) -> Tokenizer:
    """The tokenizer in the run's folder, put there first where it is not."""
    folder, config = out / "tokenizer", run.tokenizer
    if folder.exists():
        tokenizer = load_tokenizer(folder)
        view.note(f"tokenizer: {tokenizer.size} ids, reused from {folder}")
        return tokenizer
    source, end = config.path or run.model.start, END if config.end else None
    if source is not None:
        tokenizer = load_tokenizer(Path(source))
    elif config.kind == "bytes":
        tokenizer = Bytes((END,) if config.end else ())
    else:
        texts = _watched(run, out, view, "reading for the tokenizer")

        def merged(stage: str, done: int, total: int | None) -> None:
            if stage == "merge":
                view.progress("joining byte pairs", done, total or 0)

        if config.kind == "bpe":
            tokenizer = train_bpe(texts, config.vocab, pattern=config.pattern, end=end, progress=merged)
        elif config.kind == "characters":
            tokenizer = Characters.train(texts, end=end)
        else:
            tokenizer = Words.train(texts, config.vocab, end=end)
    beside = out / ".tokenizer.partial"  # both of its files are there, or neither
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    tokenizer.save(beside)
    beside.rename(folder)
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
        if seen.bad:
            view.note(f"{seen.bad} places hold bytes that are not UTF-8: {BAD_BYTES[run.data.bad_bytes]}")
    view.progress(label, total, total)


def _spec(run: Run, tokenizer: Tokenizer) -> Model:
    """The architecture, checked against the tokenizer, the rows and the objective."""
    spec = _spec_for(run, tokenizer.size)
    if spec.vocab is not None and spec.vocab < tokenizer.size:
        raise UsageError(f"tokenizer: it has {tokenizer.size} ids, and the model a table of {spec.vocab}")
    if run.model.start is not None and run.tokenizer.path is not None:
        own = Path(run.model.start) / "tokenizer.json"
        if own.exists() and fingerprint(load_tokenizer(own.parent)) != fingerprint(tokenizer):
            raise UsageError(f"tokenizer.path: {run.tokenizer.path} is not the tokenizer of {run.model.start}")
    return spec


def _spec_for(run: Run, vocab: int) -> Model:
    """The architecture with a vocabulary, checked against all but the tokenizer."""
    spec = run.model.build_spec(vocab)
    if spec.context is not None and spec.context < run.data.length:
        raise UsageError(f"data.length: {run.data.length} is more than the model's {spec.context} positions")
    if spec.decoder is None or spec.encoder is not None or spec.head is None:
        raise UsageError(f"train.objective: {run.train.objective} trains decoders with a head, and nothing else")
    sighted = next((path for path, part in _parts(spec) if isinstance(part, Attention) and not part.causal), None)
    if sighted is not None:
        raise UsageError(
            f"train.objective: {run.train.objective}, but {sighted} sees what it is to predict: not causal"
        )
    return spec


def _parts(spec: Any, path: str = "model") -> Iterator[tuple[str, Spec]]:
    """Every spec inside a spec, with where it is."""
    if isinstance(spec, tuple):
        for i, item in enumerate(spec):
            yield from _parts(item, f"{path}.{i}")
    elif isinstance(spec, Spec):
        yield path, spec
        for name in get_type_hints(type(spec)):
            yield from _parts(getattr(spec, name), f"{path}.{name}")


def _tokens(run: Run, source: RunSource, out: Path, tokenizer: Tokenizer, view: View) -> tuple[Tokens, Tokens]:
    """A source's tokens, to train on and held out; encoded first where they are not there.

    Once there is a checkpoint they are taken as they are: the text may have changed or gone since.
    """
    folder = out / "data" / (source.name or "")
    if checkpoint.saved(out / "checkpoints"):
        train, held = Tokens.open(folder / "train"), Tokens.open(folder / "held")
        train.check(tokenizer)
        return train, held
    label = f"encoding {source.name or ''}".strip()

    def progress(made: Progress) -> None:
        if made.share is not None:
            view.progress(label, made.share, 1.0)

    return prepare(
        source.paths, tokenizer, folder, held=run.data.held, field=source.field,
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
        self.step, self.seconds, self.score, self.judged_at = 0, 0.0, Score(0.0, 0, 0), 0
        sizes = [(len(tokens), tokens.bytes) for tokens in self.batches.sources]
        self.bytes_per_token = sum(size for _, size in sizes) / sum(tokens for tokens, _ in sizes)
        self.metrics = MetricsFile(out / "metrics.jsonl")
        self.board: TensorBoard | None = None

    def carry_out(self) -> Result:
        """Goes on from the newest checkpoint, to the end."""
        self._resume()
        with self.view:
            self._begin()
            self._advance_all(self.run.steps)
            result = first(lambda: self._finish() if rank() == 0 else _finished(self.out))
            assert result is not None
            return result

    def _advance_all(self, steps: int) -> None:
        """The loop over the steps that are left."""
        run = self.run
        with Stop() as stop:
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

    def close(self) -> None:
        """Closes the files that are open while it runs."""
        self.metrics.close()
        if self.board is not None:
            self.board.close()

    def _begin(self) -> None:
        """Tells the view what speed is to be measured by."""
        device = next(self.model.parameters()).device
        rate = gemm_rate(device, AUTOCAST.get(self.precision, torch.float32)) * world()
        flops = flops_per_token(self.model, self.run.data.length)
        warmup, steps = self.run.schedule.warmup, self.run.steps
        if warmup > steps // 2:
            self.view.note(f"schedule.warmup: {warmup} of {steps} steps, so the rate hardly reaches its peak")
        self._try_sample()
        self.view.begin(self.run.steps, done=self.step, flops=flops, gemm=rate, bytes_per_token=self.bytes_per_token)

    def _resume(self) -> None:
        found = checkpoint.saved(self.out / "checkpoints")
        for one in reversed(found):
            try:
                self._take(one)
            except WeightsError as error:  # damaged from outside: an older one will do
                self.view.note(f"{one.path.name} is passed over: {error}")
                continue
            self.step = one.step
            self.view.note(f"goes on from step {one.step} of {self.run.steps}")
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
        rows = self._rows()
        with _seeded(self.run.seed, self.step):
            culprit, which = blame(self.model, self._micro(), self.objective, self.precision)
        places = [place for one in (rows if which is None else [rows[which]]) for place in one.where]
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
            self.score = self._score(self.run.data.length, self.run.eval.tokens)
            text = self._sample()
        self.seconds += time.monotonic() - began
        score = self.score
        self.judged_at = self.step
        self._tell(Evaluated(self.step, score.loss, score.perplexity, score.bits_per_byte))
        if text is not None:
            self._tell(Sample(self.step, text))

    def _score(self, stride: int, limit: int | None, *, shown: bool = False) -> Score:
        """The score on the held-out text of all sources; with a limit, on the first tokens of each, so many in all."""
        length, total = self.run.data.length, Score(0.0, 0, 0)
        share = min(1.0, limit / sum(map(len, self.held))) if limit is not None else 1.0
        rows = max(1, min(8192, limit or 8192) // length)
        for held in self.held:
            count, text = math.ceil(share * len(held) / stride / rows), 0

            def batches(chosen: Iterable[tuple[Rows, Tensor]]) -> Iterator[Batch]:
                nonlocal text
                for one in chosen:
                    batch = self._labelled(*one)
                    text += int(self._bytes_of[batch.labels[batch.labels != IGNORED]].sum())
                    yield batch

            chosen = islice(windows(held, length, stride, rows), count)
            asked = batches(self._watched(chosen, count) if shown else chosen)
            nats, tokens = evaluate(self.model, asked, self.judged, self.precision)
            text = held.bytes if limit is None else text  # some tokenizers' ids do not tell what they were made of
            total = Score(total.nats + nats, total.tokens + tokens, total.bytes + text)
        return total

    @cached_property
    def _bytes_of(self) -> Tensor:
        """[V]: bytes of text that each id stands for."""
        return torch.tensor([len(self.tokenizer.token_bytes(token)) for token in range(self.tokenizer.size)])

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
            plot_loss(self.out / "loss.png", read_metrics(self.metrics.path), bytes_per_token=self.bytes_per_token)
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
            checkpoint.write(folder, self.step, self.model, self.tokenizer, tensors, facts)
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
        return one.step % self.run.save.every == 0 or one.step == self.run.steps

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
            score = self._score(min(stride, run.data.length), run.eval.final, shown=True)
            self.tokenizer.save(self.out / "model")
            save(self.model, self.out / "model")
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
