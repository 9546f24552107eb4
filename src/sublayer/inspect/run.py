"""What a finished run came to: the model beside other judges of the same text, and a page that shows it all."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import __version__
from ..data.batches import Batches
from ..data.tokens import Tokens
from ..errors import InputError
from ..files import write_json
from ..text import Tokenizer, load_tokenizer
from ..train.config import Run
from ..train.language import next_token, next_tokens
from ..train.metrics import Evaluated, read_metrics
from ..train.metrics import Sample as Written
from ..train.run import Result
from ..train.view import clock
from ..weights import load
from .compress import xz_bits
from .count import readable
from .ngram import ngram_bits
from .profile import cache_at_70b, cache_bytes, profile_step
from .report import Attention, Report, Sample, size, token_texts
from .trace import attention


@dataclass(frozen=True)
class Judged:
    """Bits per byte of a run's held-out text, under the model and under what every machine has."""

    model: float
    ngram: float
    """An interpolated 5-gram of the bytes of the training text."""
    xz: float
    """`xz -9` of the held-out text alone."""
    xz_given: float
    """What the held-out text adds to the training text packed by `xz -9`."""


def sides(run: Run) -> tuple[Tokens, Tokens]:
    """(training, held-out) tokens of a run with one source. Raises InputError for one with several."""
    if len(run.data.all_sources()) > 1:
        raise InputError("a report is written for runs with one source of text")
    folder = Path(run.out) / "data"
    return Tokens.open(folder / "train"), Tokens.open(folder / "held")


def judge(run: Run, result: Result, say: Callable[[str], None] = lambda line: None) -> Judged:
    """The model beside the other judges, which are counted once and kept in baselines.json."""
    path = Path(run.out) / "baselines.json"
    if not path.exists():
        tokenizer = load_tokenizer(result.folder)
        training, held = (_texts(tokens, tokenizer) for tokens in sides(run))
        say("counting the other judges: a 5-gram of the training text, and xz -9 (about 1.5 s a megabyte)")
        found = {"ngram": ngram_bits(training, held), "xz": xz_bits(held), "xz_given": xz_bits(held, training)}
        write_json(path, found)
    return Judged(result.score.bits_per_byte, **json.loads(path.read_text(encoding="utf-8")))


def a_line(run: Run) -> str:
    """A line of the held-out text that is neither short nor long."""
    held, tokenizer = sides(run)[1], load_tokenizer(Path(run.out) / "tokenizer")
    lines = tokenizer.decode(held.read(0, min(len(held), 4096)).tolist()).splitlines()
    return next((line for line in lines if 20 <= len(line.strip()) <= 60), lines[0][:60] if lines else "")


def _texts(tokens: Tokens, tokenizer: Tokenizer) -> list[str]:
    """The documents again: byte-level tokens lose nothing."""
    return [tokenizer.decode(tokens.document(i).tolist()) for i in range(tokens.documents)]


def report(run: Run, result: Result, judged: Judged, *, title: str, line: str, command: str) -> Report:
    """The page of a run; `line` is the text whose tokens and attention are shown, `command` what made it all."""
    out, score = Path(run.out), result.score
    model, tokenizer = load(result.folder), load_tokenizer(result.folder)
    training, held = sides(run)
    records = read_metrics(out / "metrics.jsonl")
    bits = {record.step: record.bits_per_byte for record in records if isinstance(record, Evaluated)}
    rows = Batches([(training, 1.0)], run.data.length, run.train.batch, run.seed).at(0)
    ids = [*tokenizer.eos[:1], *tokenizer.encode(line)]
    parameters, caches = readable(model.spec.parameters()), cache_at_70b()
    return Report(
        title=title,
        summary=f"{parameters} parameters, trained on {training.documents:,} documents "
        f"({size(training.bytes)}) and judged on {held.documents:,} others ({size(held.bytes)}).",
        facts={
            "bits per byte, held out": f"{score.bits_per_byte:.3f}",
            "perplexity a token": f"{score.perplexity:.1f}",
            "parameters": parameters,
            "tokens learned from": readable(result.step * run.train.batch * run.data.length),
            "of training": clock(result.seconds),
        },
        bits={
            "this model": judged.model,
            "5-gram": judged.ngram,
            "xz -9": judged.xz,
            "xz -9, after the training text": judged.xz_given,
        },
        bits_note="All judge the same held-out documents, their ends included. The 5-gram is an interpolated one "
        "(modified Kneser-Ney) of the bytes of the training text.",
        loss=(out / "loss.png").read_bytes(),
        samples=[
            Sample(
                f"step {record.step}, {bits[record.step]:.2f} bits per byte" if record.step in bits else "",
                run.eval.sample,
                record.sample.removeprefix(run.eval.sample),
            )
            for record in records
            if isinstance(record, Written)
        ],
        tokenizer={
            "ids": f"{tokenizer.size:,}",
            "bytes a token, training text": f"{training.bytes / len(training):.2f}",
            "bytes a token, held-out text": f"{held.bytes / len(held):.2f}",
        },
        lines=[token_texts(tokenizer, ids[1:])],
        attention=Attention(token_texts(tokenizer, ids), attention(model, ids)),
        profile=profile_step(model, next_tokens(rows, tokenizer.eos[0]), next_token, run.optimizer.build(model)),
        machine=f"{platform.machine()}, threads: {torch.get_num_threads()}; "
        f"{run.train.batch} rows of {run.data.length} tokens",
        caches={
            "70B, 64 key/value heads": caches[64],
            "70B, 8 key/value heads": caches[8],
            "this model": cache_bytes(model.spec, 16, 8192),
        },
        caches_note="16 rows of 8,192 tokens in fp16. 70B stands for 80 layers of width 8,192 with 64 query heads.",
        tree=model.spec.tree(),
        command=command,
        versions={
            "seed": str(run.seed),
            "sublayer": __version__,
            "torch": torch.__version__,
            "Python": platform.python_version(),
        },
    )
