"""Runs the children, and gathers what they tell."""

from __future__ import annotations

import ast
import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fuzz.child import SECONDS, SOURCE
from tests.fuzz.seeds import make

ROOT = Path(__file__).parents[2]
SHARES = {"safetensors": 0.35, "GGUF": 0.3, "GGUF part": 0.05, "config.json": 0.2, "index.json": 0.1}
CHILD = ["-m", "tests.fuzz.child"]
PATIENCE = 60  # seconds of the wall for one input: a reader that waits takes no processor
READERS = (
    "weights/safetensors.py",
    "weights/load.py",
    "gguf_header.py",
    "weights/gguf/checkpoint.py",
    "weights/gguf/tensors.py",
)
NOT_OF_FILES = {
    "dtype=": "asked for, not in a file",
    "device ": "asked for, not in a file",
    "_why_not(folder)": "there is one",
    "neither spec.json": "there is one",
    "{PICKLES}": "tried in tests/weights/test_load.py",
    "and no {stem}": "tried in tests/weights/test_load.py",
    "cannot be read": "the disk's failures",
    "more GGUF models": "there is one",
    "no elements of": "refused as weights before",
    "is also in {where": "tried in tests/weights/test_load.py, for it takes two files",
    "is missing; put all": "tried in tests/weights/test_gguf_parts.py, for they are there",
    "beyond the {MAX_HEADER}": "larger than what is made here",
    "path}: {error}": "told again, with the file's name",
    "{file}: {error}": "told again, with the file's name",
    "tensor {name}: {error}": "told again, with the file's name",
    "{error} twice": "told again, with the file's name",
}
"""Refusals that no mutation of a file's content reaches, and why."""


@dataclass
class Found:
    inputs: Counter[str] = field(default_factory=Counter)
    models: Counter[str] = field(default_factory=Counter)
    paths: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """(kind, file, the line at which the statement begins) → how often"""
    seconds: dict[str, float] = field(default_factory=dict)
    bytes: dict[str, int] = field(default_factory=dict)
    """The most of one input."""
    faults: list[str] = field(default_factory=list)

    def take(self, kind: str, told: dict[str, Any]) -> None:
        self.inputs[kind] += 1
        self.seconds[kind] = max(self.seconds.get(kind, 0), told["seconds"])
        self.bytes[kind] = max(self.bytes.get(kind, 0), told["bytes"])
        if "fault" in told:
            self.faults.append(f"{kind}, input {told['i']}: {told['fault']}")
        elif told["where"] is None:
            self.models[kind] += 1
        else:
            file, line = told["where"]
            self.paths[kind, file, beginning(file, line)] += 1
        if told["seconds"] > SECONDS:
            self.faults.append(f"{kind}, input {told['i']}: {told['seconds']:.1f} s")

    def unreached(self) -> list[tuple[str, int]]:
        """The readers' refusals that no input met, but for those that none can."""
        met = {(file, line) for _, file, line in self.paths}
        every = [(file, line) for file in READERS for line, text in refusals(file).items() if not exempt(text)]
        return [place for place in every if place not in met]


def fuzz(folder: Path, inputs: Mapping[str, int], seed: int) -> Found:
    """So many inputs of each kind, each of which depends on its number and the seed alone."""
    make(folder)
    found = Found()
    for kind, count in inputs.items():
        done = 0
        while done < count:
            for told in reading(folder, kind, seed, done, count):
                found.take(kind, told)
                done = told["i"] + 1
    return found


def reading(folder: Path, kind: str, seed: int, first: int, last: int) -> Iterator[dict[str, Any]]:
    """What a child tells of inputs first … last - 1, or up to the one that it does not survive."""
    command = [sys.executable, *CHILD, str(folder), kind, str(seed), str(first), str(last)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    at = first
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, env=environment, text=True, bufsize=1
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while select.select([child.stdout], [], [], PATIENCE)[0]:
            line = child.stdout.readline()
            if not line:
                break
            told = json.loads(line)
            at = told["i"] + 1
            yield told
        else:
            child.kill()
        code = child.wait()
        if at < last:
            why = signal.Signals(-code).name if code < 0 else child.stderr.read()[-2000:]
            yield {"i": at, "fault": f"ended the process: {why}", "seconds": 0.0, "bytes": 0}


_REFUSALS: dict[str, dict[int, str]] = {}


def refusals(file: str) -> dict[int, str]:
    """The statements of a file that raise: {line: what they raise}."""
    if file not in _REFUSALS:
        tree = ast.parse((SOURCE / file).read_text())
        raised = [node for node in ast.walk(tree) if isinstance(node, ast.Raise) and node.exc is not None]
        _REFUSALS[file] = {node.lineno: ast.unparse(node.exc) for node in raised if node.exc is not None}
        _ENDS[file] = {node.lineno: node.end_lineno or node.lineno for node in raised}
    return _REFUSALS[file]


_ENDS: dict[str, dict[int, int]] = {}


def beginning(file: str, line: int) -> int:
    """The line at which the statement of a line begins, if it is one that raises."""
    refusals(file)
    return next((begin for begin, end in _ENDS[file].items() if begin <= line <= end), line)


def exempt(text: str) -> bool:
    return any(part in text for part in NOT_OF_FILES)


def report(found: Found) -> str:
    """What was met, as text."""
    lines = [f"{'':12} {'inputs':>8} {'models':>8} {'refused':>8} {'paths':>6} {'slowest':>9} {'most memory':>12}"]
    for kind, count in found.inputs.items():
        paths = sum(1 for one, _, _ in found.paths if one == kind)
        refused = sum(often for (one, _, _), often in found.paths.items() if one == kind)
        slow, much = f"{found.seconds[kind]:.2f} s", f"{found.bytes[kind] / 1e6:.0f} MB"
        lines.append(f"{kind:12} {count:8} {found.models[kind]:8} {refused:8} {paths:6} {slow:>9} {much:>12}")
    lines.append(f"\n{len({(file, line) for _, file, line in found.paths})} distinct paths")
    for (kind, file, line), often in sorted(found.paths.items(), key=lambda item: (item[0][0], -item[1])):
        lines.append(f"{often:7} {kind:12} {file}:{line}  {refusals(file).get(line, '')[:110]}")
    unreached = found.unreached()
    lines.append(f"\n{len(unreached)} refusals of the readers were not met")
    lines += [f"        {file}:{line}  {refusals(file)[line][:110]}" for file, line in unreached]
    lines.append(f"\n{len(found.faults)} faults")
    lines += found.faults[:20]
    return "\n".join(lines)
