"""How everything here is measured: side by side in one process, memory in a process of its own, rows in one form.

A bench is a file of this folder with `main(options)`, which measures, and ends with `report(name, rows)`.
"""

import ctypes
import gc
import importlib
import inspect
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    quick: bool = False
    """The smallest sizes, once."""
    threads: int | None = None
    """Threads of torch; with one, timings are of CPU time, which other load on the machine does not touch."""
    full: bool = False
    """The largest sizes too, where they take long."""


@dataclass(frozen=True)
class Row:
    """One comparison. Where less is better, a ratio below 1 is ours to boast of."""

    name: str
    ours: float
    peer: float
    peer_name: str
    ratio: float  # ours / peer
    low: float  # quartiles of the ratio over the rounds
    high: float
    unit: str
    goal: str | None = None  # what the ratio should be, such as "≤ 1.05"


def timings(functions: Mapping[str, Callable[[], object]], rounds: int, warm: int = 1) -> dict[str, list[float]]:
    """Seconds of each function in each round. The functions take turns, so that a busy machine is busy for all."""
    for _ in range(warm):
        for function in functions.values():
            function()
    found: dict[str, list[float]] = {name: [] for name in functions}
    names = list(functions)
    gc.collect()
    gc.freeze()  # what is there already is not looked through again each time, which takes a tenth of a second
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            gc.collect()
            start = clock()
            functions[name]()
            found[name].append(clock() - start)
    gc.unfreeze()
    return found


def clock() -> float:
    """Seconds: of CPU time where torch has one thread, which other load does not touch, else of the wall."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


def compared(
    name: str, ours: Sequence[float], peer: Sequence[float], peer_name: str, unit: str = "s", goal: str | None = None
) -> Row:
    """A row from two series of the same rounds: their best, which other load on the machine can only miss."""
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(name, min(ours), min(peer), peer_name, min(ours) / min(peer), low, high, unit, goal)


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def single(name: str, value: float, wanted: float, peer_name: str, unit: str, goal: str | None = None) -> Row:
    """A row of one measured number against a fixed one."""
    ratio = value / wanted
    return Row(name, value, wanted, peer_name, ratio, ratio, ratio, unit, goal)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """p in value ∝ size^p: the slope of a straight line through the logarithms."""
    slope, _ = statistics.linear_regression([math.log(x) for x in sizes], [math.log(y) for y in values])
    return slope


def peak_memory(target: str, *arguments: Any) -> int:
    """Bytes that `module:function` took at its highest, above what its process held when it began.

    function(*arguments) prepares and returns what is to be run. Resident memory, in a fresh process each time, since
    an allocator does not give back what an earlier run took.
    """
    return peaks(target, *arguments)[0]


def peaks(target: str, *arguments: Any) -> list[int]:
    """The same of several runs in one process: function(*arguments) is a generator that prepares and yields them.

    There glibc maps every block from 64 KiB on by itself, and gives it back when it is freed;
    what else is free goes back before each run (malloc_trim), so that none weighs on the next.
    """
    command = [sys.executable, "-m", "bench.harness", target, json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    if inspect.isgeneratorfunction(_named(target)):
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{target}{arguments}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def report(name: str, rows: Sequence[Row], notes: Mapping[str, Any] | None = None) -> None:
    """Prints the rows and writes them, with the machine they come from, to bench/results/NAME.json."""
    table = Table("", "ours", "peer", "", "ratio", "quartiles", "goal", title=f"{name}, on {machine()}")
    for row in rows:
        spread = f"{row.low:.2f} … {row.high:.2f}" if row.low != row.high else ""
        ours, peer = f"{row.ours:.4g} {row.unit}", f"{row.peer:.4g} {row.unit}"
        table.add_row(row.name, ours, peer, row.peer_name, f"{row.ratio:.2f}", spread, row.goal or "")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), **(notes or {}), "rows": [asdict(row) for row in rows]}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def machine() -> str:
    threads = torch.get_num_threads()
    device = (
        torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {threads} thread{'s' * (threads > 1)}"
    )
    return f"{device}, {platform.machine()}, torch {torch.__version__}"


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def _named(target: str) -> Callable[..., Any]:
    module, function = target.split(":")
    return getattr(importlib.import_module(module), function)


def _measure(target: str, arguments: list[Any]) -> list[int]:
    prepared = _named(target)(*arguments)
    return [_peak(run) for run in (prepared if isinstance(prepared, Iterator) else [prepared])]


def _peak(run: Callable[[], object]) -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark, proc(5)
    before = _resident()
    run()
    highest = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(highest.split()[1]) * 1024 - before


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], json.loads(sys.argv[2]))))
