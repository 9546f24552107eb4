"""A training step side by side: forward, backward, clipping and fused AdamW, against transformers and litgpt.

GPT-2 and Llama of 6 layers, 6 heads and width 384, rows of 256 tokens, fp32; 10.6M parameters beside the vocabulary's
256 or 50,304 rows, tied. Ours and transformers begin with the same weights, and all see the same batches, so that
their losses must be equal. Each contender is a process of its own; they take turns. Peak memory is what such a process
held above its imports.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

import sublayer
from bench.harness import ROOT, Options, Row, progress, report, single

FAMILIES = ("gpt2", "llama")
VOCABULARIES = (256, 50304)
SIZES = {"dim": 384, "layers": 6, "heads": 6, "hidden": 1024, "length": 256, "rows": 8}
TRANSFORMERS, LITGPT = "transformers", "litgpt"
CURVE = 1e-4  # by how much the loss may differ from that of transformers, from the same weights on the same batches
SCRIPT = Path(__file__).parent / "peers" / "train_step.py"
VENV = ROOT / ".venv" / "litgpt"  # its own, for it wants an older huggingface_hub than transformers does
PINS = ("litgpt==0.5.13", f"torch=={torch.__version__.split('+')[0]}")


def main(options: Options) -> None:
    pythons = {"sublayer": sys.executable, TRANSFORMERS: sys.executable}
    found = _litgpt()
    notes: dict[str, Any] = {"litgpt": found if isinstance(found, str) else PINS[0]}
    if isinstance(found, Path):
        pythons[LITGPT] = str(found)
    rows: list[Row] = []
    for vocab in VOCABULARIES:
        for family in FAMILIES:
            rows += _compared(family, vocab, pythons, options)
    report("train", rows, notes)


def _compared(family: str, vocab: int, pythons: dict[str, str], options: Options) -> list[Row]:
    name = f"{family}, vocabulary {vocab:,}"
    rounds, steps = (2, 1) if options.quick else (9, 2) if vocab < 1000 else (7, 1)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        _write(family, vocab, folder)
        shape = SIZES | {"family": family, "vocab": vocab, "weights": folder, "threads": torch.get_num_threads()}
        contenders = {who: stack.enter_context(_started(python, who, shape)) for who, python in pythons.items()}
        for turn in range(rounds + 1):  # the first one warms up
            progress(f"{name}: round {turn} of {rounds}")
            order = list(contenders.values())
            for contender in order[turn % len(order) :] + order[: turn % len(order)]:
                contender.run(steps, warm=turn == 0)
    return _rows(name, contenders, vocab, SIZES["rows"] * SIZES["length"] * steps)


def _write(family: str, vocab: int, folder: str) -> None:
    """The weights that ours and transformers begin with."""
    dim, layers, heads, hidden = (SIZES[name] for name in ("dim", "layers", "heads", "hidden"))
    if family == "gpt2":
        spec = sublayer.recipes.gpt2(dim, layers, heads, vocab, SIZES["length"])
    else:
        spec = sublayer.recipes.llama(dim, layers, heads, heads, hidden, vocab, tied=True)
    sublayer.save(spec.build(seed=0), folder, layout="hf")


def _rows(name: str, contenders: dict[str, Contender], vocab: int, tokens: int) -> list[Row]:
    ours = contenders["sublayer"]
    theirs = contenders[TRANSFORMERS]
    apart = max(abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True))
    if apart > CURVE:
        raise AssertionError(f"{name}: the loss differs from that of {TRANSFORMERS} by {apart:.1e}")
    peers = {who: contender for who, contender in contenders.items() if contender is not ours}
    fastest = min(peers, key=lambda who: min(peers[who].seconds))
    large = vocab > 1000
    rows: list[Row] = []
    for who, peer in peers.items():
        goals = (["≥ 1.25" if large else "≥ 1.0"] if who == fastest else []) + (
            ["≥ 1.25"] if who == TRANSFORMERS and not large else []
        )
        rows.append(_rate(f"{name}: tokens/s", ours, peer, who, tokens, goals[-1] if goals else None))
    for who, peer in peers.items():
        goal = "≤ 0.75" if who == fastest and large else None
        rows.append(single(f"{name}: peak memory", ours.peak / 1e6, peer.peak / 1e6, who, "MB", goal))
    done = ours.facts["flops"] * tokens / min(ours.seconds)
    rows.append(single(f"{name}: rate", done / 1e9, ours.facts["gemm"] / 1e9, "matrix products", "GFLOP/s"))
    return rows


def _rate(name: str, ours: Contender, peer: Contender, who: str, tokens: int, goal: str | None) -> Row:
    """Tokens a second of the best rounds, and the quartiles of the ratio over all."""
    ratios = [b / a for a, b in zip(ours.seconds, peer.seconds, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    best, other = tokens / min(ours.seconds), tokens / min(peer.seconds)
    return Row(name, best, other, who, best / other, low, high, "", goal)


@dataclass
class Contender:
    """A process that trains when it is told to."""

    process: subprocess.Popen[str]
    complaints: IO[str]
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    peak: int = 0

    def run(self, steps: int, *, warm: bool) -> None:
        assert self.process.stdin is not None
        print(steps, file=self.process.stdin, flush=True)
        answer = self.answer()
        if not warm:
            self.seconds.append(answer["seconds"])
        self.losses += answer["losses"]
        self.peak = max(self.peak, answer["peak"])

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.complaints.seek(0)
            raise RuntimeError(f"{self.process.args}: {self.complaints.read().strip()[-500:]}")
        return json.loads(line)


@contextlib.contextmanager
def _started(python: str, who: str, shape: dict[str, Any]) -> Iterator[Contender]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src") if who == "sublayer" else ""}
    command = [python, str(SCRIPT), who, json.dumps(shape)]
    with (
        tempfile.TemporaryFile("w+") as complaints,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment
        ) as process,
    ):
        contender = Contender(process, complaints)
        try:
            contender.facts = contender.answer()  # built
            yield contender
        finally:
            process.terminate()


def _litgpt() -> Path | str:
    """A Python that has litgpt, made where there is none yet; or why there is none."""
    python = VENV / "bin" / "python"
    if not python.exists():
        progress(f"litgpt: installing {' '.join(PINS)} into {VENV.relative_to(ROOT)}")
        for command in (
            [sys.executable, "-m", "venv", str(VENV)],
            [str(python), "-m", "pip", "install", "--quiet", *PINS],
        ):
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                shutil.rmtree(VENV, ignore_errors=True)
                return f"not measured, for it could not be installed: {(done.stderr.strip().splitlines() or ['?'])[-1]}"
    return python
